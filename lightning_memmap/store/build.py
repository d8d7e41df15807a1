"""Build a store: from a dataset, in parts by several processes, or by appending to a store.

A build begins a generation or resumes one, writes the rows that are missing in any order, and
commits the store. In parts, each process writes a range of rows, and one process commits the store.
An append is a build of the old and the new rows with the schema of the old store. The rows of an
iterable are first written to a temporary file.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from functools import partial
from pathlib import Path
from reprlib import repr as short_repr
from typing import Any

from msgspec.structs import replace

from lightning_memmap.errors import DatasetError, StoreError, check_integer, with_article
from lightning_memmap.integers import even_range
from lightning_memmap.schema.forms import Declared, read_declared
from lightning_memmap.sizes import format_bytes
from lightning_memmap.store.build_spec import BuildSpec, find_class_names, get_type_name
from lightning_memmap.store.building import NUM_PARTS, Building, read_draft
from lightning_memmap.store.directory import PARTS_DRAFT, StoreDirectory, check_store_path, is_store
from lightning_memmap.store.files import is_there
from lightning_memmap.store.identity import Identity
from lightning_memmap.store.journal import InUseError, Journal, journal_name
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.paths import store_directory
from lightning_memmap.store.probes import Probes, read_probes
from lightning_memmap.store.progress import show_progress
from lightning_memmap.store.recognition import recognise
from lightning_memmap.store.samples import choose_probe_rows
from lightning_memmap.store.sources.iterable import Spool
from lightning_memmap.store.store import Store, open_directory
from lightning_memmap.store.workers import Workers, make_task_runner
from lightning_memmap.store.writing import Appended, write_missing

#: The most characters of the names of the datasets of a store that was appended to.
_MAX_SOURCE = 4000
#: The most parts of a store.
_MAX_PARTS = 2**16
#: The most parts that an error message names.
_MAX_NAMED = 16
_log = logging.getLogger(__name__)


def build_store(
    dataset: Any,
    path: str | Path,
    *,
    num_shards: int | None = None,
    num_workers: int = 0,
    overwrite: bool = False,
    progress: bool = True,
    fingerprint: str | None = None,
    variable: Sequence[str] | Mapping[str, int] | None = None,
    nullable: Sequence[str] | None = None,
) -> Store:
    """Store a dataset, or open the store where it was built before from the same dataset.

    Several processes may call this at once with one path: one builds, the others wait and use the
    result. A build that was interrupted is resumed by the next one of the same dataset.

    A dataset is recognised by its identity (its class, length, attributes and the source text of
    its class) and by eight rows. If its identity has changed, all rows are compared with the store
    once. Some changes don't show there, such as another file in the directory that the dataset
    reads: set your own ``fingerprint`` for those.

    Args:
        dataset: A map-style dataset: ``dataset[i]`` for ``i`` in ``range(len(dataset))``. Or an
            iterable, such as an ``IterableDataset`` or a generator: its rows are stored in the
            order in which they arrive, and its build cannot be resumed.
        path: Directory of the store. A missing parent directory is created.
        num_shards: Number of shards, at most 65,536. A number with many divisors serves many device
            counts. The default is 24 for fewer than 20,000 rows, for 1, 2, 3, 4, 6, 8, 12 or 24
            devices, and 192 for more rows, which also serves 16, 32, 48, 64 and 96 devices.
        num_workers: Worker processes that read the dataset and write its rows to the files. With 0,
            this process does both; otherwise it reads no row.
        overwrite: Replace a store of another dataset. The old store stays until the new one is
            complete. An interrupted build is not resumed.
        progress: Show a progress bar.
        fingerprint: Your own identity of the dataset, such as a version or a hash: a string that
            changes whenever the rows do. It alone then decides whether a store, or an interrupted
            build, is of this dataset, and no row is read for that.
        variable: The names of fields and lists whose rows may differ in length. Fields that differ
            among the first rows that are read need not be named. If several leading dimensions may
            differ, a dict with their number, such as ``{"matrix": 2}``.
        nullable: The names of fields whose rows may be None. Fields with a None among the first
            rows that are read need not be named.

    Returns:
        The open store.

    Raises:
        TypeError: The dataset has no length, or an argument has the wrong type.
        ValueError: The dataset is empty, or an argument is out of range.
        SchemaError: A sample cannot be stored, or does not fit the first one; the message names row
            and field.
        DatasetError: The dataset raised an error, is random or isn't the one that was stored here,
            or a worker process died.
        StoreError: The existing store is damaged, the path contains something else, this process
            may not write there, or files of other users block the build; or the store would have
            more fields or shards than can be opened.
        OSError: The disk is full, or the files cannot be written.
    """
    declared = read_declared(variable, nullable)
    spec = BuildSpec(dataset, path, num_shards, num_workers, fingerprint, declared, progress)
    return build(spec, overwrite=overwrite)


def build(spec: BuildSpec, *, overwrite: bool = False) -> Store:
    """Build a store, or open it; see `build_store`."""
    store = build_missing(spec, overwrite=overwrite)
    return open_directory(spec.directory.path) if store is None else store


def build_missing(
    spec: BuildSpec, *, overwrite: bool, part: tuple[int, int] | None = None
) -> Store | None:
    """Build a store, or one part of it. Return the store if it was built before, else None."""
    dataset = spec.dataset
    num_workers = spec.num_workers
    directory = spec.directory
    if num_workers and spec.is_iterable_only:
        raise ValueError(
            f"num_workers={num_workers} with a {type(dataset).__name__}: its rows are stored in the"
            " order in which they arrive, and this process reads them. Use num_workers=0"
        )
    check_store_path(directory.path, f"`{spec.argument}`")
    if spec.is_built and not overwrite:
        return _reopen(spec)
    with ExitStack() as lock, ExitStack() as stack:

        def lock_and_reopen() -> Store | None:
            lock.enter_context(directory.locked())
            is_kept = spec.is_built and not overwrite
            return _reopen(spec, is_locked=True) if is_kept else None

        # Only the start of a part needs the lock: several processes write parts at once.
        if part is None and (store := lock_and_reopen()) is not None:
            return store
        spec.fix_identity()
        if spec.is_iterable_only:
            with spec.show("reading", None, 0) as advance:
                spool = Spool(dataset, directory.path, advance, spec.declared)
            stack.callback(spool.close)
            workers = stack.enter_context(Workers(spool, 0))
            probes = _make_probes(spool)
        else:
            workers = stack.enter_context(Workers(dataset, num_workers))
            read = make_task_runner(read_probes, spec.declared)
            probes = workers.run_one(read, len(dataset))
        more = {} if part is None else {NUM_PARTS: str(part[1])}
        draft = spec.draft(len(workers.dataset), probes, **more)
        if part is not None and (store := lock_and_reopen()) is not None:
            return store
        # Rows that no later build can resume are removed, because they would fill the disk.
        resume = part is not None or not (overwrite or spec.is_iterable_only)
        building = Building.begin(
            directory.path, draft, resume=resume, part=part, row_bytes=probes.typical_bytes
        )
        if part is not None:
            lock.close()
        write_and_finish(spec, building, workers, probes)
    return None


def write_and_finish(
    spec: BuildSpec, building: Building, workers: Workers, probes: Probes, **changes: Any
) -> None:
    """Write the missing rows. Then commit the store, unless this is a part.

    ``changes`` are values of the manifest that differ from the draft.
    """
    with building:
        write_missing(building, workers, probes, spec.show)
        if building.is_part:
            building.sync()
        else:
            building.finish(num_threads=max(2, spec.num_workers), show=spec.show, **changes)


def _make_probes(spool: Spool) -> Probes:
    digests = tuple((row, spool.hash_row(row)) for row in choose_probe_rows(len(spool)))
    return Probes(spool.schema, digests, 0.0, spool.row_bytes, spool.row_bytes)


def _reopen(spec: BuildSpec, *, is_locked: bool = False) -> Store:
    """Open an existing store, if it is the one that would be built."""
    directory = spec.directory
    store = open_directory(directory.path)
    if spec.num_shards not in (None, store.num_shards):
        raise StoreError(
            f"num_shards={spec.num_shards}: the store at {directory.path} has {store.num_shards}"
            f" shards. Build it again with overwrite=True, or use num_shards={store.num_shards}"
        )
    identity = recognise(store, spec)
    if os.access(directory.path, os.W_OK) and (identity is not None or directory.has_unused):
        lock = nullcontext() if is_locked else directory.locked(wait=False)
        # Nothing changes if another process has the lock, or if this one may not write.
        with suppress(StoreError, OSError), lock:
            directory.remove_unfinished()
            # Another process may have replaced the store since this one opened it.
            if identity is not None and Manifest.read(directory.path) == store.manifest:
                classes = find_class_names(spec.dataset) or store.classes
                replace(store.manifest, identity=identity, classes=classes).write(directory.path)
    return store


def append_store(
    dataset: Any,
    path: str | Path,
    *,
    num_workers: int = 0,
    fingerprint: str | None = None,
    progress: bool = True,
) -> Store:
    """Append the rows of a dataset to a store. They get the next row numbers.

    A new version is written and then replaces the old one. A process that has the store open keeps
    its rows. An interrupted call leaves the store as it was, and the same call resumes it. All
    bytes of the old version are verified and copied, so the disk must have room for both versions:
    append seldom, and many rows at once.

    Args:
        dataset: A map-style dataset whose samples have the structure, dtypes and shapes of the
            store.
        path: Directory of the store.
        num_workers: Worker processes that read the dataset; with 0, this process does.
        fingerprint: Your own identity of all rows together. Without one, eight rows decide whether
            the store is of a dataset, such as a ``ConcatDataset`` of both.
        progress: Show a progress bar.

    Returns:
        The new version of the store, open.

    Raises:
        TypeError: The dataset has no length, or an argument has the wrong type.
        ValueError: The dataset is empty or only iterable, or an argument is out of range.
        SchemaError: A sample doesn't fit the store; the message names row and field.
        DatasetError: The dataset raised an error or is random, or a worker process died.
        StoreNotFoundError: There isn't a store at this path.
        StoreError: The store is damaged, or this process may not replace it.
        OSError: The disk is full, or the files cannot be written.
    """
    spec = BuildSpec(dataset, path, None, num_workers, fingerprint, Declared(), progress)
    if spec.is_iterable_only:
        raise ValueError(
            f"{with_article(type(dataset).__name__)}: only a map-style dataset can be appended;"
            " build a store from it, and append that store"
        )
    directory = spec.directory
    identity = spec.identity
    open_directory(directory.path)  # Before a lock file is created in an empty directory.
    with directory.locked():
        store = open_directory(directory.path)
        store.check_bytes(spec.show, num_threads=max(2, num_workers))
        classes = _merge_classes(store, dataset)
        both = Appended(store, dataset)
        _log.warning(
            "appending %s rows to %s: copying %s of the old version",
            f"{len(dataset):,}",
            directory.path,
            format_bytes(store.manifest.num_bytes),
        )
        with Workers(dataset, num_workers) as readers:
            read = make_task_runner(read_probes, store.schema)
            probes = readers.run_one(read, len(dataset))
        added = ((store.num_rows + row, digest) for row, digest in probes.digests)
        name = f"{store.manifest.source.get('dataset', 'a table')} + {get_type_name(dataset)}"
        draft = Manifest.draft(
            both.num_rows,
            store.num_shards,
            store.schema,
            probes=(*store.manifest.probes, *added),
            identity=identity,
            classes=classes,
            source={"dataset": name[-_MAX_SOURCE:], ".old rows": store.manifest.content},
        )
        new_identity = Identity({}, fingerprint) if fingerprint is not None else None
        with Workers(both, num_workers) as workers:
            building = Building.begin(
                directory.path, draft, resume=True, row_bytes=store.manifest.row_bytes
            )
            write_and_finish(spec, building, workers, probes, identity=new_identity)
    return open_directory(directory.path)


def _merge_classes(store: Store, dataset: Any) -> tuple[str, ...]:
    """Merge the class names of a store and of a dataset that is appended to it, by label."""
    old = store.classes
    new = find_class_names(dataset)
    if not (old and new):
        return old
    for label, (one, other) in enumerate(zip(old, new, strict=False)):
        if one != other:
            raise DatasetError(
                f"dataset: label {label} is the class {other!r}, and {one!r} in the store at"
                f" {store.path}. Use the labels of the store, whose"
                f" classes are {short_repr(list(old))}"
            )
    return max(old, new, key=len)


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
    variable: Sequence[str] | Mapping[str, int] | None = None,
    nullable: Sequence[str] | None = None,
) -> None:
    """Write one part of a store. `finish_store` commits the store once all parts are written.

    Every process calls this with the same arguments except for ``part``, simultaneously or in any
    order, on machines that share the file system of ``path``. A call for an interrupted part
    resumes it, and a call for a complete part does nothing. Part ``i`` of ``n`` has the rows from
    ``i * num_rows // n`` up to ``(i + 1) * num_rows // n``.

    Args:
        dataset: The complete map-style dataset, the same for all parts: see
            `lightning_memmap.store.build_store`. Eight rows are read in addition to the part.
        path: Directory of the store.
        part: ``(i, n)``: part ``i``, from 0, of ``n``.
        num_shards: Number of shards, with the default of `build_store`.
        num_workers: Worker processes that read and write; with 0, this process does both.
        overwrite: Write the part even if there is a store. `finish_store` then replaces it.
        progress: Show a progress bar.
        fingerprint: Your own identity of the dataset. It alone then decides whether the parts are
            of one dataset.
        variable: Fields whose rows may differ in length; see `build_store`.
        nullable: Fields whose rows may be None.

    Raises:
        TypeError: The dataset has no length, or an argument has the wrong type.
        ValueError: The part doesn't exist, the dataset is empty or only iterable, or an argument is
            out of range.
        SchemaError: A sample cannot be stored, or does not fit the first one.
        DatasetError: The dataset raised an error, is random, or isn't the dataset of an existing
            store; or a worker process died.
        StoreError: Another process writes this part, the other parts are of another dataset or have
            other options, or the path contains something else.
        OSError: The disk is full, or the files cannot be written.
    """
    index, num_parts = check_part(part)
    declared = read_declared(variable, nullable)
    spec = BuildSpec(dataset, path, num_shards, num_workers, fingerprint, declared, progress)
    if spec.is_iterable_only:
        raise ValueError(
            f"part={index}/{num_parts} of a {type(dataset).__name__}: its rows are known only as"
            " they arrive. Build its store in one process, or pass a map-style dataset"
        )
    # A job may have been queued again after the store was finished.
    if (store := build_missing(spec, overwrite=overwrite, part=(index, num_parts))) is not None:
        _log.warning("part %s of %s: the store at %s is complete", index, num_parts, store.path)


def finish_store(
    path: str | Path, *, num_threads: int = 2, overwrite: bool = False, progress: bool = True
) -> Store:
    """Commit a store, once `build_part` has written all of its parts.

    It needs no dataset. Repeat an interrupted call. A call for a finished store opens it.

    Args:
        path: Directory of the store.
        num_threads: Threads that compute the checksums. Every byte is read once.
        overwrite: Replace an existing store.
        progress: Show a progress bar.

    Returns:
        The open store.

    Raises:
        DatasetError: A probe row differs from the first time it was read: the dataset is random.
        StoreError: A part is missing, incomplete or still being written; there is a store already;
            or the path contains something else.
        OSError: The files cannot be read or written.
    """
    num_threads = check_integer("num_threads", num_threads, 0, "0 or more threads")
    directory = StoreDirectory(store_directory(path))
    check_store_path(directory.path, "path")

    # Before a lock file is created in an empty directory.
    if not directory.unfinished(PARTS_DRAFT) and not is_store(directory.path):
        raise StoreError(
            f"no part of a store at {directory.path} was written. Write each of n parts with"
            " build_part(dataset, path, (i, n)), or with"
            f" `lightning-memmap store build {directory.path} --dataset ... --part i/n`"
        )
    with directory.locked():
        if not (generations := directory.unfinished(PARTS_DRAFT)):
            return open_directory(directory.path)
        generation = generations[0]
        if is_store(directory.path) and not overwrite:
            raise StoreError(
                f"{directory.path} exists: replace it by the parts that were written with"
                f" overwrite=True (--overwrite), or remove {generation}"
            )
        try:
            draft = read_draft(generation, PARTS_DRAFT)
            num_parts = int(draft.source[NUM_PARTS])
        except (OSError, ValueError, KeyError, StoreError) as error:
            raise StoreError(
                f"{generation / PARTS_DRAFT} cannot be read: {error}: remove {generation}, and"
                " write all parts again"
            ) from error
        _check_parts(directory.path, draft, generation, num_parts)
        with Building(directory.path, draft, generation) as building:
            show = partial(show_progress, hidden=not progress)
            building.finish(num_threads=max(1, num_threads), show=show)
    return open_directory(directory.path)


def check_part(part: tuple[int, int]) -> tuple[int, int]:
    """Check the part argument of a user: the index of the part, and the number of parts."""
    if not isinstance(part, (tuple, list)) or len(part) != 2:
        raise TypeError(
            f"part={part!r}: must be the index of a part and the number of parts, like (0, 8)"
        )
    index, num_parts = (check_integer("part", number) for number in part)
    if not 1 <= num_parts <= _MAX_PARTS:
        raise ValueError(f"part={index}/{num_parts}: a store has 1 to {_MAX_PARTS} parts")
    if not 0 <= index < num_parts:
        raise ValueError(
            f"part={index}/{num_parts}: the parts are 0/{num_parts} to"
            f" {num_parts - 1}/{num_parts} (for a Slurm array, --array=0-{num_parts - 1})"
        )
    return index, num_parts


def _check_parts(path: Path, draft: Manifest, generation: Path, num_parts: int) -> None:
    """Check that all parts are written, and that no process is writing one."""
    problems = []
    for index in range(num_parts):
        rows = even_range(index, num_parts, draft.num_rows)
        if not is_there(generation / journal_name(index)):
            problems += [f"part {index} is missing"] * bool(rows)
            continue
        try:
            with closing(Journal(generation, rows, index)) as journal:
                if (num_done := journal.num_done) < len(rows):
                    written = f"{num_done:,} of {len(rows):,} rows"
                    problems.append(f"part {index} was interrupted after {written}")
        except InUseError:
            problems.append(f"part {index} is being written")
    if problems:
        more = len(problems) - _MAX_NAMED
        named = "; ".join(problems[:_MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")
        raise StoreError(
            f"the store at {path} has {num_parts} parts, and not all are written: {named}."
            " Run these parts again, with the same dataset and options"
        )
