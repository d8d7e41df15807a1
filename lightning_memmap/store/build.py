"""Everything that builds a store: all of it or nothing, unless it was built before.

Each way is the same act: begin a generation or go on with one, write the rows that are missing in
any order, finish. A build writes all rows of a dataset, a part some of them, an append those of the
old store and then those of the dataset; the rows of a stream are first put into temporary files.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from reprlib import repr as short_repr
from typing import Any

from msgspec.structs import replace
from torch.utils.data import Subset

from lightning_memmap.errors import DatasetError, StoreError, check_integer, with_article
from lightning_memmap.sampling.rows import Shards, default_shards
from lightning_memmap.schema.forms import Declared, read_declared
from lightning_memmap.sizes import format_bytes
from lightning_memmap.store.building import (
    NUM_PARTS,
    Building,
    InUseError,
    Journal,
    journal_name,
    read_draft,
    rows_of_part,
)
from lightning_memmap.store.directory import PARTS, StoreDirectory, check_free, is_store
from lightning_memmap.store.files import is_there
from lightning_memmap.store.identity import Fingerprint, check_given
from lightning_memmap.store.manifest import Manifest, are_class_names, check_num_shards
from lightning_memmap.store.paths import store_directory
from lightning_memmap.store.progress import ShowProgress, show_progress
from lightning_memmap.store.recognition import recognise
from lightning_memmap.store.samples import Probes, probe_rows, take_probes
from lightning_memmap.store.sources.column_dataset import way_out
from lightning_memmap.store.sources.source import telling_samples
from lightning_memmap.store.sources.stream import Spool, is_stream
from lightning_memmap.store.store import Store, open_directory
from lightning_memmap.store.workers import Workers, check_num_workers
from lightning_memmap.store.writing import Appended, write_missing

_MAX_SOURCE = 4000
#: The most parts of a build, and those that a message names.
_MAX_PARTS, _MAX_NAMED = 2**16, 16
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

    A dataset is recognised by its identity: its class, length, attributes and the source text of
    its class, and by eight rows. Where its identity has changed, all rows are compared with the
    store, once. For changes that none of these shows, such as another file in the directory that it
    reads, choose a ``fingerprint`` of your own.

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
        variable: The names of fields and lists whose rows may differ in length, needed only where
            the rows that are read first do not show it. Where more than one leading dimension may
            differ, a dict with the number of them, such as ``{"matrix": 2}``.
        nullable: The names of fields whose rows may be None, needed only where the rows that are
            read first do not show it.

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
    declared = read_declared(variable, nullable)
    asked = Asked(dataset, path, num_shards, num_workers, fingerprint, declared, progress)
    return build(asked, overwrite=overwrite)


def build(asked: "Asked", *, overwrite: bool = False) -> Store:
    """Build what is asked for, or open it; see `build_store`."""
    found = _build(asked, overwrite=overwrite)
    return open_directory(asked.directory.path) if found is None else found


def _build(asked: "Asked", *, overwrite: bool, part: tuple[int, int] | None = None) -> Store | None:
    """Build what is asked for, or a part of it; or open what was built before."""
    dataset, num_workers, directory = asked.dataset, asked.num_workers, asked.directory
    if num_workers and asked.is_stream:
        raise ValueError(
            f"num_workers={num_workers} with a {type(dataset).__name__}: its rows are stored in the"
            " order in which they arrive, and this process reads them; give num_workers=0"
        )
    check_free(directory.path, f"`{asked.argument}`")
    if is_store(directory.path) and not overwrite:
        return _reopen(asked)
    with ExitStack() as lock, ExitStack() as stack:

        def built_meanwhile() -> Store | None:
            lock.enter_context(directory.locked())
            is_there = is_store(directory.path) and not overwrite
            return _reopen(asked, is_locked=True) if is_there else None

        # Parts are begun one after the other; all else is done by several processes at once.
        if part is None and (store := built_meanwhile()) is not None:
            return store
        identity = asked.identity
        if asked.is_stream:
            with asked.show("reading", None, 0) as advance:
                spool = Spool(dataset, directory.path, advance, asked.declared)
            stack.callback(spool.close)
            workers, probes = stack.enter_context(Workers(spool, 0)), _probes_of(spool)
        else:
            workers = stack.enter_context(Workers(dataset, num_workers))
            probes = asked.probes(workers)
        more = {} if part is None else {NUM_PARTS: str(part[1])}
        draft = asked.draft(workers.dataset, probes, identity, **more)
        if part is not None and (store := built_meanwhile()) is not None:
            return store
        # Rows that no build would go on with are not kept: they would keep the disk full.
        resume = part is not None or not (overwrite or asked.is_stream)
        building = Building.begin(
            directory.path, draft, resume=resume, part=part, row_bytes=probes.typical_bytes
        )
        if part is not None:
            lock.close()
        _write(asked, building, workers, probes)
    return None


def _write(
    asked: "Asked", building: Building, workers: Workers, probes: Probes, **changes: Any
) -> None:
    """Write the missing rows, and unless they are a part make the store, with these changes."""
    with building:
        write_missing(building, workers, probes, asked.show)
        if building.is_part:
            building.sync()
        else:
            building.finish(num_threads=max(2, asked.num_workers), show=asked.show, **changes)


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
        variable: Fields whose rows may differ in length; see `build_store`.
        nullable: Fields whose rows may be None.

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
    declared = read_declared(variable, nullable)
    asked = Asked(dataset, path, num_shards, num_workers, fingerprint, declared, progress)
    if asked.is_stream:
        raise ValueError(
            f"part={index}/{num_parts} of a {type(dataset).__name__}: which rows it gives is known"
            " only as they arrive: build its store in one process, or give a map-style dataset"
        )
    # Such as for a job that was queued again after the store was finished.
    if (store := _build(asked, overwrite=overwrite, part=(index, num_parts))) is not None:
        _log.warning("part %s of %s: the store at %s is whole", index, num_parts, store.path)


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

    # Before a lock is made where there is nothing.
    if not directory.unfinished(PARTS) and not is_store(directory.path):
        raise StoreError(
            f"no part of a store at {directory.path} was written: write each of n parts with"
            " build_part(dataset, path, (i, n)), or with"
            f" `lightning-memmap store build {directory.path} --dataset ... --part i/n`"
        )
    with directory.locked():
        if not (found := directory.unfinished(PARTS)):
            return open_directory(directory.path)
        generation = found[0]
        if is_store(directory.path) and not overwrite:
            raise StoreError(
                f"{directory.path} exists: replace it by the parts that were written with"
                f" overwrite=True (--overwrite), or remove {generation}"
            )
        try:
            draft = read_draft(generation, PARTS)
            num_parts = int(draft.source[NUM_PARTS])
        except (OSError, ValueError, KeyError, StoreError) as error:
            raise StoreError(
                f"{generation / PARTS} cannot be read: {error}: remove {generation}, and write all"
                " parts again"
            ) from error
        _check_parts(directory.path, draft, generation, num_parts)
        with Building(directory.path, draft, generation) as building:
            show = partial(show_progress, hidden=not progress)
            building.finish(num_threads=max(1, num_threads), show=show)
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
    was; the same call then goes on where it stopped. This compares all bytes of the old version
    with its checksums, and writes those of the new one, for which the disk must have room: append
    seldom, and much at once.

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
    asked = Asked(dataset, path, None, num_workers, fingerprint, Declared(), progress)
    if asked.is_stream:
        raise ValueError(
            f"{with_article(type(dataset).__name__)}: only a map-style dataset can be appended;"
            " build a store of its own of it, and append that"
        )
    directory, identity = asked.directory, asked.identity
    open_directory(directory.path)  # Before a lock is made where there is nothing.
    with directory.locked():
        store = open_directory(directory.path)
        store.check_bytes(asked.show, num_threads=max(2, num_workers))
        classes = _joined_classes(store, dataset)
        both = Appended(store, dataset)
        _log.warning(
            "appending %s rows to %s: the %s of the old version are copied",
            f"{len(dataset):,}",
            directory.path,
            format_bytes(store.manifest.num_bytes),
        )
        with Workers(dataset, num_workers) as readers:
            probes = take_probes(readers, len(dataset), store.schema, telling_samples)
        added = ((store.num_rows + row, digest) for row, digest in probes.digests)
        name = f"{store.manifest.source.get('dataset', 'a table')} + {_class_name(dataset)}"
        draft = Manifest.draft(
            both.num_rows,
            store.num_shards,
            store.schema,
            probes=(*store.manifest.probes, *added),
            fingerprint=identity,
            classes=classes,
            source={"dataset": name[-_MAX_SOURCE:], ".old rows": store.manifest.content},
        )
        given = Fingerprint({}, fingerprint) if fingerprint is not None else None
        with Workers(both, num_workers) as workers:
            building = Building.begin(
                directory.path, draft, resume=True, row_bytes=store.manifest.row_bytes
            )
            _write(asked, building, workers, probes, fingerprint=given)
    return open_directory(directory.path)


@dataclass(frozen=True)
class Asked:
    """What a user asks to be built, checked."""

    dataset: Any
    path: str | Path
    num_shards: int | None
    num_workers: int
    fingerprint: str | None
    declared: Declared
    progress: bool = True
    #: The argument that decides the path, for messages.
    argument: str = "path"

    def __post_init__(self) -> None:
        if (instead := way_out(self.dataset)) is not None:
            raise TypeError(f"dataset: {instead}")
        if self.num_shards is not None:
            check_num_shards(self.num_shards)
        check_num_workers(self.num_workers)
        check_given(self.fingerprint)

    @property
    def directory(self) -> StoreDirectory:
        """Where the store is to be."""
        return StoreDirectory(store_directory(self.path))

    @property
    def is_stream(self) -> bool:
        """Whether the dataset is iterated over."""
        return is_stream(self.dataset)

    def shards(self, num_rows: int) -> Shards:
        """Rows, divided."""
        given = self.num_shards
        return Shards(num_rows, default_shards(num_rows) if given is None else int(given))

    @property
    def show(self) -> ShowProgress:
        """What shows the progress."""
        return partial(show_progress, hidden=not self.progress)

    @cached_property
    def identity(self) -> Fingerprint:
        """The identity of the dataset when first asked for: before a row is read, which it may
        keep."""
        if not self.is_stream:
            check_length(self.dataset)
        return Fingerprint.of(self.dataset, self.fingerprint)

    def probes(self, workers: Workers) -> Probes:
        """Read the probe rows."""
        return take_probes(workers, len(self.dataset), self.declared, telling_samples)

    def draft(self, rows: Any, probes: Probes, identity: Fingerprint, **more: str) -> Manifest:
        """The manifest of the store, before a row is written."""
        shards = self.shards(len(rows))
        return Manifest.draft(
            shards.num_rows,
            shards.num_shards,
            probes.schema,
            probes=probes.digests,
            fingerprint=identity,
            classes=_class_names(self.dataset),
            source={"dataset": _class_name(self.dataset), **more},
        )


def _probes_of(spool: Spool) -> Probes:
    digests = tuple((row, spool.hash_row(row)) for row in probe_rows(len(spool)))
    return Probes(spool.schema, digests, 0.0, spool.row_bytes, spool.row_bytes)


def _class_name(dataset: Any) -> str:
    """The class of a dataset, as people write it."""
    kind = type(dataset)
    return f"{kind.__module__}.{kind.__qualname__}"


def _class_names(dataset: Any) -> tuple[str, ...]:
    """The names of a dataset's classes, by label."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    names = getattr(dataset, "classes", None)
    columns = getattr(dataset, "features", None)
    if names is None and isinstance(columns, Mapping):
        # Of Hugging Face, where a column of labels has the names. Of several, none is the label.
        found = [each.names for each in columns.values() if hasattr(each, "names")]
        names = found[0] if len(found) == 1 else None
    return tuple(names) if isinstance(names, (list, tuple)) and are_class_names(names) else ()


def _joined_classes(store: Store, dataset: Any) -> tuple[str, ...]:
    """The names of the classes of a store and of a dataset that is appended to it, by label."""
    old, new = store.classes, _class_names(dataset)
    if not (old and new):
        return old
    for label, (one, other) in enumerate(zip(old, new, strict=False)):
        if one != other:
            raise DatasetError(
                f"dataset: label {label} is the class {other!r} there, and {one!r} in the store at"
                f" {store.path}: give the dataset the labels of the store, whose classes are"
                f" {short_repr(list(old))}"
            )
    return max(old, new, key=len)


def check_length(dataset: Any) -> int:
    """Check that a dataset has rows, and says how many: so many."""
    try:
        num_rows = len(dataset)
    except TypeError as error:
        raise TypeError(
            f"dataset={short_repr(dataset)}: {with_article(type(dataset).__name__)} has no length"
            f" ({error}): give a map-style dataset with __len__ and __getitem__, or one that can be"
            " iterated over"
        ) from error
    if num_rows < 1:
        raise ValueError("the dataset is empty: there is nothing to store")
    return num_rows


def _reopen(asked: Asked, *, is_locked: bool = False) -> Store:
    """Open the store that is where one was to be built, if it is the one that would be built."""
    directory = asked.directory
    store = open_directory(directory.path)
    if asked.num_shards not in (None, store.num_shards):
        raise StoreError(
            f"num_shards={asked.num_shards}: the store at {directory.path} has {store.num_shards}"
            f" shards; build it again with overwrite=True, or give num_shards={store.num_shards}"
        )
    found = recognise(
        store,
        asked.dataset,
        asked.fingerprint,
        lambda: asked.identity,
        num_workers=asked.num_workers,
        progress=asked.show,
    )
    if os.access(directory.path, os.W_OK) and (found is not None or directory.has_left):
        lock = nullcontext() if is_locked else directory.locked(wait=False)
        # Who has the lock, or may not write there, leaves it as it is.
        with suppress(StoreError, OSError), lock:
            directory.discard()
            # Another process may have replaced the store since this one opened it.
            if found is not None and Manifest.read(directory.path) == store.manifest:
                classes = _class_names(asked.dataset) or store.classes
                replace(store.manifest, fingerprint=found, classes=classes).write(directory.path)
    return store


def check_part(part: tuple[int, int]) -> tuple[int, int]:
    """Check the number of a part, and the number of parts, that a user gives."""
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


def _check_parts(path: Path, draft: Manifest, generation: Path, num_parts: int) -> None:
    """Check that all parts are written, and that no process is writing one."""
    problems = []
    for index in range(num_parts):
        rows = rows_of_part(index, num_parts, draft.num_rows)
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
