"""Everything that builds a store: all of it or nothing, unless it was built before.

Each way is the same act: begin a generation or go on with one, write the rows that are missing in
any order, finish. A build writes all rows of a dataset, a part some of them, an append those of the
old store and then those of the dataset; the rows of a stream are first put into temporary files.
"""

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import Subset

from lightning_memmap.errors import StoreError, check_integer, with_article
from lightning_memmap.sampling import default_shards
from lightning_memmap.schema import Nullable, Schema, Values, read_schema
from lightning_memmap.schema.fields import dtype_name
from lightning_memmap.schema.forms import FieldOptions
from lightning_memmap.sizes import format_bytes
from lightning_memmap.store.building import (
    Building,
    PartInUseError,
    RowWriter,
    StorePlan,
    explained,
    read_part,
    read_parts,
    variable_bytes,
)
from lightning_memmap.store.directory import PARTS, StoreDirectory, check_free, is_store
from lightning_memmap.store.identity import Fingerprint, check_given
from lightning_memmap.store.manifest import Manifest, are_class_names, check_num_shards
from lightning_memmap.store.places import make_parent, store_directory
from lightning_memmap.store.probes import hash_row, probe_rows, random_dataset_error, take_probes
from lightning_memmap.store.progress import Advance, ShowProgress, show_progress
from lightning_memmap.store.range_writer import RangeWriter
from lightning_memmap.store.ranges import RowRanges, missing_ranges
from lightning_memmap.store.recognition import check_choice, recognise
from lightning_memmap.store.samples import read_row
from lightning_memmap.store.sources import nullable_columns, reading_order, source_of
from lightning_memmap.store.sources.column_dataset import way_out
from lightning_memmap.store.sources.stream import Spool, is_stream
from lightning_memmap.store.store import Store, open_directory
from lightning_memmap.store.workers import Workers, check_num_workers

#: By how much slices are faster than items, as a first guess.
_SLICE_SPEED = 32
#: The same for an item, until the first range was timed.
_ROW_S = 1e-3
_JOURNAL_INTERVAL_S = 5.0
_COPY_BYTES = 32 * 2**20
_MAX_SOURCE = 4000
#: The most parts of a build, and those that a message names.
_MAX_PARTS, _MAX_NAMED = 2**16, 16
_THEN = "the same build then goes on"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuildOptions:
    """How a store is built, as its user says; see `build_store`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: It is out of range.
    """

    num_shards: int | None
    num_workers: int
    fingerprint: str | None
    fields: FieldOptions
    progress: bool

    def __post_init__(self) -> None:
        # As integers of Python, whatever they were given as.
        if self.num_shards is not None:
            object.__setattr__(self, "num_shards", check_num_shards(self.num_shards))
        object.__setattr__(self, "num_workers", check_num_workers(self.num_workers))
        check_given(self.fingerprint)

    def shards_of(self, num_rows: int) -> int:
        """The shards of a store of so many rows."""
        return default_shards(num_rows) if self.num_shards is None else self.num_shards

    @property
    def show(self) -> ShowProgress:
        """What shows the progress."""
        return partial(show_progress, hidden=not self.progress)


def build_store(
    dataset: Any,
    path: str | Path,
    *,
    num_shards: int | None = None,
    num_workers: int = 0,
    overwrite: bool = False,
    progress: bool = True,
    fingerprint: str | None = None,
    check: str = "probes",
    fresh: bool = False,
    store_dtypes: Mapping[str, str | torch.dtype] | None = None,
    variable: Mapping[str, Any] | None = None,
) -> Store:
    """Store a dataset, or open the store where it was built before from the same dataset.

    Several processes may call this at once with one path: one builds, the others wait and use the
    result. A build that was interrupted is resumed by the next one of the same dataset.

    A dataset is recognised by its identity: its class, length, attributes and the source text of
    its class, and by some rows. For changes that none of these shows, such as another file in the
    directory that it reads, choose a ``fingerprint`` of your own.

    Args:
        dataset: Map-style: ``dataset[i]`` for ``i`` in ``range(len(dataset))``. Or one that is
            iterated over, such as an ``IterableDataset`` or a generator: its rows are stored in the
            order in which they arrive, and its build cannot be resumed.
        path: Directory of the store. Its parent is made where it is missing.
        num_shards: Shards that the rows are divided into, at most 65,536. A number with many
            divisors serves many device counts. By default 24 for fewer than 20,000 rows, which
            serve 1, 2, 3, 4, 6, 8, 12 and 24 devices, and 192 from there on, which serve 16, 32,
            48, 64 and 96 too.
        num_workers: Worker processes that read the dataset and write its rows straight into the
            files. With 0, this process does both; otherwise it reads no row.
        overwrite: Replace a store of another dataset. The old store stays until the new one is
            whole. An interrupted build is not resumed.
        progress: Show a progress bar.
        fingerprint: The identity of the dataset in your own words, such as a version or a hash: a
            string that changes whenever the rows do. It alone then decides whether a store, or an
            interrupted build, is of this dataset, and no row is read to find out.
        check: How a dataset without a ``fingerprint`` is compared with the store that is there.
            ``"probes"``: eight rows, and all rows once where its identity has changed. ``"full"``:
            all rows, each time. ``"off"``: length and schema alone.
        fresh: Do not resume an interrupted build.
        store_dtypes: Other dtypes than those of the samples in which fields are kept, by name of
            the field, such as ``{"image": "uint8"}``. Every value must stay what it is.
        variable: The fields and lists whose rows may differ in length, or be None, each with a
            form, such as ``{"audio": "pad", "objects": "list", "age": "nullable"}``. Those that do
            among the first rows that are read need not be named. Of the form only ``dims`` and
            ``nullable`` matter here; see `lightning_memmap.schema.forms`.

    Returns:
        The open store.

    Raises:
        TypeError: The dataset has no length, or an argument has the wrong type.
        ValueError: The dataset is empty, or an argument is out of range.
        SchemaError: A sample cannot be stored, or does not fit the first one; the message names row
            and field.
        DatasetError: The dataset raised an error, is random, is not the one that was stored here,
            or a worker process died.
        StoreError: The store that is there is damaged, the path contains something else, this
            process may not write there, or something that other users have put beside the store is
            in the way; or the store would have more fields or shards than can be opened.
        OSError: The disk is full, or the files cannot be written.
    """
    check_choice(check)
    check_dataset(dataset)
    fields = FieldOptions.of(variable, store_dtypes)
    options = BuildOptions(num_shards, num_workers, fingerprint, fields, progress)
    if num_workers and is_stream(dataset):
        raise ValueError(
            f"num_workers={num_workers} with a {type(dataset).__name__}: its rows are stored in the"
            " order in which they arrive, and this process reads them; give num_workers=0"
        )
    directory = StoreDirectory(store_directory(path))
    check_free(directory.path, "`store_dir`")
    if not overwrite and is_store(directory.path) and not directory.needs_lock:
        store, found = _reopen(dataset, directory.path, options, check)
        if found is not None and os.access(directory.path, os.W_OK):
            with suppress(StoreError, OSError), directory.locked():
                _record(store, found)
        return store
    make_parent(directory.path)
    with directory.locked():
        if is_store(directory.path) and not overwrite:
            store, found = _reopen(dataset, directory.path, options, check)
            if found is not None:
                _record(store, found)
            directory.discard()
            return store
        # Before a row is read: a dataset may cache rows, which would change its identity.
        if is_stream(dataset):
            identity = Fingerprint.of(dataset, fingerprint)
            with options.show("reading", None, 0) as advance:
                spool = Spool(dataset, directory.path, advance, fields)
            with closing(spool):
                build = PlannedBuild.of_stream(dataset, spool, directory.path, options, identity)
                _build_all(build, options, resume=False)
        else:
            check_length(dataset)
            identity = Fingerprint.of(dataset, fingerprint)
            with Workers(dataset, options.num_workers) as workers:
                build = PlannedBuild.of(workers, directory.path, options, identity)
                _build_all(build, options, resume=not (overwrite or fresh))
    return open_directory(directory.path)


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
    directory = StoreDirectory(store_directory(path))
    check_free(directory.path, "`store_dir`")
    make_parent(directory.path)

    def is_finished() -> bool:
        # Such as for a job that was queued again after the store was finished.
        if overwrite or not is_store(directory.path):
            return False
        _reopen(dataset, directory.path, options)
        where = directory.path
        _log.warning("part %s of %s: the store at %s is whole", index, num_parts, where)
        return True

    if is_finished():
        return
    # Before a row is read: a dataset may cache rows, which would change its identity.
    identity = Fingerprint.of(dataset, fingerprint)
    with Workers(dataset, options.num_workers) as workers:
        build = PlannedBuild.of(workers, directory.path, options, identity)
        with directory.locked():
            if is_finished():
                return
            try:
                building = Building.begin_part(
                    build.plan,
                    identity,
                    {**build.contents, "num_parts": num_parts},
                    index,
                    variable_bytes=variable_bytes(build.plan, build.typical_bytes),
                    dataset=build.dataset_name,
                    classes=build.plan.classes,
                )
            except PartInUseError as error:
                raise StoreError(
                    f"part {index} of {num_parts} of the store at {directory.path} is being written"
                    f" by {error}: give each process a part of its own"
                ) from None
        with closing(building):
            try:
                with explained(directory.path, _THEN):
                    rows = _rows_of(index, num_parts, build.plan.num_rows)
                    build.write(building, rows, options.show)
                    building.sync()
            except KeyboardInterrupt:
                _log.warning("interrupted: the same part goes on with the rows that it has written")
                raise


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
    directory = StoreDirectory(store_directory(path))
    check_free(directory.path, "path")

    def find() -> Path | None:
        if found := directory.unfinished(PARTS):
            return found[0]
        if is_store(directory.path):
            return None
        raise StoreError(
            f"no part of a store at {directory.path} was written: write each of n parts with"
            " build_part(dataset, path, (i, n)), or with"
            f" `lightning-memmap store build {directory.path} --dataset ... --part i/n`"
        )

    find()  # Before a lock is made where there is nothing.
    with directory.locked():
        generation = find()
        if generation is None:
            return open_directory(directory.path)
        if is_store(directory.path) and not overwrite:
            raise StoreError(
                f"{directory.path} exists: replace it by the parts that were written with"
                f" overwrite=True (--overwrite), or remove {generation}"
            )
        plan, found = _read_plan(directory.path, generation)
        _check_parts(plan, generation, found["num_parts"])
        building = Building(plan, generation)
        with explained(directory.path, "then finish the store again"):
            building.finish(
                [(row, digest) for row, digest in found["probes"]],
                {"dataset": found["dataset"]},
                msgspec.convert(found["fingerprint"], Fingerprint),
                num_threads=num_threads,
                show=partial(show_progress, hidden=not progress),
            )
    return open_directory(directory.path)


def append_store(
    dataset: Any,
    path: str | Path,
    *,
    num_workers: int = 0,
    fingerprint: str | None = None,
    progress: bool = True,
) -> Store:
    """Add the rows of a dataset to a store. They get the next row numbers.

    The new version is written beside the old one and then takes its place: a process that has the
    store open keeps the rows that it has, and a call that is interrupted leaves the store as it
    was; the same call then goes on where it stopped. This reads all bytes of the old version and
    writes those of the new one, for which the disk must have room: append seldom, and much at once.

    Args:
        dataset: Map-style, with samples of the structure, dtypes and shapes of the store.
        path: Directory of the store.
        num_workers: Worker processes that read the dataset; with 0, this process does.
        fingerprint: The identity of all rows together, in your own words. Without one, eight rows
            decide whether a dataset is that of the store, such as a ``ConcatDataset`` of both.
        progress: Show a progress bar.

    Returns:
        The open store, in its new version.

    Raises:
        TypeError: The dataset has no length, or an argument has the wrong type.
        ValueError: The dataset is empty or a stream, or an argument is out of range.
        SchemaError: A sample does not fit those of the store; the message names row and field.
        DatasetError: The dataset raised an error or is random, or a worker process died.
        StoreNotFoundError: There is no store.
        StoreError: It is damaged, or may not be replaced by this process.
        OSError: The disk is full, or the files cannot be written.
    """
    check_dataset(dataset)
    num_workers = check_num_workers(num_workers)
    check_given(fingerprint)
    if is_stream(dataset):
        raise ValueError(
            f"{with_article(type(dataset).__name__)}: only a map-style dataset can be appended;"
            " build a store of its own of it, and append that"
        )
    check_length(dataset)
    directory = StoreDirectory(store_directory(path))
    show = partial(show_progress, hidden=not progress)
    identity = Fingerprint.of(dataset, fingerprint)
    open_directory(directory.path)  # Before a lock is made where there is nothing.
    with directory.locked():
        store = open_directory(directory.path)
        num_old, classes = store.num_rows, store.manifest.classes
        num_rows = num_old + len(dataset)
        plan = StorePlan(directory.path, num_rows, store.num_shards, store.schema, classes)
        plan.check()
        _log.warning(
            "appending %s rows to %s: the %s of the old version are copied",
            f"{len(dataset):,}",
            directory.path,
            format_bytes(store.manifest.num_bytes),
        )
        name = f"{store.manifest.source.get('dataset', 'a table')} + {_class_name(dataset)}"
        row_bytes, added = store.manifest.row_bytes, list[tuple[int, str]]()
        with Workers(dataset, num_workers) as workers:
            prober = partial(_Prober, schema=store.schema)
            workers.run(prober, probe_rows(len(dataset)), added.append)
            probes = (
                *store.manifest.probes,
                *((num_old + row, digest) for row, digest in sorted(added)),
            )
            build = PlannedBuild(
                workers, name[-_MAX_SOURCE:], plan, probes, identity, _ROW_S, row_bytes, num_old
            )
            contents = {**build.contents, "appended to": store.manifest.content}
            building = Building.begin(
                plan,
                identity,
                contents,
                resume=True,
                variable_bytes=variable_bytes(plan, row_bytes),
            )
            with (
                closing(building),
                explained(directory.path, "the store is as it was; the same call then goes on"),
            ):
                with show("copying", num_old, row_bytes) as advance:
                    _copy_rows(store, building, advance)
                build.write(building, range(num_old, num_rows), show)
                given = Fingerprint({}, fingerprint) if fingerprint is not None else None
                source = {"dataset": build.dataset_name}
                building.finish(probes, source, given, num_threads=num_workers, show=show)
    return open_directory(directory.path)


def _copy_rows(store: Store, building: Building, advance: Advance) -> None:
    """Write the rows of a store into its next version."""
    step = max(1, _COPY_BYTES // max(1, store.manifest.row_bytes))
    with closing(RowWriter(building.path, building.plan.columns, None)) as writer:
        last_sync = monotonic()
        for todo in building.missing(range(store.num_rows)):
            for first in range(todo.start, todo.stop, step):
                rows = range(first, min(first + step, todo.stop))
                numbers = np.arange(rows.start, rows.stop, dtype=np.int64)
                values = []
                for column, opened in zip(building.plan.columns, store.columns, strict=True):
                    found = opened.fetch(numbers)
                    values.append(
                        Values(found)
                        if isinstance(found, Tensor)
                        else Values.of_rows(column.field, found)
                    )
                writer.write(rows, values)
                building.wrote(rows)
                advance(len(rows))
                if monotonic() - last_sync > _JOURNAL_INTERVAL_S:
                    building.sync()
                    last_sync = monotonic()
    building.sync()


@dataclass(frozen=True)
class _Prober:
    """Reads a row twice. Returns the row and its hash."""

    dataset: Any
    schema: Schema

    def __call__(self, row: int) -> tuple[int, str]:
        first, second = (hash_row(read_row(self.dataset, row, self.schema)) for _ in range(2))
        if first != second:
            names = ", ".join(field.name for field in self.schema.fields)
            raise random_dataset_error(row, names)
        return row, first


@dataclass(frozen=True)
class PlannedBuild:
    """Rows of a dataset and the store that they go to, as planned before the first is written.

    Args:
        workers: Read the dataset, or the rows of a stream.
        dataset_name: The class of what the user has given.
        plan: The store.
        probes: Row and hash of the probe rows.
        fingerprint: The identity of the dataset.
        row_s: Seconds that a row takes, as a first guess.
        row_bytes: Bytes of a row, of the largest one that was read.
        first_row: The row of the store that row 0 of the dataset is.
        typical_bytes: Bytes of a typical row.
    """

    workers: Workers
    dataset_name: str
    plan: StorePlan
    probes: tuple[tuple[int, str], ...]
    fingerprint: Fingerprint
    row_s: float
    row_bytes: int
    first_row: int = 0
    typical_bytes: float = 0.0

    @classmethod
    def of(
        cls, workers: Workers, path: Path, options: BuildOptions, fingerprint: Fingerprint
    ) -> "PlannedBuild":
        """Read the probe rows, and check that a store can be made of the dataset."""
        dataset = workers.dataset
        num_rows = len(dataset)
        nullable = dict.fromkeys(nullable_columns(dataset), Nullable())
        fields = replace(options.fields, forms={**nullable, **options.fields.forms})
        probes = take_probes(workers, num_rows, fields)
        classes = _class_names(dataset)
        plan = StorePlan(path, num_rows, options.shards_of(num_rows), probes.schema, classes)
        plan.check()
        return cls(
            workers,
            _class_name(dataset),
            plan,
            probes.digests,
            fingerprint,
            probes.row_s,
            probes.row_bytes,
            typical_bytes=probes.typical_bytes,
        )

    @classmethod
    def of_stream(
        cls, stream: Any, spool: Spool, path: Path, options: BuildOptions, fingerprint: Fingerprint
    ) -> "PlannedBuild":
        """Plan to store the rows of a stream."""
        classes = _class_names(stream)
        num_shards = options.shards_of(len(spool))
        plan = StorePlan(path, len(spool), num_shards, spool.schema, classes)
        plan.check()
        probes = tuple((row, spool.hash_row(row)) for row in probe_rows(len(spool)))
        name, size = _class_name(stream), spool.row_bytes
        workers = Workers(spool, 0)
        return cls(workers, name, plan, probes, fingerprint, 0.0, size, typical_bytes=size)

    @property
    def contents(self) -> dict[str, Any]:
        """What must be the same in a build that goes on with this one, as JSON values."""
        dataset = self.workers.dataset
        # The journal counts rows in the order in which they are read.
        order = reading_order(source_of(dataset, self.plan.schema), len(dataset))
        digest = "" if order is None else xxhash.xxh3_64_hexdigest(order.data)
        return {"probes": [list(probe) for probe in self.probes], "order": digest}

    def write(self, building: Building, rows: range, show: ShowProgress) -> None:
        """Write those of some rows of the store that are missing. The workers end with that."""
        todo = building.missing(rows)
        num_done = len(rows) - sum(map(len, todo))
        with show("storing", len(rows), self.row_bytes, num_done) as advance:
            self._write(building, todo, advance)
        self.workers.close()

    def _write(self, building: Building, todo: list[range], advance: Advance) -> None:
        workers = self.workers
        make: Callable[[Any], RangeWriter] = partial(
            RangeWriter,
            plan=self.plan,
            building=building.path,
            journal=building.journal,
            row_bytes=self.row_bytes,
            first_row=self.first_row,
        )
        last_sync = monotonic()
        with closing(make(workers.dataset)) as writer:
            ranges = RowRanges(
                todo,
                max_rows=writer.max_rows,
                num_workers=workers.num_workers,
                row_s=self.row_s / _SLICE_SPEED if writer.has_arrays else self.row_s,
            )
            written: list[range] = []

            def receive(outcome: tuple[range, float]) -> None:
                nonlocal last_sync
                rows, duration_s = outcome
                ranges.note(len(rows), duration_s)
                written.append(rows)
                advance(len(rows))
                if monotonic() - last_sync > _JOURNAL_INTERVAL_S:
                    writer.finish()
                    note()
                    building.sync()
                    last_sync = monotonic()

            def note() -> None:
                for rows in written:
                    building.wrote(rows)
                written.clear()

            # A worker process makes its own.
            make_work = make if workers.num_workers else lambda _: writer.begin
            try:
                workers.run(make_work, ranges, receive)
                writer.finish()
                note()
            except BaseException:
                workers.close(at_once=True)
                try:
                    writer.finish()
                except OSError:
                    del written[-1:]
                note()
                building.sync()
                raise


def _build_all(build: PlannedBuild, options: BuildOptions, *, resume: bool) -> None:
    """Write all rows that are missing, and commit. The lock must be held."""
    plan = build.plan
    building = Building.begin(
        plan,
        build.fingerprint,
        build.contents,
        resume=resume,
        variable_bytes=variable_bytes(plan, build.typical_bytes),
    )
    is_spooled = isinstance(build.workers.dataset, Spool)
    is_kept = not is_spooled and (resume or not is_store(plan.path))
    try:
        with closing(building), explained(plan.path, _THEN if is_kept else "nothing was changed"):
            build.write(building, range(plan.num_rows), options.show)
            building.finish(
                build.probes,
                {"dataset": build.dataset_name},
                build.fingerprint,
                num_threads=options.num_workers,
                show=options.show,
            )
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            kept = f"{building.num_done:,} of {plan.num_rows:,} rows are kept at {building.path}"
            then = "the same build goes on with them"
            if not is_kept:
                kept = (
                    f"the store at {plan.path} is as it was"
                    if not is_spooled
                    else ("nothing is kept of a stream")
                )
                then = "build it again"
            elif not resume:
                then = "a build without `overwrite` and `fresh` goes on with them"
            _log.warning("interrupted: %s; %s", kept, then)
        if not is_kept:  # It would keep the disk full, and no build would go on with it.
            building.abandon()
        raise


def _class_name(dataset: Any) -> str:
    """The class of a dataset, as people write it."""
    kind = type(dataset)
    return f"{kind.__module__}.{kind.__qualname__}"


def _class_names(dataset: Any) -> tuple[str, ...]:
    """The names of a dataset's classes, by label: its attribute ``classes``, as torchvision's
    datasets have it. None where it is no list of short texts."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    names = getattr(dataset, "classes", None)
    return tuple(names) if isinstance(names, (list, tuple)) and are_class_names(names) else ()


def check_dataset(dataset: Any) -> None:
    """Check that an object that a user gives may be a dataset.

    Args:
        dataset: The object.

    Raises:
        TypeError: It is not. The message says what to give.
    """
    if (instead := way_out(dataset)) is not None:
        raise TypeError(f"the dataset: {instead}")


def check_length(dataset: Any) -> None:
    """Check that a dataset has rows, and says how many.

    Raises:
        TypeError: It has no length.
        ValueError: It is empty.
    """
    try:
        num_rows = len(dataset)
    except TypeError as error:
        raise TypeError(
            f"the dataset, {with_article(type(dataset).__name__)}, has no length ({error}): a"
            " store needs a map-style dataset with __len__ and __getitem__, or one that can be"
            " iterated over"
        ) from error
    if num_rows < 1:
        raise ValueError("the dataset is empty: there is nothing to store")


def _reopen(
    dataset: Any, directory: Path, options: BuildOptions, check: str = "probes"
) -> tuple[Store, Fingerprint | None]:
    """Open the store that is where one was to be built, if it is the one that would be built.

    Args:
        dataset: The dataset.
        directory: Directory of the store.
        options: How it was to be built.
        check: How the dataset is compared with the store.

    Returns:
        The store, and the identity of the dataset that is to be recorded in it; see `recognise`.

    Raises:
        StoreError: It is not one, is damaged, or has other shards or dtypes.
        SchemaError: The options name a field that there is not.
        DatasetError: It was built from another dataset.
    """
    store = open_directory(directory)
    if options.num_shards not in (None, store.num_shards):
        raise StoreError(
            f"num_shards={options.num_shards}: the store at {directory} has {store.num_shards}"
            f" shards; build it again with overwrite=True, or give num_shards={store.num_shards}"
        )
    dtypes = options.fields.dtypes
    store.schema.stored_as(dtypes)  # Names of no field are refused.
    for field in store.schema.fields:
        if field.dtype != dtypes.get(field.name, field.sample_dtype):
            raise StoreError(
                f"store_dtypes: the store at {directory} keeps {field.name!r} as"
                f" {dtype_name(field.dtype)}; build it again with overwrite=True, or give"
                f" store_dtypes={{{field.name!r}: {dtype_name(field.dtype)!r}}}"
            )
    found = recognise(
        store,
        dataset,
        options.fingerprint,
        check=check,
        num_workers=options.num_workers,
        progress=options.show,
    )
    return store, found


def _record(store: Store, fingerprint: Fingerprint) -> None:
    """Record the identity of a dataset whose rows were all equal. The lock must be held."""
    # Another process may have replaced the store since this one opened it.
    with suppress(OSError):
        if Manifest.read(store.path) == store.manifest:
            replace(store.manifest, fingerprint=fingerprint).write(store.path)


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


def _read_plan(path: Path, generation: Path) -> tuple[StorePlan, dict[str, Any]]:
    """What the parts of a store make, and all that they have recorded of it.

    Raises:
        StoreError: It cannot be read, or does not fit this version.
    """
    try:
        found = read_parts(generation)
        schema, classes = read_schema(found), tuple(found["classes"])
        plan = StorePlan(path, found["num_rows"], found["num_shards"], schema, classes)
        if any(found.get(key) != value for key, value in plan.to_json().items()):
            raise ValueError("it was made by another version of lightning_memmap")
    except (OSError, ValueError, TypeError, KeyError, StoreError) as error:
        raise StoreError(
            f"{generation / PARTS} cannot be read: {error}: remove {generation}, and write all"
            " parts again"
        ) from error
    return plan, found


def _check_parts(plan: StorePlan, generation: Path, num_parts: int) -> None:
    """Check that all parts are written, and that no process is writing one.

    Raises:
        StoreError: Not all of them are. The message names those.
    """
    problems = []
    for index in range(num_parts):
        rows = _rows_of(index, num_parts, plan.num_rows)
        try:
            done = read_part(generation, index, plan.num_rows)
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
