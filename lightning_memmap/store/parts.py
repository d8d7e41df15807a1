"""Build a store in parts: processes that know nothing of each other, perhaps on several machines
that share a file system, each write some of its rows; then one of them commits.

All parts write into the same files. The first one makes them, with a plan that the others compare
with theirs. Each part has a journal of its own, which it locks and resumes from. The store is the
one that a single process builds, byte for byte.
"""

import logging
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_memmap.errors import StoreError, check_integer
from lightning_memmap.schema import read_schema
from lightning_memmap.schema.forms import FieldOptions
from lightning_memmap.store.build import Build, explained
from lightning_memmap.store.build_key import KEY, read_key, write_key
from lightning_memmap.store.fingerprint import Fingerprint
from lightning_memmap.store.journal import Journal, PartInUseError, read_part
from lightning_memmap.store.options import BuildOptions
from lightning_memmap.store.places import make_parent, store_directory
from lightning_memmap.store.plan import StorePlan
from lightning_memmap.store.progress import show_progress
from lightning_memmap.store.ranges import missing_ranges
from lightning_memmap.store.reader import Store, open_directory
from lightning_memmap.store.recovery import (
    is_interrupted,
    is_store,
    locked,
    make_room,
    no_store_error,
    parts_path,
    put_in_place,
    remove_tree,
)
from lightning_memmap.store.sources.stream import is_stream
from lightning_memmap.store.workers import Workers
from lightning_memmap.store.writer import check_dataset, check_length, reopen
from lightning_memmap.store.written import WrittenStore

#: The most parts of a build.
_MAX_PARTS = 2**16
#: Parts that a message names.
_MAX_NAMED = 16
_log = logging.getLogger(__name__)


def build_part(
    dataset: Any,
    path: str | Path,
    part: tuple[int, int],
    *,
    num_shards: int | None = None,
    num_workers: int = 0,
    overwrite: bool = False,
    progress: bool = True,
    fingerprint: str | None = None,
    store_dtypes: Mapping[str, str | torch.dtype] | None = None,
    variable: Mapping[str, Any] | None = None,
) -> None:
    """Write one part of a store. `finish_store` makes the store once all parts are written.

    Every process calls this with the same arguments but ``part``, at the same time or one after
    the other, on machines that share the file system of ``path``. A part that was interrupted goes
    on where it stopped when it is called again; one that is written does nothing. Part ``i`` of
    ``n`` is a range of rows: row ``i * num_rows // n`` up to row ``(i + 1) * num_rows // n``.

    Args:
        dataset: The whole dataset, map-style and the same for all parts: see
            `lightning_memmap.store.build_store`. Beside the rows of the part, eight rows are read.
        path: Directory of the store.
        part: ``(i, n)``: this is part ``i``, counted from 0, of ``n``.
        num_shards: Shards that the rows are divided into; by default as of `build_store`.
        num_workers: Worker processes that read and write; with 0, this process does both.
        overwrite: Write the part though a store is there, which `finish_store` is then to replace.
        progress: Show a progress bar.
        fingerprint: The identity of the dataset in your own words. It alone then decides whether
            the parts are of one dataset.
        store_dtypes: Other dtypes in which fields are kept, by name.
        variable: The fields whose rows may differ in length, each with a form.

    Raises:
        TypeError: The dataset has no length, or an argument has the wrong type.
        ValueError: There is no such part, the dataset is empty or a stream, or an argument is out
            of range.
        SchemaError: A sample cannot be stored, or does not fit the first one.
        DatasetError: The dataset raised an error, is random, or is not that of the store that is
            there already; or a worker process died.
        StoreError: Another process writes this part, the other parts are of another dataset or have
            other options, or something else is in the way.
        OSError: The disk is full, or the files cannot be written.
    """
    index, num_parts = check_part(part)
    check_dataset(dataset)
    fields = FieldOptions.of(variable, store_dtypes)
    options = BuildOptions(num_shards, num_workers, fingerprint, fields, progress)
    if is_stream(dataset):
        raise ValueError(
            f"part={index}/{num_parts} of a {type(dataset).__name__}: which rows it gives is known"
            " only as they arrive: build its store in one process, or give a map-style dataset"
        )
    check_length(dataset)
    directory = store_directory(path)
    make_parent(directory)

    def is_finished() -> bool:
        # Such as for a job that was queued again after the store was finished.
        if overwrite or not os.path.lexists(directory):
            return False
        reopen(dataset, directory, options)
        _log.warning("part %s of %s: the store at %s is whole", index, num_parts, directory)
        return True

    if is_finished():
        return
    # Before a row is read: a dataset may cache rows, which would change its identity.
    identity = Fingerprint.of(dataset, fingerprint)
    with Workers(dataset, options.num_workers) as workers:
        build = Build.prepare(workers, directory, options, identity, in_parts=True)
        plan = build.plan
        with locked(directory):
            if is_finished():
                return
            if is_store(plan.building):
                # `finish_store` was killed between the manifest and the rename: all rows are there.
                return
            _make_or_compare(build, num_parts)
            try:
                journal = Journal.of_part(plan.building, index, plan.num_rows)
            except PartInUseError as error:
                raise StoreError(
                    f"part {index} of {num_parts} of the store at {directory} is being written by"
                    f" {error}: give each process a part of its own"
                ) from None
        try:
            with build.write(journal, _rows_of(index, num_parts, plan.num_rows), options.show):
                pass
        except KeyboardInterrupt:
            _log.warning("interrupted: the same part goes on with the rows that it has written")
            raise
        finally:
            journal.close()


def finish_store(
    path: str | Path, *, num_threads: int = 2, overwrite: bool = False, progress: bool = True
) -> Store:
    """Make the store of which `build_part` has written all parts.

    It takes no dataset. A call that was interrupted is repeated; one for a store that is finished
    opens it.

    Args:
        path: Directory of the store.
        num_threads: Threads that compute the checksums, for which every byte is read once.
        overwrite: Replace a store that is there.
        progress: Show a progress bar.

    Returns:
        The open store.

    Raises:
        DatasetError: A probe row that was written differs from what was read before: the dataset
            is random.
        StoreError: A part is missing, incomplete or still being written; a store is there already;
            or something else is in the way.
        OSError: The files cannot be read or written.
    """
    num_threads = check_integer("num_threads", num_threads, 0, "0 or more threads")
    directory = store_directory(path)
    building = parts_path(directory)

    def has_parts() -> bool:
        if os.path.lexists(building):
            return True
        if is_store(directory) or is_interrupted(directory):
            return False
        raise StoreError(
            f"no part of a store at {directory} was written: write each of n parts with"
            " build_part(dataset, path, (i, n)), or with"
            f" `lightning-memmap store build {directory} --dataset ... --part i/n`"
        )

    has_parts()  # Before a lock is made where there is nothing.
    with locked(directory):
        if not has_parts():
            return open_directory(directory)
        if os.path.lexists(directory):
            if not is_store(directory):
                raise no_store_error(directory, "path")
            if not overwrite:
                raise StoreError(
                    f"{directory} exists: replace it by the parts that were written with"
                    f" overwrite=True (--overwrite), or remove {building}"
                )
        make_room(directory)
        if is_store(building):  # A call before this one was killed after the manifest.
            put_in_place(directory, building)
            return open_directory(directory)
        plan, found = _read_plan(directory)
        _check_parts(plan, found["num_parts"])
        probes = tuple((row, digest) for row, digest in found["probes"])
        with explained(directory, "then finish the store again"):
            show = partial(show_progress, hidden=not progress)
            written = WrittenStore.finish(plan, num_threads, show)
        written.check(probes)
        fingerprint = Fingerprint.from_json(found["fingerprint"])
        written.commit(probes, {"dataset": found["dataset"]}, fingerprint)
    return open_directory(directory)


def check_part(part: tuple[int, int]) -> tuple[int, int]:
    """Check the number of a part, and the number of parts, that a user gives.

    Args:
        part: The two numbers.

    Returns:
        The two numbers as Python integers.

    Raises:
        TypeError: They are not two integers.
        ValueError: There is no such part.
    """
    if not isinstance(part, (tuple, list)) or len(part) != 2:
        raise TypeError(f"part={part!r}: give the number of the part and that of all, like (0, 8)")
    index, num_parts = (check_integer("part", number) for number in part)
    if not 1 <= num_parts <= _MAX_PARTS:
        raise ValueError(f"part={index}/{num_parts}: a store has 1 to {_MAX_PARTS} parts")
    if not 0 <= index < num_parts:
        raise ValueError(
            f"part={index}/{num_parts}: parts are counted from 0, so that they are 0/{num_parts} to"
            f" {num_parts - 1}/{num_parts} (of a Slurm array, --array=0-{num_parts - 1})"
        )
    return index, num_parts


def _rows_of(index: int, num_parts: int, num_rows: int) -> range:
    return range(index * num_rows // num_parts, (index + 1) * num_rows // num_parts)


def _make_or_compare(build: Build, num_parts: int) -> None:
    """Make the files of a build, or compare what they were made for. The lock must be held.

    Raises:
        StoreError: They were made for another build.
    """
    plan, changed = build.plan, None
    key = build.key(num_parts=num_parts)
    if os.path.lexists(plan.building):
        try:
            changed = key.difference(read_key(plan.building))
        except FileNotFoundError:
            # A process was killed while it made them.
            remove_tree(plan.building)
        except (ValueError, StoreError, OSError) as error:
            changed = str(error)
    if not os.path.lexists(plan.building):
        plan.make_files()
        write_key(plan.building, key, dataset=build.dataset_name, classes=plan.classes)
    elif changed is not None:
        raise StoreError(
            f"the parts of the store at {plan.path} that were written before are of another build:"
            f" {changed}. Give all parts the same dataset and options, or remove {plan.building} to"
            " start anew. With a fingerprint=... that was given from the first part on, the code of"
            " the dataset may change"
        )


def _read_plan(directory: Path) -> tuple[StorePlan, dict[str, Any]]:
    """What the parts of a store make, and all that they have recorded of it.

    Raises:
        StoreError: It cannot be read, or does not fit this version.
    """
    building = parts_path(directory)
    try:
        found = read_key(building)
        schema, classes = read_schema(found), tuple(found["classes"])
        num_rows, num_shards = found["num_rows"], found["num_shards"]
        plan = StorePlan(directory, num_rows, num_shards, schema, classes, in_parts=True)
        if any(found.get(key) != value for key, value in plan.to_json().items()):
            raise ValueError("it was made by another version of lightning_memmap")
    except (OSError, ValueError, TypeError, KeyError, StoreError) as error:
        raise StoreError(
            f"{building / KEY} cannot be read: {error}: remove {building}, and write all parts"
            " again"
        ) from error
    return plan, found


def _check_parts(plan: StorePlan, num_parts: int) -> None:
    """Check that all parts are written, and that no process is writing one.

    Raises:
        StoreError: Not all of them are. The message names those.
    """
    problems = []
    for index in range(num_parts):
        rows = _rows_of(index, num_parts, plan.num_rows)
        try:
            done = read_part(plan.building, index, plan.num_rows)
        except PartInUseError as error:
            problems.append(f"part {index} is being written by {error}")
            continue
        num_missing = sum(map(len, missing_ranges(done or (), rows.stop, rows.start)))
        if num_missing and done is None:
            problems.append(f"part {index} is missing")
        elif num_missing:
            written = f"{len(rows) - num_missing:,} of {len(rows):,} rows"
            problems.append(f"part {index} was interrupted after {written}")
    if problems:
        more = len(problems) - _MAX_NAMED
        named = "; ".join(problems[:_MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")
        raise StoreError(
            f"the store at {plan.path} has {num_parts} parts, and not all are written: {named}."
            " Run these parts again, with the same dataset and options"
        )
