"""Build a store from a dataset, or open it if it was built before.

A build begins a generation or resumes one, writes the rows that are missing in any order, and
commits the store. `parts` and `append` use the same steps. The rows of a stream are first written
to a temporary file.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from lightning_memmap.errors import StoreError
from lightning_memmap.schema.forms import read_declared
from lightning_memmap.store.building import NUM_PARTS, Building
from lightning_memmap.store.directory import check_free, is_store
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.probes import Probes
from lightning_memmap.store.recognition import recognise
from lightning_memmap.store.request import BuildRequest, find_class_names
from lightning_memmap.store.samples import choose_probe_rows
from lightning_memmap.store.sources.stream import Spool
from lightning_memmap.store.store import Store, open_directory
from lightning_memmap.store.workers import Workers
from lightning_memmap.store.writing import write_missing


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
    request = BuildRequest(dataset, path, num_shards, num_workers, fingerprint, declared, progress)
    return build(request, overwrite=overwrite)


def build(request: "BuildRequest", *, overwrite: bool = False) -> Store:
    """Build a store, or open it; see `build_store`."""
    store = build_missing(request, overwrite=overwrite)
    return open_directory(request.directory.path) if store is None else store


def build_missing(
    request: "BuildRequest", *, overwrite: bool, part: tuple[int, int] | None = None
) -> Store | None:
    """Build a store, or one part of it. Return the store if it was built before, else None."""
    dataset = request.dataset
    num_workers = request.num_workers
    directory = request.directory
    if num_workers and request.is_stream:
        raise ValueError(
            f"num_workers={num_workers} with a {type(dataset).__name__}: its rows are stored in the"
            " order in which they arrive, and this process reads them. Use num_workers=0"
        )
    check_free(directory.path, f"`{request.argument}`")
    if is_store(directory.path) and not overwrite:
        return _reopen(request)
    with ExitStack() as lock, ExitStack() as stack:

        def lock_and_reopen() -> Store | None:
            lock.enter_context(directory.locked())
            exists = is_store(directory.path) and not overwrite
            return _reopen(request, is_locked=True) if exists else None

        # Only the start of a part needs the lock: several processes write parts at once.
        if part is None and (store := lock_and_reopen()) is not None:
            return store
        identity = request.identity
        if request.is_stream:
            with request.show("reading", None, 0) as advance:
                spool = Spool(dataset, directory.path, advance, request.declared)
            stack.callback(spool.close)
            workers = stack.enter_context(Workers(spool, 0))
            probes = _make_probes(spool)
        else:
            workers = stack.enter_context(Workers(dataset, num_workers))
            probes = request.probes(workers)
        more = {} if part is None else {NUM_PARTS: str(part[1])}
        draft = request.draft(workers.dataset, probes, identity, **more)
        if part is not None and (store := lock_and_reopen()) is not None:
            return store
        # Rows that no later build can resume are removed, because they would fill the disk.
        resume = part is not None or not (overwrite or request.is_stream)
        building = Building.begin(
            directory.path, draft, resume=resume, part=part, row_bytes=probes.typical_bytes
        )
        if part is not None:
            lock.close()
        write_and_finish(request, building, workers, probes)
    return None


def write_and_finish(
    request: "BuildRequest", building: Building, workers: Workers, probes: Probes, **changes: Any
) -> None:
    """Write the missing rows. Then commit the store, unless this is a part.

    ``changes`` are values of the manifest that differ from the draft.
    """
    with building:
        write_missing(building, workers, probes, request.show)
        if building.is_part:
            building.sync()
        else:
            building.finish(num_threads=max(2, request.num_workers), show=request.show, **changes)


def _make_probes(spool: Spool) -> Probes:
    digests = tuple((row, spool.hash_row(row)) for row in choose_probe_rows(len(spool)))
    return Probes(spool.schema, digests, 0.0, spool.row_bytes, spool.row_bytes)


def _reopen(request: BuildRequest, *, is_locked: bool = False) -> Store:
    """Open an existing store, if it is the one that would be built."""
    directory = request.directory
    store = open_directory(directory.path)
    if request.num_shards not in (None, store.num_shards):
        raise StoreError(
            f"num_shards={request.num_shards}: the store at {directory.path} has {store.num_shards}"
            f" shards. Build it again with overwrite=True, or use num_shards={store.num_shards}"
        )
    identity = recognise(
        store,
        request.dataset,
        request.fingerprint,
        lambda: request.identity,
        num_workers=request.num_workers,
        progress=request.show,
    )
    if os.access(directory.path, os.W_OK) and (identity is not None or directory.has_unused):
        lock = nullcontext() if is_locked else directory.locked(wait=False)
        # Nothing changes if another process has the lock, or if this one may not write.
        with suppress(StoreError, OSError), lock:
            directory.discard()
            # Another process may have replaced the store since this one opened it.
            if identity is not None and Manifest.read(directory.path) == store.manifest:
                classes = find_class_names(request.dataset) or store.classes
                replace(store.manifest, fingerprint=identity, classes=classes).write(directory.path)
    return store
