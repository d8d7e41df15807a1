"""Writes the rows of a dataset, a range at a time: slices of its arrays, or item by item."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.errors import SchemaError
from lightning_memmap.sampling import Integers
from lightning_memmap.schema import Schema, Values
from lightning_memmap.schema.values import join_values
from lightning_memmap.store.building import RowWriter
from lightning_memmap.store.columns import Column
from lightning_memmap.store.samples import read_sample, read_samples, stack_rows
from lightning_memmap.store.sources import Source, reading_order, source_of
from lightning_memmap.store.store import Store
from lightning_memmap.store.workers import threads

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


class RangeWriter:
    """Reads the rows of a range, checks and writes them."""

    def __init__(
        self,
        dataset: Any,
        schema: Schema,
        columns: Sequence[Column],
        building: Path,
        journal: str,
        row_bytes: int,
        first_row: int = 0,
    ) -> None:
        self._dataset, self._schema, self._first_row = dataset, schema, first_row
        self._row_bytes = max(1, row_bytes)
        self._source = _source_of(dataset, schema)
        self._order = reading_order(self._source, len(dataset))
        # Two take turns: while one is being written, the other is filled.
        self._memory: list[dict[str, Tensor]] = [{}, {}]
        self._thread = threads(1)
        self._writing: Future[None] = Future()
        self._writing.set_result(None)
        self._max_item_rows = min(_MAX_ITEM_ROWS, self._rows_of(_ITEM_BYTES))
        #: Whether the rows lie in arrays, which are read by slices.
        self.has_arrays = self._source is not None
        #: The most rows of a range.
        self.max_rows = _MAX_ITEM_BLOCKS * self._max_item_rows
        if self.has_arrays:  # Rows of a store are copied.
            is_copied = isinstance(self._source, _StoredRows)
            self.max_rows = self._rows_of(_ITEM_BYTES if is_copied else _SLICE_BYTES)
        if self.has_arrays and any(field.num_variable for field in schema.fields):
            self.max_rows = min(_MAX_PACKED_ROWS, self.max_rows)
        self._writer = RowWriter(building, columns, journal)

    def _rows_of(self, num_bytes: int) -> int:
        """The rows that take so many bytes, at least one."""
        return max(1, num_bytes // self._row_bytes)

    def __call__(self, task: tuple[int, int]) -> tuple[range, float]:
        """Write a range, given by its first row in the store and the number of its rows."""
        start = perf_counter()
        first, num_rows = task
        begin = first - self._first_row
        rows: range | Integers = range(begin, begin + num_rows)
        if self._order is not None:
            rows = self._order[begin : begin + num_rows]
        self.write_rows(rows)
        return range(first, first + num_rows), perf_counter() - start

    def write_rows(self, rows: range | Integers) -> None:
        """Write rows of the dataset, in any order."""
        if not self._write_slices(rows):
            for index in range(0, len(rows), self._max_item_rows):
                self._write_items(rows[index : index + self._max_item_rows])
            self._writing.result()

    def _write(self, rows: range | Integers, values: Sequence[Values]) -> None:
        first = self._first_row
        if isinstance(rows, range):
            self._writer.write(range(rows.start + first, rows.stop + first), values)
        else:
            self._writer.write(rows + first, values)

    def _write_slices(self, rows: range | Integers) -> bool:
        """Write rows that are read many at once; False where they must be read as items."""
        if self._source is None:
            return False
        try:
            found = self._source.read(rows)
        except SchemaError:  # Some do not fit, and are to be named.
            return False
        if any(values.num_rows != len(rows) for values in found):
            return False
        # Once all of them fit: what is written of rows that differ in length takes place on the
        # disk even where they are written again.
        self._write(rows, found)
        return True

    def _write_items(self, rows: range | Integers) -> None:
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
        self, rows: range | Integers, memory: Mapping[str, Tensor], pieces: list[list[Values]]
    ) -> None:
        whole = [
            Values(memory[field.name][: len(rows)])
            if field.name in memory
            else join_values([piece[index] for piece in pieces])
            for index, field in enumerate(self._schema.fields)
        ]
        self._write(rows, whole)

    def close(self) -> None:
        """Wait for what is being written, and close the directory and the files."""
        self._thread.shutdown()
        self._writer.close()


class _StoredRows:
    """The rows of a store, as a source."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self, rows: range | Integers) -> list[Values]:
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
