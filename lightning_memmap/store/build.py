"""One build: its files are made, its rows written in parallel and resumed, and it is committed.

The rows are written into a sibling directory. The manifest is written last, after everything
else is on the disk, and then one rename puts the store in place. A build that ends before that,
for whatever reason, leaves no store, or the old one. Its journal lists the rows that it has
written; the next build does not read them again.
"""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import xxhash
from torch.utils.data import Subset

from lightning_memmap.errors import StoreError
from lightning_memmap.schema import Nullable
from lightning_memmap.store.build_key import BuildKey
from lightning_memmap.store.fingerprint import Fingerprint
from lightning_memmap.store.journal import Journal
from lightning_memmap.store.manifest import are_class_names
from lightning_memmap.store.options import BuildOptions
from lightning_memmap.store.plan import StorePlan
from lightning_memmap.store.probes import probe_rows, take_probes
from lightning_memmap.store.progress import Advance, ShowProgress
from lightning_memmap.store.range_writer import RangeWriter
from lightning_memmap.store.ranges import RowRanges, missing_ranges
from lightning_memmap.store.recovery import is_store, remove_tree
from lightning_memmap.store.sources import nullable_columns, reading_order, source_of
from lightning_memmap.store.sources.stream import Spool
from lightning_memmap.store.workers import Workers
from lightning_memmap.store.written import WrittenStore

#: By how much slices are faster than items, as a first guess.
_SLICE_SPEED = 32
_JOURNAL_INTERVAL_S = 5.0
_log = logging.getLogger(__name__)


@contextmanager
def explained(path: Path, then: str) -> Iterator[None]:
    """Say what to do about a file that cannot be written.

    Args:
        path: Directory of the store.
        then: What follows.

    Raises:
        OSError: As the system says, with the way out.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(
            error.errno,
            f"{error.strerror or error}: rows cannot be written. Make room, or raise the limit that"
            f" is in the way; {then}",
            str(path),
        ) from error


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
        workers: Read the dataset, or the rows of a stream.
        dataset_name: The class of what the user has given.
        plan: What the build makes.
        probes: Row and hash of the probe rows.
        fingerprint: The identity of the dataset.
        row_s: Seconds that a row takes, as a first guess.
        row_bytes: Bytes of a row, of the largest one that was read.
        first_row: The row of the store that row 0 of the dataset is.
    """

    workers: Workers
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
        workers: Workers,
        path: Path,
        options: BuildOptions,
        fingerprint: Fingerprint,
        *,
        in_parts: bool = False,
    ) -> "Build":
        """Read the probe rows, and check that a store can be made of the dataset.

        Args:
            workers: Read the dataset.
            path: Directory of the store.
            options: How it is built.
            fingerprint: The identity of the dataset.
            in_parts: Whether several processes write the rows.
        """
        dataset = workers.dataset
        num_rows = len(dataset)
        nullable = dict.fromkeys(nullable_columns(dataset), Nullable())
        fields = replace(options.fields, forms={**nullable, **options.fields.forms})
        probes = take_probes(workers, num_rows, fields)
        classes = _class_names(dataset)
        num_shards = options.shards_of(num_rows)
        plan = StorePlan(path, num_rows, num_shards, probes.schema, classes, in_parts)
        plan.check()
        return cls(
            workers,
            class_name(dataset),
            plan,
            probes.digests,
            fingerprint,
            probes.row_s,
            probes.row_bytes,
        )

    @classmethod
    def of_stream(
        cls,
        stream: Any,
        spool: Spool,
        path: Path,
        options: BuildOptions,
        fingerprint: Fingerprint,
    ) -> "Build":
        """Plan to store the rows of a stream.

        Args:
            stream: The stream.
            spool: Its rows.
            path: Directory of the store.
            options: How it is built.
            fingerprint: The identity of the stream.
        """
        num_shards = options.shards_of(len(spool))
        plan = StorePlan(path, len(spool), num_shards, spool.schema, _class_names(stream))
        plan.check()
        probes = tuple((row, spool.hash_row(row)) for row in probe_rows(len(spool)))
        workers = Workers(spool, 0)
        return cls(workers, class_name(stream), plan, probes, fingerprint, 0.0, spool.row_bytes)

    def run(self, progress: ShowProgress, *, resume: bool) -> None:
        """Write all rows that are not yet written, then commit.

        Args:
            progress: Shows the progress.
            resume: Whether to go on from an interrupted build.
        """
        plan, journal = self.plan, self._open_journal(resume)
        is_kept = not isinstance(self.workers.dataset, Spool) and (
            resume or not is_store(plan.path)
        )
        then = "the same build then goes on" if is_kept else "nothing was changed"
        try:
            with self.write(journal, range(plan.num_rows), progress, then):
                written = WrittenStore.finish(plan, self.workers.num_workers, progress)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                self._log_what_is_kept(journal, resume)
            if not is_kept:  # It would keep the disk full, and no build would go on with it.
                with suppress(StoreError):
                    remove_tree(plan.building)
            raise
        finally:
            journal.close()
        written.check(self.probes)
        written.commit(self.probes, {"dataset": self.dataset_name}, self.fingerprint)

    def key(self, **more: Any) -> BuildKey:
        """What must be the same in a build that goes on with this one.

        Args:
            **more: JSON values that must be the same as well.
        """
        probes, dataset = [list(probe) for probe in self.probes], self.workers.dataset
        # The journal counts rows in the order in which they are read.
        order = reading_order(source_of(dataset, self.plan.schema), len(dataset))
        digest = "" if order is None else xxhash.xxh3_64_hexdigest(order.data)
        contents = {**self.plan.to_json(), "probes": probes, "order": digest, **more}
        return BuildKey(self.fingerprint, contents, self.plan.file_bytes)

    def _log_what_is_kept(self, journal: Journal, resume: bool) -> None:
        path = self.plan.path
        if isinstance(self.workers.dataset, Spool):
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
        plan, key = self.plan, self.key()
        journal = Journal.resume(plan.building, key) if resume else None
        if journal is None:
            plan.make_files()
            journal = Journal.create(plan.building, key)
        return journal

    @contextmanager
    def write(
        self,
        journal: Journal,
        rows: range,
        progress: ShowProgress,
        then: str = "the same build then goes on",
    ) -> Iterator[None]:
        """Write those of some rows that are not yet written; the workers end with that. Then the
        block of the ``with`` statement runs, at the end of which all are on the disk.

        Args:
            journal: Lists the rows that are.
            rows: The rows, in a range of step 1.
            progress: Shows the progress.
            then: What is said to follow where the disk is full.
        """
        todo = missing_ranges(journal.done, rows.stop, rows.start)
        num_done = len(rows) - sum(map(len, todo))
        try:
            with (
                explained(self.plan.path, then),
                progress("storing", len(rows), self.row_bytes, num_done) as advance,
            ):
                written = self._write_rows(journal, todo, advance)
        finally:
            self.workers.close()
        with explained(self.plan.path, then), ThreadPoolExecutor(1) as thread:
            noting = thread.submit(self._note, journal, written)
            yield
            noting.result()
        assert not missing_ranges(journal.done, rows.stop, rows.start)

    def _write_rows(self, journal: Journal, todo: list[range], advance: Advance) -> list[range]:
        """Write rows. Returns those that are yet to be listed in the journal."""
        workers = self.workers
        make = partial(
            RangeWriter,
            plan=self.plan,
            journal=journal.name,
            row_bytes=self.row_bytes,
            first_row=self.first_row,
        )
        written: list[range] = []
        last_sync = monotonic()
        with closing(make(workers.dataset)) as writer:
            ranges = RowRanges(
                todo,
                max_rows=writer.max_rows,
                num_workers=workers.num_workers,
                row_s=self.row_s / _SLICE_SPEED if writer.has_arrays else self.row_s,
            )

            def receive(outcome: tuple[range, float]) -> None:
                nonlocal last_sync
                rows, duration_s = outcome
                ranges.note(len(rows), duration_s)
                written.append(rows)
                advance(len(rows))
                if monotonic() - last_sync > _JOURNAL_INTERVAL_S:
                    writer.finish()
                    self._note(journal, written)
                    last_sync = monotonic()

            # A worker process makes its own.
            make_work = make if workers.num_workers else lambda _: writer.begin
            try:
                workers.run(make_work, ranges, receive)
                writer.finish()
            except BaseException:
                try:
                    writer.finish()
                except OSError:
                    del written[-1:]
                self._note(journal, written)
                raise
        return written

    def _note(self, journal: Journal, written: list[range]) -> None:
        # Rows are listed only once they are on the disk. If that fails, they are never listed: when
        # asked again, the file system may no longer report the failure.
        rows = written.copy()
        written.clear()
        self.plan.sync()
        journal.note(rows)
