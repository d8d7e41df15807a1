"""Read the rows of a dataset by slices or item by item, and write them a range at a time."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, NamedTuple

import numpy as np

from lightning_memmap.schema.fields import Values
from lightning_memmap.schema.schema import Schema
from lightning_memmap.store.building import Building, RowWriter
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.probes import Probes
from lightning_memmap.store.progress import ShowProgress
from lightning_memmap.store.samples import hash_row, make_random_dataset_error
from lightning_memmap.store.sources.source import Source, concatenate_sources, make_source
from lightning_memmap.store.store import Store
from lightning_memmap.store.workers import RowIndices, RowRanges, Workers, start_threads

#: Bytes of a slice. It is long, so that each of many shards receives a long run at once.
_SLICE_BYTES = 128 * 2**20
#: Rows of a slice if rows differ in length, because they may be longer than the probe rows.
_MAX_PACKED_ROWS = 2**18
#: By how much slices are faster than items, as a first guess.
_SLICE_SPEED = 32
#: Bytes of a block: rows that are read item by item and written together.
_BLOCK_BYTES = 32 * 2**20
_MAX_BLOCK_ROWS = 2**14
#: The most such blocks in a range: the last one alone is written while nothing is read.
_MAX_BLOCKS = 16
#: How often written rows are synced to the disk and marked in the journal.
JOURNAL_INTERVAL_S = 5.0


class Appended(NamedTuple):
    """The rows of a store, followed by the rows of a dataset.

    Unlike a ``ConcatDataset``, errors name the row within the dataset.
    """

    store: Store
    dataset: Any

    @property
    def num_rows(self) -> int:
        """The rows of both."""
        return len(self.store) + len(self.dataset)


def write_missing(building: Building, workers: Workers, probes: Probes, show: ShowProgress) -> None:
    """Write the rows of the workers' dataset that are missing. The workers end with that."""
    assert building.journal is not None
    missing = building.missing()
    num_rows = len(building.journal.rows)
    num_done = num_rows - sum(map(len, missing))
    make = make_writer(building, probes.row_bytes)
    with (
        show("storing", num_rows, probes.row_bytes, num_done) as advance,
        closing(make(workers.dataset)) as writer,
    ):
        todo: list[RowIndices] = [*missing]
        if (order := writer.source.order) is not None:
            is_missing = np.zeros(len(order), np.bool_)
            for block in missing:
                is_missing[block.start : block.stop] = True
            todo = [order[is_missing[order]]]
        tasks = RowRanges(
            todo,
            max_rows=writer.max_rows,
            num_workers=workers.num_workers,
            row_s=probes.row_s / (_SLICE_SPEED if writer.source.is_sliced else 1),
            advance=advance,
        )

        def receive(rows: RowIndices, duration_s: float) -> None:
            building.mark_written(rows)
            tasks.record(rows, duration_s)

        run_writers(
            [building], workers, make if workers.num_workers else lambda _: writer, tasks, receive
        )
    workers.close()


def run_writers(
    buildings: Sequence[Building],
    workers: Workers,
    make: Callable[[Any], Callable[[Any], Any]],
    tasks: Iterable[Any],
    receive: Callable[[Any, float], None],
) -> None:
    """Run tasks that write rows. Sync the rows every few seconds, and after an error."""
    last_sync = monotonic()
    syncing = Future[None]()
    syncing.set_result(None)

    def sync() -> None:
        for building in buildings:
            building.sync()

    def receive_and_sync(task: Any, duration_s: float) -> None:
        nonlocal last_sync, syncing
        receive(task, duration_s)
        if monotonic() - last_sync > JOURNAL_INTERVAL_S:
            # The workers wait only for a disk that takes longer than that.
            syncing.result()
            last_sync = monotonic()
            syncing = thread.submit(sync)

    with start_threads(1) as thread:
        try:
            workers.run(make, tasks, receive_and_sync)
            syncing.result()
        except BaseException:
            workers.close(at_once=True)
            sync()
            raise


def make_writer(building: Building, row_bytes: int) -> Callable[[Any], "RangeWriter"]:
    """Makes a writer of the rows of a dataset."""
    assert building.journal is not None
    return partial(RangeWriter, building.draft, building.path, building.journal.name, row_bytes)


class RangeWriter:
    """Reads the rows of a range, checks and writes them."""

    def __init__(
        self, draft: Manifest, generation: Path, journal: str, row_bytes: int, dataset: Any
    ) -> None:
        def rows_of(num_bytes: int) -> int:
            return max(1, num_bytes // max(1, row_bytes))

        self._draft = draft
        schema = draft.schema
        self.source = _make_source(dataset, schema, row_bytes)
        self._block_rows = min(_MAX_BLOCK_ROWS, rows_of(_BLOCK_BYTES))
        #: The most rows of a range.
        self.max_rows = _MAX_BLOCKS * self._block_rows
        if self.source.is_sliced:
            self.max_rows = self._block_rows = rows_of(_SLICE_BYTES)
            if any(field.num_variable for field in schema.fields):
                self.max_rows = min(_MAX_PACKED_ROWS, self.max_rows)
        self._thread = start_threads(1)
        self._writer = RowWriter(generation, draft.columns, journal)
        self._writing: Future[None] = Future()
        self._writing.set_result(None)

    def __call__(self, rows: RowIndices) -> float:
        """Write rows, and return the seconds it took. A block is written while the next is read."""
        start = perf_counter()
        for first in range(0, len(rows), self._block_rows):
            block = rows[first : first + self._block_rows]
            values = self.source.read(block)
            self._check(block, values)
            self._writing.result()
            if first + len(block) < len(rows):
                self._writing = self._thread.submit(self._writer.write, block, values)
        if len(rows):
            self._writer.write(block, values)
        return perf_counter() - start

    def _check(self, rows: RowIndices, values: list[Values]) -> None:
        """Check that the probe rows among ``rows`` are the same as when they were first read."""
        for row, expected in self._draft.probes:
            if row not in rows:
                continue
            at = rows.index(row) if isinstance(rows, range) else int(np.argmax(rows == row))
            leaves = [next(field.take(range(at, at + 1)).rows()) for field in values]
            if hash_row(leaves) != expected:
                again = [next(field.rows()) for field in self.source.read(range(row, row + 1))]
                names = [field.name for field in self._draft.schema.fields]
                pairs = zip(names, leaves, again, strict=True)
                differ = [name for name, one, two in pairs if hash_row([one]) != hash_row([two])]
                raise make_random_dataset_error(row, differ or names)

    def close(self) -> None:
        """Wait for what is being written, and close the directory and the files."""
        self._thread.shutdown()
        self._writer.close()


def _make_source(dataset: Any, schema: Schema, row_bytes: int) -> Source:
    if isinstance(dataset, Appended):
        sizes = [len(dataset.store), len(dataset.dataset)]
        return concatenate_sources(
            [_make_source(part, schema, row_bytes) for part in dataset], sizes
        )
    if isinstance(dataset, Store) and dataset.schema == schema:
        return Source(partial(_read_store, dataset))
    return make_source(dataset, schema, row_bytes)


def _read_store(store: Store, rows: RowIndices) -> list[Values]:
    return store.read(np.asarray(rows, np.int64))
