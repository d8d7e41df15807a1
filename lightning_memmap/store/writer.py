"""Build a store: all of it or nothing, in parallel, and resumed where it was interrupted.

The rows are written into a sibling directory. The manifest is written last, after everything
else is on the disk, and then one rename puts the store in place. A build that ends before that,
for whatever reason, leaves no store, or the old one. Its journal lists the rows that it has
written; the next build does not read them again.
"""

import logging
import os
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import torch
from torch.utils.data import Subset

from lightning_memmap.errors import StoreError, with_article
from lightning_memmap.schema import Form, Nullable, read_forms
from lightning_memmap.schema.fields import dtype_name
from lightning_memmap.schema.narrowing import check_store_dtypes
from lightning_memmap.store.checksums import compute_checksums
from lightning_memmap.store.columns import Column
from lightning_memmap.store.fingerprint import Fingerprint, check_given
from lightning_memmap.store.journal import BuildPlan, Journal
from lightning_memmap.store.manifest import Manifest, are_class_names, check_num_shards
from lightning_memmap.store.places import make_parent, store_directory
from lightning_memmap.store.plan import StorePlan
from lightning_memmap.store.probes import (
    probe_rows,
    random_dataset_error,
    take_probes,
)
from lightning_memmap.store.progress import Advance, ShowProgress, show_progress
from lightning_memmap.store.range_writer import RangeWriter
from lightning_memmap.store.ranges import RowRanges, missing_ranges
from lightning_memmap.store.reader import Store, open_directory
from lightning_memmap.store.recognition import check_choice, recognise
from lightning_memmap.store.recovery import (
    can_use_unlocked,
    can_write_manifest,
    discard_build,
    is_store,
    locked,
    make_room,
    no_store_error,
    recover,
    remove_tree,
)
from lightning_memmap.store.sources import nullable_columns
from lightning_memmap.store.sources.refusals import way_out
from lightning_memmap.store.sources.stream import Spool, is_stream
from lightning_memmap.store.workers import check_num_workers, run_tasks

#: By how much slices are faster than items, as a first guess.
_SLICE_SPEED = 32
_JOURNAL_INTERVAL_S = 5.0
_log = logging.getLogger(__name__)


def build_store(
    dataset: Any,
    path: str | Path,
    *,
    num_shards: int = 24,
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
        num_shards: Shards that the rows are divided into. A number with many divisors serves many
            device counts; 24 serves 1, 2, 3, 4, 6, 8, 12 and 24. At most 65,536.
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
    check_build(dataset, num_shards, num_workers, fingerprint)
    num_shards = int(num_shards)
    dtypes = check_store_dtypes(store_dtypes)
    forms = read_forms(variable)
    if num_workers and is_stream(dataset):
        raise ValueError(
            f"num_workers={num_workers} with a {type(dataset).__name__}: its rows are stored in the"
            " order in which they arrive, and this process reads them; give num_workers=0"
        )
    show = partial(show_progress, hidden=not progress)
    directory = store_directory(path)

    def use_what_is_there() -> tuple[Store, Fingerprint | None]:
        store = reopen(directory, num_shards, dtypes)
        return store, recognise(
            store, dataset, fingerprint, check=check, num_workers=num_workers, progress=show
        )

    if not overwrite and can_use_unlocked(directory):
        store, found = use_what_is_there()
        if found is not None and can_write_manifest(directory):
            with suppress(StoreError), locked(directory):
                _record(store, found)
        return store
    make_parent(directory)
    with locked(directory):
        recover(directory)
        if os.path.lexists(directory) and not (overwrite and is_store(directory)):
            store, found = use_what_is_there()
            if found is not None:
                _record(store, found)
            discard_build(directory)
            return store
        make_room(directory)
        if not is_stream(dataset):
            check_length(dataset)
        # Before a row is read: a dataset may cache rows, which would change its identity.
        identity = Fingerprint.of(dataset, fingerprint)
        if is_stream(dataset):
            with show("reading", None, 0) as advance:
                spool = Spool(dataset, directory.parent, advance, forms, dtypes)
            with closing(spool):
                build = Build.of_stream(dataset, spool, directory, num_shards, identity)
                build.run(num_workers, show, resume=False)
        else:
            build = Build.prepare(
                dataset, directory, num_shards, num_workers, identity, forms, dtypes
            )
            build.run(num_workers, show, resume=not (overwrite or fresh))
    return open_directory(directory)


def check_build(dataset: Any, num_shards: int, num_workers: int, fingerprint: str | None) -> None:
    """Check what a user gives for a build.

    Args:
        dataset: The dataset.
        num_shards: Shards that its rows are to be divided into.
        num_workers: Processes that are to read it.
        fingerprint: Its identity in the user's own words.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: It is out of range.
    """
    if (instead := way_out(dataset)) is not None:
        raise TypeError(f"the dataset: {instead}")
    check_num_shards(num_shards)
    check_num_workers(num_workers)
    check_given(fingerprint)


def check_length(dataset: Any) -> None:
    """Check that a dataset has rows, and says how many.

    Args:
        dataset: The dataset.

    Raises:
        TypeError: It has no length.
        ValueError: It is empty.
    """
    try:
        num_rows = len(dataset)
    except TypeError as error:
        raise TypeError(
            f"the dataset, {with_article(type(dataset).__name__)}, has no length: a store needs a"
            " map-style dataset with __len__ and __getitem__, or one that can be iterated over"
        ) from error
    if num_rows < 1:
        raise ValueError("the dataset is empty: there is nothing to store")


def reopen(directory: Path, num_shards: int, dtypes: Mapping[str, torch.dtype]) -> Store:
    """Open the store that is where another one was to be built.

    Args:
        directory: Its directory.
        num_shards: Shards that were asked for.
        dtypes: Other dtypes in which fields were to be kept, by name.

    Returns:
        The store.

    Raises:
        StoreError: It is not one, is damaged, or has other shards or dtypes.
    """
    if not is_store(directory):
        raise no_store_error(directory, "`store_dir`")
    store = open_directory(directory)
    if store.num_shards != num_shards:
        raise StoreError(
            f"num_shards={num_shards}: the store at {directory} has {store.num_shards} shards;"
            f" build it anew with overwrite=True, or give num_shards={store.num_shards}"
        )
    for field in store.schema.fields:
        if field.dtype != dtypes.get(field.name, field.sample_dtype):
            raise StoreError(
                f"store_dtypes: the store at {directory} keeps {field.name!r} as"
                f" {dtype_name(field.dtype)}; build it anew with overwrite=True, or give"
                f" store_dtypes={{{field.name!r}: {dtype_name(field.dtype)!r}}}"
            )
    return store


def _record(store: Store, fingerprint: Fingerprint) -> None:
    """Record the identity of a dataset whose rows were all equal. The lock must be held."""
    # Another process may have replaced the store since this one opened it.
    with suppress(OSError):
        if Manifest.read(store.path) == store.manifest:
            replace(store.manifest, fingerprint=fingerprint).write(store.path)


def class_name(dataset: Any) -> str:
    """The class of a dataset, as people write it.

    Args:
        dataset: The dataset.
    """
    kind = type(dataset)
    return f"{kind.__module__}.{kind.__qualname__}"


def _class_names(dataset: Any) -> tuple[str, ...]:
    """The names of a dataset's classes, by label: its attribute ``classes``, as torchvision's
    datasets have it. None where it is no list of short texts."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    names = getattr(dataset, "classes", None)
    return tuple(names) if isinstance(names, (list, tuple)) and are_class_names(names) else ()


@dataclass(frozen=True)
class Build:
    """One build of one dataset, as planned before the first row is written.

    Args:
        dataset: The dataset, or the rows of a stream.
        dataset_name: The class of what the user has given.
        plan: What the build makes.
        probes: Row and hash of the probe rows.
        fingerprint: The identity of the dataset.
        row_s: Seconds that a row takes, as a first guess.
        row_bytes: Bytes of a row, of the largest one that was read.
        first_row: The row of the store that row 0 of the dataset is.
    """

    dataset: Any
    dataset_name: str
    plan: StorePlan
    probes: tuple[tuple[int, str], ...]
    fingerprint: Fingerprint
    row_s: float
    row_bytes: int
    first_row: int = 0

    @classmethod
    def prepare(
        cls,
        dataset: Any,
        path: Path,
        num_shards: int,
        num_workers: int,
        fingerprint: Fingerprint,
        variable: Mapping[str, Form],
        dtypes: Mapping[str, torch.dtype],
        *,
        in_parts: bool = False,
    ) -> "Build":
        """Read the probe rows, and check that a store can be made of the dataset.

        Args:
            dataset: The dataset.
            path: Directory of the store.
            num_shards: Shards that the rows are divided into.
            num_workers: Processes that read the probe rows; with 0, this one.
            fingerprint: The identity of the dataset.
            variable: The forms of fields and lists, by name.
            dtypes: Other dtypes in which fields are kept, by name.
            in_parts: Whether several processes write the rows.
        """
        num_rows = len(dataset)
        variable = {**{name: Nullable() for name in nullable_columns(dataset)}, **variable}
        probes = take_probes(dataset, num_rows, num_workers, variable, dtypes)
        classes = _class_names(dataset)
        plan = StorePlan(path, num_rows, num_shards, probes[0].schema, classes, in_parts)
        plan.check()
        digests = tuple((probe.row, probe.digest) for probe in probes)
        row_s = median(probe.duration_s for probe in probes)
        row_bytes = max(probe.num_bytes for probe in probes)
        return cls(dataset, class_name(dataset), plan, digests, fingerprint, row_s, row_bytes)

    @classmethod
    def of_stream(
        cls,
        stream: Any,
        spool: Spool,
        path: Path,
        num_shards: int,
        fingerprint: Fingerprint,
    ) -> "Build":
        """Plan to store the rows of a stream.

        Args:
            stream: The stream.
            spool: Its rows.
            path: Directory of the store.
            num_shards: Shards that the rows are divided into.
            fingerprint: The identity of the stream.
        """
        plan = StorePlan(path, len(spool), num_shards, spool.schema, _class_names(stream))
        plan.check()
        probes = tuple((row, spool.hash_row(row)) for row in probe_rows(len(spool)))
        return cls(spool, class_name(stream), plan, probes, fingerprint, 0.0, spool.row_bytes)

    def run(self, num_workers: int, progress: ShowProgress, *, resume: bool) -> None:
        """Write all rows that are not yet written, then commit.

        Args:
            num_workers: Processes that read and write rows; with 0, this one.
            progress: Shows the progress.
            resume: Whether to go on from an interrupted build.
        """
        plan, journal = self.plan, self._open_journal(resume)
        try:
            self.write(journal, range(plan.num_rows), num_workers, progress)
            columns, checksums = finish_files(plan, num_workers, progress)
        except KeyboardInterrupt:
            self._log_what_is_kept(journal, resume)
            raise
        finally:
            journal.close()
        check_written(plan, columns, self.probes)
        source = {"dataset": self.dataset_name}
        plan.commit(columns, self.probes, checksums, source, self.fingerprint)

    @property
    def contents(self) -> dict[str, Any]:
        """What must be the same in a build that goes on with this one, as JSON values."""
        return {**self.plan.to_json(), "probes": [list(probe) for probe in self.probes]}

    def _log_what_is_kept(self, journal: Journal, resume: bool) -> None:
        path = self.plan.path
        if isinstance(self.dataset, Spool):
            _log.warning("interrupted: nothing is kept of a stream; build the store again")
            return
        kept = f"{journal.num_done:,} of {self.plan.num_rows:,} rows are kept beside {path}"
        then = "the same build goes on with them"
        if not resume:
            then = "a build without `overwrite` and `fresh` goes on with them"
            if is_store(path):
                kept, then = f"the store at {path} is as it was", "build it again"
        _log.warning("interrupted: %s; %s", kept, then)

    def _open_journal(self, resume: bool) -> Journal:
        """Make the files, or find those of an interrupted build of the same dataset."""
        plan = self.plan
        build = BuildPlan(self.fingerprint, self.contents, plan.file_bytes)
        journal = Journal.resume(plan.building, build) if resume else None
        if journal is not None:
            return journal
        # In new files: a worker of the old build may still have the old ones open.
        if os.path.lexists(plan.building):
            remove_tree(plan.building)
        plan.make_files()
        return Journal.create(plan.building, build)

    def write(
        self, journal: Journal, rows: range, num_workers: int, progress: ShowProgress
    ) -> None:
        """Write those of some rows that are not yet written.

        Args:
            journal: Lists the rows that are.
            rows: The rows, in a range of step 1.
            num_workers: Processes that read and write; with 0, this one.
            progress: Shows the progress.
        """
        todo = missing_ranges(journal.done, rows.stop, rows.start)
        num_done = len(rows) - sum(map(len, todo))
        with progress("storing", len(rows), self.row_bytes, num_done) as advance:
            self._write_rows(journal, todo, num_workers, advance)
        assert not missing_ranges(journal.done, rows.stop, rows.start)

    def _write_rows(
        self, journal: Journal, todo: list[range], num_workers: int, advance: Advance
    ) -> None:
        writer = RangeWriter(
            self.dataset, self.plan, journal.descriptor, self.row_bytes, self.first_row
        )
        ranges = RowRanges(
            todo,
            max_rows=writer.max_rows,
            num_workers=num_workers,
            row_s=self.row_s / _SLICE_SPEED if writer.has_arrays else self.row_s,
        )
        written: list[range] = []
        last_sync = monotonic()

        def receive(outcome: tuple[range, float]) -> None:
            nonlocal last_sync
            rows, duration_s = outcome
            ranges.note(len(rows), duration_s)
            written.append(rows)
            advance(len(rows))
            if monotonic() - last_sync > _JOURNAL_INTERVAL_S:
                self._note(journal, written)
                last_sync = monotonic()

        try:
            run_tasks(writer, ranges, num_workers, receive)
        finally:
            writer.close()
            self._note(journal, written)

    def _note(self, journal: Journal, written: list[range]) -> None:
        # Rows are listed only once they are on the disk. If that fails, they are never listed: when
        # asked again, the file system may no longer report the failure.
        rows = written.copy()
        written.clear()
        self.plan.sync()
        journal.note(rows)


def finish_files(
    plan: StorePlan, num_workers: int, progress: ShowProgress
) -> tuple[tuple[Column, ...], dict[str, tuple[str, ...]]]:
    """Finish the files of a build once all rows are written, and hash them.

    Args:
        plan: What the build makes.
        num_workers: Processes that may be used; threads hash.
        progress: Shows the progress.

    Returns:
        The finished columns, and the checksum of each shard by field name.
    """
    columns = plan.finish_columns()
    num_bytes = sum(size for column in columns for size in column.file_bytes.values())
    with progress("checksums", num_bytes, 1) as advance:
        checksums = compute_checksums(
            plan.building, columns, num_threads=max(2, num_workers), advance=advance
        )
    return columns, checksums


def check_written(
    plan: StorePlan, columns: tuple[Column, ...], probes: tuple[tuple[int, str], ...]
) -> None:
    """Compare the probe rows with what was written of them. Where one differs, nothing is kept.

    Args:
        plan: What the build makes.
        columns: The finished columns.
        probes: Row and hash of the probe rows.

    Raises:
        DatasetError: One differs: the dataset is random.
    """
    for row, expected in probes:
        if plan.hash_row(columns, row) != expected:
            names = ", ".join(field.name for field in plan.schema.fields)
            remove_tree(plan.building)
            raise random_dataset_error(row, names)
