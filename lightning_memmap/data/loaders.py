"""Makes the loader of a split that is set up."""

from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn

from lightning_memmap._compat.progress import TrainerProgress
from lightning_memmap.data.first_epoch import show_stored
from lightning_memmap.data.set_up import SetUp
from lightning_memmap.data.split_stores import SplitStores
from lightning_memmap.loading.batches import BatchLoader
from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.loading.packed_batch import PackedCollate
from lightning_memmap.loading.split import SplitRows
from lightning_memmap.loading.super_batch import Collate
from lightning_memmap.loading.variable_batch import LayoutCollate
from lightning_memmap.sampling.packed import PackedSampler
from lightning_memmap.sampling.schedule import SkippedSteps, steps_to_skip
from lightning_memmap.schema.forms import read_declared
from lightning_memmap.store.samples import read_first_sample
from lightning_memmap.store.sources.stream import is_read_once, is_stream, iterate_samples


def make_loader(
    split: str,
    set_up: SetUp,
    stores: SplitStores,
    trainer: L.Trainer | None,
    *,
    skipped: SkippedSteps,
    renew_rows: Callable[[], SplitRows | None],
) -> SuperBatchLoader | BatchLoader:
    """Make the loader of a split.

    Args:
        split: The split, whose rows are set up.
        set_up: The set-up.
        stores: The stores with the present options, some of which may differ from the set-up's.
        trainer: The Trainer, or None for a loader that is iterated over without one.
        skipped: The steps that the run has skipped so far.
        renew_rows: Returns the rows for the next epoch, for stores that are still being built.
    """
    options = stores.options
    topology = set_up.placement.topology
    is_training = split == "train"
    is_overfitting = set_up.planner.is_overfitting
    training_options = dict[str, Any]()
    if is_training:
        progress = None if trainer is None else TrainerProgress(trainer)
        training_options = {"drop_last": options.drop_last, "progress": progress}
        is_packed = isinstance(set_up.placement.splits[split].order, PackedSampler)
        if is_overfitting and options.sampler is not None and not is_packed:
            rank_zero_warn(
                "overfit_batches: rows are read in dataset order, and sampler= is ignored: to"
                " train on some rows in the sampler's order, use limit_train_batches or subset="
                " instead"
            )
        if not is_overfitting:
            training_options["skip_steps"] = steps_to_skip(options.skip_steps)
            training_options["skipped"] = skipped
    order = set_up.make_order(options) if is_training else set_up.placement.splits[split].order
    if is_training and isinstance(order, PackedSampler):
        training_options["weigh"] = order.num_targets
    is_growing = any(store.pending is not None for store in set_up.stores.values())
    loader = SuperBatchLoader(
        set_up.rows[split],
        topology,
        order,
        options.batch_size_of(split),
        collate=_collate(split, set_up, stores),
        transform=options.transform if is_training else options.eval_transform,
        seed=options.seed,
        prefetch=options.prefetch,
        renew_rows=renew_rows if is_growing else None,
        **training_options,
    )
    if trainer is None:
        return BatchLoader(loader, topology.assemble_on or loader.data_devices[0])
    if is_growing and is_training:
        show_stored(trainer)
    if not is_overfitting:
        loader.dataset = loader.batch_sizes
    return loader.placed(topology)


def _collate(split: str, set_up: SetUp, stores: SplitStores) -> Collate:
    # The options of the set-up, for which its rows were loaded.
    options = set_up.options
    dataset = stores.datasets[stores.parts(stores.stored_split(split))[0]]
    schema = set_up.stores[split].schema
    schema.check_declared(read_declared(options.variable, options.nullable))
    if options.windows is not None:
        schema = schema.windowed(options.windows.fields, options.windows.length)
    sample = None
    if schema.has_classes and dataset is not None and not is_read_once(dataset):
        if is_stream(dataset):
            sample = next(iterate_samples(dataset))
        else:
            sample = read_first_sample(dataset, stores.options.num_workers)
    order = set_up.placement.splits[split].order
    if isinstance(order, PackedSampler):
        lengths = set_up.stores[split].lengths
        return PackedCollate(
            schema, order, options.layout, lengths, sample, options.with_row_numbers
        )
    return LayoutCollate(schema, options.layout, options.decode, sample, options.with_row_numbers)
