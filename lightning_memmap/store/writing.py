"""Writers of rows: of a dataset, a range at a time, or of a table.

The rows of a dataset are read by slices of its arrays, or item by item. Those of a table are
written by several processes, in any order. One makes the files (`TableBuild`), each writes the rows
that it has (`TableWriter`) and marks them in the journal, and the first one finishes the table:
each row was written exactly once if all are marked, and the processes have written as many rows as
the table has. If a process ends before that, there is no table, or the old one.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.errors import SchemaError, StoreError
from lightning_memmap.sampling import Integers
from lightning_memmap.schema import RowList, Schema, Values
from lightning_memmap.schema.fields import join_values
from lightning_memmap.store.building import Building, RowWriter
from lightning_memmap.store.columns import Column
from lightning_memmap.store.directory import JOURNAL, StoreDirectory, check_free, is_store
from lightning_memmap.store.files import write_rows
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.progress import show_progress
from lightning_memmap.store.samples import read_sample, read_samples, stack_rows
from lightning_memmap.store.sources import Source, source_of
from lightning_memmap.store.store import Store, open_directory
from lightning_memmap.store.workers import RowNumbers, RowRanges, Workers, threads

#: Of slices, most of which are views: long, so that each of many shards gets much of it at once.
_SLICE_BYTES = 128 * 2**20
#: Of rows that are read item by item.
_ITEM_BYTES, _MAX_ITEM_ROWS = 32 * 2**20, 2**14
#: The most of these in a range: the last one alone is written while nothing is read.
_MAX_ITEM_BLOCKS = 16
#: Of slices of fields whose rows differ in length, which may be longer than those that were probed.
_MAX_PACKED_ROWS = 2**18
#: Items that are held as Python objects, before they are copied.
_PIECE_BYTES, _MAX_PIECE_ROWS = 2**20, 1024
#: How often what was written is brought to the disk, and marked in the journal.
JOURNAL_INTERVAL_S = 5.0


def writer_of(
    building: Building, row_bytes: int, first_row: int = 0
) -> Callable[[Any], "RangeWriter"]:
    """Makes a writer of the rows of a dataset, which begins at ``first_row`` of the store."""
    assert building.journal is not None
    return partial(
        RangeWriter,
        schema=building.draft.schema,
        columns=building.draft.columns,
        generation=building.path,
        journal=building.journal.name,
        row_bytes=row_bytes,
        first_row=first_row,
    )


def write_dataset(
    building: Building,
    workers: Workers,
    plan: Callable[["RangeWriter"], RowRanges],
    *,
    row_bytes: int,
    first_row: int = 0,
) -> None:
    """Write rows of the workers' dataset, which begins at ``first_row`` of the store.

    ``plan`` is given a writer like those of the workers, which end with the last task.
    """
    make, last_sync = writer_of(building, row_bytes, first_row), monotonic()
    with closing(make(workers.dataset)) as writer:
        tasks = plan(writer)

        def receive(outcome: tuple[RowNumbers, float]) -> None:
            nonlocal last_sync
            rows, duration_s = outcome
            building.wrote(rows)
            tasks.note(rows, duration_s)
            if monotonic() - last_sync > JOURNAL_INTERVAL_S:
                building.sync()
                last_sync = monotonic()

        try:
            workers.run(make if workers.num_workers else lambda _: writer, tasks, receive)
        except BaseException:
            workers.close(at_once=True)
            building.sync()
            raise
    workers.close()


class RangeWriter:
    """Reads the rows of a range, checks and writes them."""

    def __init__(
        self,
        dataset: Any,
        schema: Schema,
        columns: Sequence[Column],
        generation: Path,
        journal: str,
        row_bytes: int,
        first_row: int = 0,
    ) -> None:
        self._dataset, self._schema, self._first_row = dataset, schema, first_row
        self._row_bytes = max(1, row_bytes)
        #: The arrays in which the rows lie, which are read by slices.
        self.source = _source_of(dataset, schema)
        # Two take turns: while one is being written, the other is filled.
        self._memory: list[dict[str, Tensor]] = [{}, {}]
        self._thread = threads(1)
        self._writing: Future[None] = Future()
        self._writing.set_result(None)
        self._max_item_rows = min(_MAX_ITEM_ROWS, self._rows_of(_ITEM_BYTES))
        #: The most rows of a range.
        self.max_rows = _MAX_ITEM_BLOCKS * self._max_item_rows
        if self.source is not None:  # Rows of a store are copied.
            is_copied = isinstance(self.source, _StoredRows)
            self.max_rows = self._rows_of(_ITEM_BYTES if is_copied else _SLICE_BYTES)
            if any(field.num_variable for field in schema.fields):
                self.max_rows = min(_MAX_PACKED_ROWS, self.max_rows)
        self._writer = RowWriter(generation, columns, journal)

    def _rows_of(self, num_bytes: int) -> int:
        """The rows that take so many bytes, at least one."""
        return max(1, num_bytes // self._row_bytes)

    def __call__(self, rows: RowNumbers) -> tuple[RowNumbers, float]:
        """Write rows, given by their numbers in the store."""
        start, mine = perf_counter(), _moved(rows, -self._first_row)
        if not self._write_slices(mine):
            for index in range(0, len(rows), self._max_item_rows):
                self._write_items(mine[index : index + self._max_item_rows])
            self._writing.result()
        return rows, perf_counter() - start

    def _write_slices(self, rows: RowNumbers) -> bool:
        """Write rows that are read many at once; False where they must be read as items."""
        if self.source is None:
            return False
        try:
            found = self.source.read(rows)
        except SchemaError:  # Some do not fit, and are to be named.
            return False
        if any(values.num_rows != len(rows) for values in found):
            return False
        # Once all of them fit: what is written of rows that differ in length takes place on the
        # disk even where they are written again.
        self._writer.write(_moved(rows, self._first_row), found)
        return True

    def _write_items(self, rows: RowNumbers) -> None:
        """Read rows item by item, and begin to write them when those before them are written."""
        self._memory.reverse()
        memory, fields = self._memory[0], self._schema.fields
        for field in fields if not memory else ():
            if not field.num_variable:
                shape = (self._max_item_rows, *field.item_shape)
                memory[field.name] = torch.empty(shape, dtype=field.dtype, device="cpu")
        step = min(_MAX_PIECE_ROWS, self._rows_of(_PIECE_BYTES))
        pieces: list[list[Values]] = []
        for first in range(0, len(rows), step):
            some = rows[first : first + step]
            room = {name: each[first : first + len(some)] for name, each in memory.items()}
            samples = read_samples(self._dataset, some)
            found = stack_rows(
                samples, some, self._schema, lambda: read_sample(self._dataset, 0), room
            )
            for field, values in zip(fields, found, strict=True):
                place = room.get(field.name)
                if place is not None and values.data.data_ptr() != place.data_ptr():
                    place.copy_(values.data)
            pieces.append(found)
        self._writing.result()
        self._writing = self._thread.submit(self._write_pieces, rows, memory, pieces)

    def _write_pieces(
        self, rows: RowNumbers, memory: Mapping[str, Tensor], pieces: list[list[Values]]
    ) -> None:
        whole = [
            Values(memory[field.name][: len(rows)])
            if field.name in memory
            else join_values([piece[index] for piece in pieces])
            for index, field in enumerate(self._schema.fields)
        ]
        self._writer.write(_moved(rows, self._first_row), whole)

    def close(self) -> None:
        """Wait for what is being written, and close the directory and the files."""
        self._thread.shutdown()
        self._writer.close()


def _moved(rows: RowNumbers, by: int) -> RowNumbers:
    """Rows with other numbers."""
    return range(rows.start + by, rows.stop + by) if isinstance(rows, range) else rows + by


class _StoredRows:
    """The rows of a store, as a source."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self, rows: RowNumbers) -> list[Values]:
        numbers = np.asarray(rows, np.int64)
        found = [column.fetch(numbers) for column in self._store.columns]
        return [
            Values(each) if isinstance(each, Tensor) else Values.of_rows(field, each)
            for field, each in zip(self._store.schema.fields, found, strict=True)
        ]

    def pieces(self, rows: Integers) -> None:
        """All rows are equally far."""


def _source_of(dataset: Any, schema: Schema) -> Source | None:
    if isinstance(dataset, Store) and dataset.schema == schema:
        return _StoredRows(dataset)
    return source_of(dataset, schema)


def check_place(path: Path, *, overwrite: bool) -> None:
    """Check that a table may be written to a path."""
    check_free(path, "path")
    if is_store(path) and not overwrite:
        raise StoreError(
            f"{path} exists: choose another path, or replace what is there with overwrite=True"
        )


class TableBuild:
    """The build of a table, in one process, which holds the lock until the table is committed."""

    def __init__(self, path: Path, draft: Manifest, *, overwrite: bool = False) -> None:
        self._path = path
        check_place(path, overwrite=overwrite)
        with ExitStack() as stack:
            stack.enter_context(StoreDirectory(path).locked(wait=False))
            check_place(path, overwrite=overwrite)
            self._building = stack.enter_context(Building.begin(path, draft, resume=False))
            self.token = self._building.path.name
            self._cleanup = stack.pop_all()

    def finish(self, num_written: int, **source: str) -> Store:
        """Commit the table, once all processes have closed their writers."""
        num_rows = self._building.draft.num_rows
        with self._cleanup:
            if missing := self._building.missing(range(num_rows)):
                raise StoreError(
                    f"{sum(map(len, missing))} of {num_rows} rows were not written, the first of"
                    f" them is row {missing[0].start}"
                )
            if num_written != num_rows:
                raise StoreError(
                    f"{num_written} rows were written, and the table has {num_rows}: some were"
                    " written more than once"
                )
            show = partial(show_progress, hidden=True)
            self._building.finish(num_threads=2, show=show, source=source)
        return open_directory(self._path)

    def abandon(self) -> None:
        """Remove what was written, and release the lock. A second call does nothing."""
        self._cleanup.close()


class TableWriter:
    """Writes rows into the files of a table that a `TableBuild` has made."""

    def __init__(self, path: Path, draft: Manifest, token: str) -> None:
        self._draft, self.num_written = draft, 0
        try:
            self._writer = RowWriter(path / token, draft.columns, JOURNAL)
        except (FileNotFoundError, NotADirectoryError):
            raise StoreError(
                f"this process does not see the files of the table at {path}: all processes"
                " must share one file system there, also those of other machines"
            ) from None

    def write(self, rows: Sequence[int] | Integers, leaves: Sequence[Tensor | RowList]) -> None:
        """Write rows in any order."""
        numbers, num_rows = np.asarray(rows, np.int64), self._draft.num_rows
        if not len(numbers):
            return
        if numbers.min() < 0 or numbers.max() >= num_rows:
            raise IndexError(f"rows {numbers.min()} to {numbers.max()}: the table has {num_rows}")
        values = [
            Values.of_rows(field, leaf) if isinstance(leaf, RowList) else Values(leaf)
            for field, leaf in zip(self._draft.schema.fields, leaves, strict=True)
        ]
        self._writer.write(numbers, values)
        # The marks last: a row with one has all its values.
        write_rows(self._writer.journal, numbers, np.ones((len(numbers), 1), np.uint8))
        self.num_written += len(numbers)

    def close(self) -> None:
        """Bring the rows to the disk and close the files."""
        self._writer.files.sync()
        self.abandon()

    def abandon(self) -> None:
        """Close the files. A second call does nothing."""
        self._writer.close()
