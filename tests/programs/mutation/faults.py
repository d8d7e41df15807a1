"""The faults that the tests must find: small slips, each in one place of the package."""

from dataclasses import dataclass
from pathlib import Path

#: The root of the repository.
ROOT = Path(__file__).resolve().parents[3]
PACKAGE = "lightning_memmap"


@dataclass(frozen=True)
class Fault:
    """A replacement of one text in one file of the package.

    Args:
        path: The file, relative to the package.
        slip: What is wrong with the code after the replacement.
        old: The text that is replaced. It occurs once in the file.
        new: The text in its place.
        tests: Tests that should find the fault, as pytest is given them.
    """

    path: str
    slip: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def room(self) -> str:
        """The folder of the package that the fault is in."""
        return self.path.partition("/")[0]

    @property
    def name(self) -> str:
        return f"{self.path}: {self.slip}"


_SAMPLING = [
    Fault(
        "sampling/permutations.py",
        "the permutation ignores the epoch",
        "key = np.array([seed, epoch], np.uint64)",
        "key = np.array([seed, 0], np.uint64)",
        ("tests/sampling/test_sampler.py::test_sampler_other_seed_or_epoch_gives_other_order",),
    ),
    Fault(
        "sampling/permutations.py",
        "shards with one row less are not told apart",
        "keys[sizes < largest, -1] = np.iinfo(np.uint64).max",
        "keys[sizes > largest, -1] = np.iinfo(np.uint64).max",
        (
            "tests/sampling/test_sampler.py::test_sampler_any_range_is_a_slice_of_an_epoch_that_has_each_row_once",
        ),
    ),
    Fault(
        "sampling/sampler.py",
        "a range of positions begins with the first shard",
        "skip = (positions[0] - start * num_shards) // step",
        "skip = 0",
        (
            "tests/sampling/test_sampler.py::test_sampler_any_range_is_a_slice_of_an_epoch_that_has_each_row_once",
        ),
    ),
    Fault(
        "sampling/sampler.py",
        "the block size is missing in the identity of an order",
        'if item.init and item.name != "num_samples"]',
        'if item.init and item.name not in ("num_samples", "shuffle_block")]',
        ("tests/loading/test_state.py::test_state_of_other_blocks_is_refused",),
    ),
    Fault(
        "sampling/schedule.py",
        "an odd tail in two steps loses a row",
        "(shared - shared // 2, shared // 2)",
        "(shared // 2, shared // 2)",
        ("tests/sampling/test_sampler.py::test_step_plan_tail_matches_hand_computed_sizes",),
    ),
    Fault(
        "sampling/schedule.py",
        "two ranges of skipped steps that touch are not merged",
        "if merged and start <= merged[-1][1]:",
        "if merged and start < merged[-1][1]:",
        ("tests/sampling/test_schedule.py::test_steps_are_a_range_or_numbers",),
    ),
    Fault(
        "sampling/weighted.py",
        "frequent classes are drawn more often",
        "= 1 / counts[class_index]",
        "= counts[class_index]",
        ("tests/sampling/test_weighted.py::test_classes_of_a_field_come_equally_often",),
    ),
    Fault(
        "sampling/bucketed.py",
        "rows are sorted by section within length",
        "np.lexsort((lengths, sections))",
        "np.lexsort((sections, lengths))",
        ("tests/sampling/test_bucketed.py::test_rows_meet_others_in_other_epochs",),
    ),
    Fault(
        "sampling/mixture.py",
        "the rest of a share goes to the smallest fraction",
        "np.argsort(rounded - numbers",
        "np.argsort(numbers - rounded",
        ("tests/sampling/test_mixture.py::test_rest_of_the_shares_goes_to_the_largest_fractions",),
    ),
    Fault(
        "sampling/mixture.py",
        "a small training set is read from its start in each epoch",
        "past_points = epoch * integer_part",
        "past_points = integer_part",
        ("tests/sampling/test_mixture.py::test_epochs_go_on_where_those_before_ended",),
    ),
    Fault(
        "sampling/curriculum.py",
        "the first stage lasts forever",
        "sum(start <= epoch for start, _ in self.pairs) - 1",
        "0",
        ("tests/contract/data/test_curriculum.py::test_each_epoch_is_that_of_its_sampler",),
    ),
    Fault(
        "sampling/rows.py",
        "20,000 rows still make 24 shards",
        "num_rows >= _MANY_ROWS",
        "num_rows > _MANY_ROWS",
        ("tests/sampling/test_many_shards.py::test_number_of_shards_follows_from_the_rows",),
    ),
    Fault(
        "sampling/rows.py",
        "the last window of a series is lost",
        "np.maximum(0, last_windows + 1)",
        "np.maximum(0, last_windows)",
        ("tests/data/test_windows.py::test_each_window_is_in_one_shard_and_found_again",),
    ),
    Fault(
        "sampling/selection.py",
        "folds are stratified by the random keys, not by the field",
        "keys.append(read_whole_column(argument, fields, self.stratify))",
        "keys.insert(0, read_whole_column(argument, fields, self.stratify))",
        (
            "tests/sampling/test_selection.py::test_folds_hold_each_row_out_once_and_their_shares_of_each_value",
        ),
    ),
    Fault(
        "sampling/pool.py",
        "rows that two stages of a curriculum share are held twice",
        "distinct(np.concatenate([base.base_index_of(pool, shard) for pool in pools]))",
        "np.sort(np.concatenate([base.base_index_of(pool, shard) for pool in pools]))",
        ("tests/contract/data/test_curriculum.py::test_rows_of_all_orders_are_held_once",),
    ),
]
_PACKING = [
    Fault(
        "sampling/packing.py",
        "each epoch draws the same documents of a mixture",
        "position = epoch * remaining",
        "position = 0",
        ("tests/sampling/test_packed.py::test_mixture_has_its_shares_in_every_epoch",),
    ),
    Fault(
        "sampling/packing.py",
        "a pack has one document more than max_documents",
        "room.close(documents_per_pack[windows, pack] >= max_documents",
        "room.close(documents_per_pack[windows, pack] > max_documents",
        ("tests/sampling/test_packed.py::test_each_token_comes_once_at_a_position_of_its_shard",),
    ),
    Fault(
        "sampling/packed_sampler.py",
        "the first token of a document counts as a target",
        "np.maximum(0, packed.lengths[:, 0].astype(np.int64) - 1)",
        "np.maximum(0, packed.lengths[:, 0].astype(np.int64))",
        ("tests/loading/test_packed_weights.py::test_plan_counts_the_targets_of_the_batches",),
    ),
    Fault(
        "loading/packing.py",
        "the last token of a document predicts the next document",
        "(tokens + 1 < stop) & ~is_padding",
        "(tokens < stop) & ~is_padding",
        ("tests/loading/test_packed_batch.py::test_batch_has_the_documents_of_its_packs",),
    ),
    Fault(
        "loading/packing.py",
        "documents of a pack attend to each other",
        "mask = ids[:, None, :, None] == ids[:, None, None, :]",
        "mask = (ids[:, None, :, None] >= 0) & (ids[:, None, None, :] >= 0)",
        (
            "tests/loading/test_packed_attention.py::test_packed_losses_and_gradients_are_those_of_single_documents",
        ),
    ),
    Fault(
        "loading/packed_rows.py",
        "bounds of documents are those of the whole batch",
        "stops[pack, column + 1] = self.documents.lengths",
        "stops[pack, column] = self.documents.lengths",
        ("tests/loading/test_packed_batch.py::test_batch_has_the_documents_of_its_packs",),
    ),
]
_SCHEMA = [
    Fault(
        "schema/structure.py",
        "values of a dict are taken in the order of its keys",
        "if tuple(keys) == node.keys:",
        "if set(keys) == set(node.keys):",
        ("tests/schema/test_stack.py::test_keys_in_another_order_are_the_same_sample",),
    ),
    Fault(
        "schema/stack.py",
        "the bytes of a text are counted as characters",
        '(joined := "".join(texts)).isascii()',
        '(joined := "".join(texts)) is not None',
        ("tests/schema/test_stack.py::test_any_nested_samples_come_back_as_each_alone_does",),
    ),
    Fault(
        "schema/infer.py",
        "only the first dimension that differs is variable",
        "count = len(is_variable) - is_variable[::-1].index(True)",
        "count = is_variable.index(True) + 1",
        (
            "tests/schema/test_stack.py::test_sizes_may_differ_up_to_the_last_dimension_that_differs",
        ),
    ),
    Fault(
        "schema/shared_memory.py",
        "views of one buffer are not recognised",
        "self.is_shared = not are_distinct or self._do_overlap(mutable.pop(), compared)",
        "self.is_shared = not are_distinct",
        ("tests/store/test_reused_buffers.py::test_map_style_rows_are_those_that_were_given",),
    ),
    Fault(
        "schema/shared_memory.py",
        "only arrays that all overlap are recognised",
        "return bool((stops[order][:-1] > starts[order][1:]).any())",
        "return bool((stops[order][:-1] > starts[order][1:]).all())",
        (
            "tests/store/test_reused_buffers.py::test_two_values_that_overlap_are_recognised_among_others",
        ),
    ),
    Fault(
        "schema/forms.py",
        "a mask is padded with the value of its field",
        "return replace(self, value=0)",
        "return self",
        ("tests/loading/test_records.py::test_layout_that_a_list_cannot_have_is_refused",),
    ),
    Fault(
        "schema/stack.py",
        "arrays of another shape are stacked",
        "if dtype != field.dtype or not field.admits(shape) or field.kind != kind:",
        "if dtype != field.dtype or field.kind != kind:",
        (
            "tests/schema/test_schema.py::test_numbers_that_do_not_fit_are_refused_and_their_field_named",
        ),
    ),
]
_STORE = [
    Fault(
        "store/directory.py",
        "the lock of a directory is shared",
        "fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        (
            "tests/contract/store/test_concurrency.py::test_build_by_three_processes_at_once_reads_the_dataset_once",
        ),
    ),
    Fault(
        "store/directory.py",
        "the parts of an unfinished build are removed as left-overs",
        "elif not any(is_there(path / name) for name in (DRAFT, PARTS_DRAFT)):",
        "elif not is_there(path / DRAFT):",
        ("tests/store/test_parts.py::test_store_of_parts_is_that_of_one_process_byte_for_byte",),
    ),
    Fault(
        "store/directory.py",
        "the generation is committed before it is on the disk",
        "        sync_path(self.files(manifest))\n",
        "",
        (
            "tests/store/test_crash.py::test_disk_that_fails_at_the_commit_leaves_the_old_store_or_the_new_one",
        ),
    ),
    Fault(
        "store/journal.py",
        "rows that were written and not synced count as stored",
        "for rows_written in self._ranges(WRITTEN) if num_bytes else ():",
        "for rows_written in ():",
        ("tests/store/test_crash.py::test_build_resumed_after_a_kill_reads_only_what_is_missing",),
    ),
    Fault(
        "store/building.py",
        "rows are marked as stored before they are synced",
        "self.journal.mark(rows, WRITTEN)",
        "self.journal.mark(rows, KEPT)",
        (
            "tests/store/test_building.py::test_rows_count_as_kept_once_their_files_and_the_names_of_these_are_on_the_disk",
        ),
    ),
    Fault(
        "store/building.py",
        "the probes of a finished store are not compared",
        "            if digest(row) != expected:\n                names",
        "            if False:\n                names",
        ("tests/store/test_building.py::test_row_that_was_lost_on_its_way_to_the_file_is_noticed",),
    ),
    Fault(
        "store/writing.py",
        "a dataset whose rows change is stored",
        "if hash_row(leaves) != expected:",
        "if False:",
        ("tests/store/test_build.py::test_dataset_that_changes_is_noticed_where_it_is_read",),
    ),
    Fault(
        "store/build.py",
        "the old rows are copied without their checksums",
        "store.check_bytes(spec.show, num_threads=max(2, num_workers))",
        "pass",
        ("tests/contract/store/test_append.py::test_damaged_store_is_not_appended_to",),
    ),
    Fault(
        "store/build.py",
        "classes of new rows are not compared with those of the store",
        "if one != other:",
        "if False:",
        ("tests/contract/store/test_append.py::test_appended_labels_of_other_classes_are_refused",),
    ),
    Fault(
        "store/identity.py",
        "a file that was changed in place is taken for the old one",
        '{state.st_size} bytes, {state.st_mtime_ns} ns"',
        '{state.st_size} bytes"',
        (
            "tests/store/test_identity.py::test_fingerprint_of_a_file_that_was_written_again_names_it",
        ),
    ),
    Fault(
        "store/columns.py",
        "a shard's index begins after its first row",
        "stop = np.int64(sum(self.shard_items[:shard]))",
        "stop = np.int64(sum(self.shard_items[: shard + 1]))",
        (
            "tests/store/remote/test_shards.py::test_shards_that_were_fetched_give_their_rows_whatever_else_is_missing",
            "tests/store/remote/test_shards.py::test_row_of_a_url_fetches_its_shard_alone_and_once",
        ),
    ),
    Fault(
        "store/columns.py",
        "the index begins anew with each block of rows",
        "index[:, 0] += num_items",
        "pass",
        ("tests/store/test_variable.py::test_index_of_many_rows_is_written_block_by_block",),
    ),
    Fault(
        "store/files.py",
        "links are followed",
        "SAFE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK",
        "SAFE_FLAGS = os.O_NONBLOCK",
        (
            "tests/store/test_store.py::test_open_damaged_field_file_is_refused_named_and_left_alone",
        ),
    ),
    Fault(
        "store/checksums.py",
        "the chunks of a shard are those of the shard before",
        "self._list_chunks(self._shards == shard)",
        "self._list_chunks(self._shards == shard - 1)",
        ("tests/store/test_checksums.py::test_chunks_of_all_shards_are_all_bytes_once",),
    ),
    Fault(
        "store/manifest.py",
        "a manifest whose digest differs is read",
        "if sign(body) != data:",
        "if False:",
        ("tests/store/test_store.py::test_open_manifest_edited_without_its_digest_is_refused",),
    ),
    Fault(
        "store/recognition.py",
        "a dataset of other rows is taken for that of the store",
        "for values in _read_as_stored(store, read)]) != expected:",
        "for values in _read_as_stored(store, read)]) == b'':",
        ("tests/store/test_recognition.py::test_rebuild_compares_probe_rows",),
    ),
    Fault(
        "store/growing.py",
        "a reader does not wait for all of its rows",
        "bool(self.is_written.take(rows).all())",
        "bool(self.is_written.take(rows).any())",
        (
            "tests/store/test_growing.py::test_rows_of_stores_of_which_one_is_being_built_are_those_of_the_whole_ones",
        ),
    ),
    Fault(
        "store/remote/shards.py",
        "downloaded bytes are not compared with their checksum",
        "if digest.digest() == chunk.checksum:",
        "if True:",
        (
            "tests/store/remote/test_cache.py::test_bit_flipped_in_the_cache_is_found_and_fetched_again",
        ),
    ),
    Fault(
        "store/remote/cache.py",
        "the version that was used last is evicted first",
        "key=lambda path: path.lstat().st_mtime)",
        "key=lambda path: -path.lstat().st_mtime)",
        (
            "tests/store/remote/test_shards.py::test_cache_without_room_drops_what_was_opened_longest_ago",
        ),
    ),
    Fault(
        "store/remote/cache.py",
        "reserved bytes do not count towards the limit",
        "total_bytes = cached_bytes + reserved_bytes",
        "total_bytes = cached_bytes",
        ("tests/store/remote/test_cache.py::test_request_above_the_limit_removes_nothing",),
    ),
    Fault(
        "store/remote/transfer.py",
        "a push replaces what another process has pushed meanwhile",
        "if remote.read_if_exists(MANIFEST, MAX_MANIFEST_BYTES) != before:",
        "if False:",
        ("tests/store/remote/test_files.py::test_push_that_another_comes_between_mixes_nothing",),
    ),
]
_LOADING = [
    Fault(
        "loading/loader.py",
        "a process serves the positions of another one after an uneven step",
        "strided(start, stop, topology.rank, topology.data_parallel_size)",
        "range(start + topology.rank, stop, topology.data_parallel_size)",
        (
            "tests/loading/test_loader.py::TestResume::test_each_process_continues_with_its_own_positions",
        ),
    ),
    Fault(
        "loading/loader.py",
        "skipped steps are delivered",
        "return replace(self._whole_epoch, start=position, skipped=skipped)",
        "return replace(self._whole_epoch, start=position)",
        (
            "tests/contract/resume/test_skipped_steps.py::test_other_steps_have_the_rows_that_they_would_have_had",
        ),
    ),
    Fault(
        "loading/loader.py",
        "an epoch is resumed in another order of rows",
        "(difference := difference_of(saved, now))",
        "(difference := None)",
        ("tests/loading/test_state.py::test_state_of_another_order_is_refused_inside_its_epoch",),
    ),
    Fault(
        "loading/loader.py",
        "each step begins with the same data device",
        "first_device = (first_device + num_rows) % len(devices)",
        "first_device = fetched.first_receiver",
        ("tests/loading/test_loader.py::TestRows::test_epoch_over_all_processes_is_the_stream",),
    ),
    Fault(
        "loading/progress.py",
        "steps that were fetched ahead count as trained",
        "state = state_after(start_state, num_steps - num_untrained)",
        "state = state_after(start_state, num_steps)",
        (
            "tests/contract/resume/test_interrupts.py::test_step_that_is_interrupted_is_resumed_with_what_the_weights_lack",
        ),
    ),
    Fault(
        "loading/batches.py",
        "the checkpoint of the end of an epoch repeats it",
        'self.set_epoch(state["epoch"] + is_at_end)',
        'self.set_epoch(state["epoch"])',
        (
            "tests/loading/test_batches.py::test_loader_that_is_saved_in_any_epoch_goes_on_with_the_next_row",
        ),
    ),
    Fault(
        "loading/memory.py",
        "windows that overlap are copied as if they did not",
        "lengths = (counts[held] - 1) * windows.stride + windows.length",
        "lengths = counts[held] * windows.stride",
        (
            "tests/loading/test_orders.py::test_rows_are_the_same_on_any_number_of_devices_and_processes_wherever_they_live",
        ),
    ),
    Fault(
        "loading/stream.py",
        "a block has no room for the rows that only some shards have",
        "return int(blocks.max(initial=0)) + num_extra_items",
        "return int(blocks.max(initial=0))",
        (
            "tests/loading/test_stream_items.py::TestMemory::test_no_window_has_more_items_than_the_largest_one",
        ),
    ),
    Fault(
        "loading/variable_rows.py",
        "the first item of the padding counts as a value",
        "mask & (index < lengths",
        "mask & (index <= lengths",
        ("tests/test_tensordict_types.py::test_variable_field_is_padded_with_a_mask_beside_it",),
    ),
    Fault(
        "loading/variable_rows.py",
        "each data device pads to its own longest row",
        "device_leaves[index] = rows.replaced(widths=widths)",
        "device_leaves[index] = rows",
        (
            "tests/loading/test_variable_batch.py::test_batches_do_not_depend_on_the_number_of_data_devices",
        ),
    ),
    Fault(
        "loading/step_weight.py",
        "the weight of a loss ignores the number of processes",
        "self.local * factor / total if",
        "self.local / total if",
        (
            "tests/loading/test_step_weight.py::test_scale_makes_the_average_over_processes_the_mean_over_tokens",
        ),
    ),
    Fault(
        "_compat/progress.py",
        "an accumulation group counts steps beyond limit_train_batches",
        "int(min(start + size, trainer.num_training_batches))",
        "start + size",
        (
            "tests/loading/test_step_weight.py::test_micro_batches_are_weighted_by_the_rows_of_their_group",
        ),
    ),
    Fault(
        "loading/super_batch.py",
        "the transforms of all processes draw the same numbers",
        "consumer = self.rank + self.num_processes * index",
        "consumer = index",
        (
            "tests/loading/test_transform.py::TestRandomness::test_random_transform_of_a_consumer_is_the_same_however_consumers_are_grouped",
        ),
    ),
    Fault(
        "loading/transform.py",
        "a transform changes the random state of the program",
        "            np.random.set_state(numpy_state)",
        "            pass",
        (
            "tests/loading/test_transform.py::TestRandomness::test_random_transform_leaves_global_generators_alone",
        ),
    ),
]
_ROW_RANDOM = [
    Fault(
        "loading/row_random.py",
        "each epoch draws the same numbers for a row",
        "return _derive_key(self._seed, self._epoch, stream)",
        "return _derive_key(self._seed, 0, stream)",
        (
            "tests/loading/test_row_random.py::TestDependence::test_numbers_depend_on_seed_epoch_row_and_position",
        ),
    ),
    Fault(
        "loading/row_random.py",
        "a row that is drawn twice gets the same numbers twice",
        "drawn_at = None if order.draws_each_row_once else np.array(positions)",
        "drawn_at = None",
        (
            "tests/loading/test_row_random_loader.py::test_every_order_draws_the_same_numbers_under_every_strategy",
        ),
    ),
    Fault(
        "loading/row_random.py",
        "every four numbers of a row repeat",
        "counter[2] = torch.arange(num, device=self.device).repeat(len(self))",
        "counter[2] = 0",
        (
            "tests/loading/test_row_random.py::TestStatistics::test_numbers_are_uniform_and_independent",
        ),
    ),
    Fault(
        "loading/nested.py",
        "the rows of a data device get the numbers of other rows",
        "return slice((index - first_device) % num_devices, None, num_devices)",
        "return slice(index, None, num_devices)",
        (
            "tests/loading/test_row_random_loader.py::TestOneNumberForEachRow::test_noise_does_not_depend_on_devices_or_order",
        ),
    ),
    Fault(
        "loading/philox.py",
        "one round too few",
        "_ROUNDS = 10",
        "_ROUNDS = 9",
        ("tests/loading/test_row_random.py::TestPhilox",),
    ),
]
_PLACEMENT = [
    Fault(
        "placement/topology.py",
        "the owner of a shard ignores the number of processes",
        "return shard // self.data_parallel_size % len(self.data_devices)",
        "return shard % len(self.data_devices)",
        ("tests/placement/test_topology.py::TestTopology::test_owner_over_all_ranks_is_one",),
    ),
    Fault(
        "placement/topology.py",
        "each process may use all of the host's memory",
        'sharing = {"cpu": topology.num_local_processes}',
        'sharing = {"cpu": 1}',
        (
            "tests/placement/test_plan.py::TestBudgets::test_processes_of_one_machine_share_its_memory",
        ),
    ),
    Fault(
        "placement/plan.py",
        "the budget of a device ignores the splits placed before",
        "_choose_residencies(shards, topology, residency, free_bytes)",
        "_choose_residencies(shards, topology, residency, dict(budget_bytes))",
        (
            "tests/placement/test_plan.py::TestAuto::test_plan_of_several_splits_serves_the_first_one_first",
        ),
    ),
    Fault(
        "placement/plan.py",
        "the block that is read ahead needs no memory",
        "needed = sum(2 * shards.block_bytes for",
        "needed = sum(shards.block_bytes for",
        (
            "tests/placement/test_plan.py::TestStream::test_windows_that_do_not_fit_raise_with_the_largest_that_does",
        ),
    ),
]
_DATA = [
    Fault(
        "data/split_stores.py",
        "a store that was replaced is taken for the one that was checked",
        "known[1:] == origin[1:]",
        "known[1:3] == origin[1:3]",
        (
            "tests/data/test_module.py::TestStores::test_store_that_was_replaced_since_is_compared_again",
        ),
    ),
    Fault(
        "data/set_up.py",
        "evaluation uses random crops",
        'decode = options.decode if split == "train" else use_center_crops(options.decode)',
        "decode = options.decode",
        ("tests/test_image_crop.py::test_row_is_cropped_alike_on_any_number_of_devices",),
    ),
    Fault(
        "data/set_up.py",
        "processes with other batch sizes train together",
        'names = "seed", "batch_size", "shuffle"',
        'names = "seed", "shuffle"',
        ("tests/contract/strategies/test_disagreement.py",),
    ),
    Fault(
        "data/resume.py",
        "a store that has changed since the checkpoint is not noticed",
        "if any(present.get(name, value) != value for name, value in saved.items()):",
        "if False:",
        ("tests/data/test_resume.py::test_other_rows_inside_an_epoch_are_warned_of",),
    ),
    Fault(
        "data/resume.py",
        "a checkpoint of another fold is resumed",
        "if self.train is not None and self.train.subset != subset:",
        "if False:",
        ("tests/data/test_splits.py::test_checkpoint_of_another_subset_is_refused",),
    ),
    Fault(
        "data/set_up.py",
        "only validation keeps the order of the dataset",
        "if is_evaluated or not options.shuffle:",
        'if split.startswith("val") or not options.shuffle:',
        (
            "tests/data/test_module.py::TestWithTrainer::test_stages_after_each_other_see_their_rows",
            "tests/data/test_module.py::TestWithoutTrainer::test_setup_of_one_stage_opens_its_splits",
        ),
    ),
    Fault(
        "data/options.py",
        "the batch size of a split is not that of its datasets",
        "sizes.get(split, sizes.get(SplitName.parse(split).role, self.batch_size))",
        "sizes.get(split, self.batch_size)",
        ("tests/data/test_options.py::test_batch_size_of_a_split_is_that_of_its_datasets",),
    ),
    Fault(
        "data/splits.py",
        "names that differ in case share a store",
        "seen.setdefault(str(name).casefold(), name)",
        "seen.setdefault(str(name), name)",
        ("tests/data/test_splits.py::test_datasets_that_cannot_be_are_refused",),
    ),
    Fault(
        "data/loaders.py",
        "evaluation runs the training transform",
        "transform=options.transform if is_training else options.eval_transform",
        "transform=options.transform",
        (
            "tests/data/test_module.py::TestWithoutTrainer::test_transforms_are_for_training_and_for_the_rest",
        ),
    ),
]
_STRATEGIES = [
    Fault(
        "strategies/common/weighted_loss.py",
        "the loss of an uneven step is not weighted by its rows",
        "closure_loss = scale_loss(closure_loss, self._loss_scale)",
        "pass",
        (
            "tests/strategies/test_superbatch_ddp.py::test_weight_of_uneven_steps_travels_with_their_batches",
        ),
    ),
    Fault(
        "strategies/common/base.py",
        "an attribute that was replaced before is lost",
        "            vars(owner).update(before)\n",
        "",
        (
            "tests/strategies/common/test_base.py::test_undo_restores_what_was_there_and_removes_the_rest",
        ),
    ),
    Fault(
        "strategies/common/base.py",
        "what was patched stays after teardown",
        "def teardown(self) -> None:\n        self.overrides.undo()\n",
        "def teardown(self) -> None:\n",
        (
            "tests/contract/strategies/test_contract.py::test_fit_leaves_nothing_on_module_plugin_and_trainer",
        ),
    ),
    Fault(
        "strategies/common/checkpoints.py",
        "a checkpoint that failed leaves its part",
        "with suppress(OSError):\n                remove_path(partial)",
        "pass",
        (
            "tests/strategies/common/test_checkpoints.py::test_error_leaves_the_old_checkpoint_alone",
        ),
    ),
    Fault(
        "strategies/common/processes.py",
        "a mean over processes changes its input",
        "wide = tensor.to(torch.float64, copy=True)",
        "wide = tensor.to(torch.float64)",
        ("tests/contract/strategies/test_epoch_means.py::test_means_over_an_epoch_are_exact",),
    ),
    Fault(
        "strategies/replicas/merge_logs.py",
        "the replicas' logged values are averaged without their rows",
        "sizes = [call[0] for call in calls]",
        "sizes = [1 for _ in calls]",
        ("tests/strategies/test_data_parallel.py::TestLogs",),
    ),
    Fault(
        "strategies/replicas/merge_outputs.py",
        "packs are weighted by their number, not by their targets",
        "self._weights = weights or self._rows",
        "self._weights = self._rows",
        ("tests/contract/strategies/test_packing.py",),
    ),
    Fault(
        "strategies/replicas/replicas.py",
        "a replica's gradient is added in later steps too",
        "                replica_parameter.grad = None\n",
        "",
        ("tests/strategies/test_data_parallel.py::TestWeights",),
    ),
    Fault(
        "strategies/data_parallel.py",
        "replicas keep the parameters of the first step",
        'with_values=name == "training_step" or name != self._last_step',
        "with_values=name != self._last_step",
        ("tests/strategies/test_data_parallel.py::TestWeights",),
    ),
    Fault(
        "strategies/superbatch_ddp.py",
        "parameters that were frozen later are still waited for",
        "return 0 < num_trained < len(self._trained)",
        "return False",
        (
            "tests/contract/strategies/test_freezing.py::test_thawed_parameters_train_as_on_one_process",
        ),
    ),
    Fault(
        "strategies/fsdp2.py",
        "options of a second Trainer are ignored",
        "            if value != old:\n",
        "            if False:\n",
        (
            "tests/contract/strategies/test_second_trainer.py::test_sharded_module_is_taken_over_as_it_was_sharded_or_not_at_all",
        ),
    ),
    Fault(
        "strategies/pipelining/stage_pipeline.py",
        "micro-batches of unequal size have equal weight",
        "fractions_of(_items_of_parts(items_by_row, row_ranges, num_rows))",
        "fractions_of([1] * len(row_ranges))",
        ("tests/strategies/test_pipeline.py::test_losses_of_steps_are_the_mean_over_rows",),
    ),
    Fault(
        "strategies/pipeline.py",
        "gradients are clipped by the norm of one stage",
        'dist.all_reduce(squares, group=self._group_of("pp"))',
        "pass",
        ("tests/strategies/test_pipeline.py::test_fit_is_as_on_one_device",),
    ),
    Fault(
        "strategies/members/processes.py",
        "results of an earlier run are read",
        "                path.unlink()\n",
        "                pass\n",
        ("tests/strategies/test_independent.py::test_results_of_an_earlier_program_are_removed",),
    ),
]
_COMPARE = [
    Fault(
        "compare/parity.py",
        "a parameter that only the reference trains is not noticed",
        "_trained(record) ^ _trained(reference)",
        "_trained(record) - _trained(reference)",
        (
            "tests/compare/test_parity.py::test_what_differs_is_named",
            "tests/compare/test_parity.py::test_frozen_parameter_is_found_however_small_it_is",
        ),
    ),
    Fault(
        "compare/parity.py",
        "a step that is missing counts as equal",
        "hashes[step : step + 1] != [rows]]",
        "hashes[step : step + 1] not in ([rows], [])]",
        ("tests/compare/test_parity.py::test_what_differs_is_named",),
    ),
    Fault(
        "compare/figures.py",
        "pages that processes share are added up",
        "max(shared for _, shared",
        "sum(shared for _, shared",
        ("tests/compare/test_figures.py::test_each_process_counts_once_however_many_saw_it",),
    ),
    Fault(
        "compare/measure.py",
        "the last step of the warm-up is not where the clock starts",
        "if num_measured >= 0:",
        "if num_measured > 0:",
        ("tests/compare/test_worker.py::test_timed_run_has_steps_parts_and_memory",),
    ),
    Fault(
        "compare/runner.py",
        "a rank without a record is not missed",
        "if ranks != list(range(records[0].world_size if records else 1)):",
        "if not ranks:",
        ("tests/compare/test_runner.py::test_process_without_a_record_is_missed",),
    ),
    Fault(
        "compare/folder.py",
        "a user's folder named variants is cleared",
        "elif _read_schema(path / SPEC) == RUN_SCHEMA:",
        "elif True:",
        ("tests/compare/test_runner.py::test_file_of_others_is_never_removed",),
    ),
]
_CALLBACKS = [
    Fault(
        "callbacks/prediction_table.py",
        "predictions of a subset are stored by dataset row",
        "batch_indices = self._loader.step_positions(batch_idx)",
        "pass",
        ("tests/callbacks/test_prediction_table.py::TestRows",),
    ),
    Fault(
        "callbacks/ranks.py",
        "each process writes the rows that it shares with others",
        "return data_rank not in data_ranks[trainer.global_rank + 1 :]",
        "return True",
        (
            "tests/callbacks/test_prediction_table_in_processes.py::test_ddp_tables_of_all_ranks_are_whole_or_refused_by_all",
        ),
    ),
    Fault(
        "callbacks/row_results.py",
        "results share memory with the module's output",
        "values.append((value.detach() if value.requires_grad else value).clone())",
        "values.append(value.detach())",
        (
            "tests/callbacks/test_row_results.py::test_results_in_memory_that_the_module_uses_again_are_those_of_each_step",
        ),
    ),
    Fault(
        "callbacks/row_results.py",
        "the last results before an exception are lost",
        "        try:\n            self._write_all(trainer)\n        finally:",
        "        try:\n            pass\n        finally:",
        (
            "tests/callbacks/test_row_results.py::test_resumed_run_has_the_results_of_one_that_never_ended",
        ),
    ),
]
_RESULTS = [
    Fault(
        "results/parts.py",
        "rows after the checkpoint that was resumed are kept",
        "stop = min(stop, header.stop)",
        "pass",
        (
            "tests/callbacks/test_row_results.py::test_rows_that_a_resumed_run_skips_have_no_results_of_the_first_run",
        ),
    ),
    Fault(
        "results/folder.py",
        "the epoch that is repeated keeps its old results",
        "if later >= epoch:",
        "if later > epoch:",
        (
            "tests/callbacks/test_row_results.py::test_epoch_that_is_repeated_has_no_results_before_its_end",
        ),
    ),
    Fault(
        "results/folder.py",
        "rows that were not seen have the result 0",
        'float("nan") if is_float else 0',
        "0",
        ("tests/callbacks/test_row_results.py::test_skipped_steps_leave_their_rows_masked",),
    ),
]
_COMMANDS = [
    Fault(
        "commands/rows.py",
        "rows are listed for the wrong data device after an uneven step",
        "by_position[(device - start) % num_devices :: num_devices]",
        "by_position[device::num_devices]",
        ("tests/commands/test_rows.py::test_rows_of_uneven_steps_are_listed_for_their_devices",),
    ),
    Fault(
        "commands/rows.py",
        "a skipped step is looked for in the first epoch",
        "run_step = epoch * len(schedule) + step",
        "run_step = step",
        ("tests/commands/test_rows.py::test_steps_that_are_left_out_are_shown_as_such",),
    ),
    Fault(
        "commands/store_check.py",
        "only the last of several stores decides the exit code",
        "is_damaged |= _verify_store(store)",
        "is_damaged = _verify_store(store)",
        (
            "tests/commands/test_store.py::TestFolder::test_others_go_on_after_a_store_that_cannot_be_read",
        ),
    ),
    Fault(
        "commands/store_rates.py",
        "an error names the row of the trial",
        "row = chosen.indices[int(match[2])]",
        "row = int(match[2])",
        ("tests/commands/test_store.py::TestPlanOfData::test_error_names_the_row_of_the_dataset",),
    ),
]
_COMPAT = [
    Fault(
        "_compat/progress.py",
        "an open accumulation group counts as trained",
        "return waiting + int(not is_processed)",
        "return int(not is_processed)",
        ("tests/contract/resume/test_interrupts.py",),
    ),
    Fault(
        "_compat/metrics.py",
        "the replicas' metrics are averaged without their counts",
        "(value * (n / total)",
        "(value * (1 / len(values))",
        ("tests/_compat/test_metrics.py::test_means_of_replicas_are_weighted_by_their_updates",),
    ),
]

FAULTS = [
    *_SAMPLING,
    *_PACKING,
    *_SCHEMA,
    *_STORE,
    *_LOADING,
    *_ROW_RANDOM,
    *_PLACEMENT,
    *_DATA,
    *_STRATEGIES,
    *_COMPARE,
    *_CALLBACKS,
    *_RESULTS,
    *_COMMANDS,
    *_COMPAT,
]
