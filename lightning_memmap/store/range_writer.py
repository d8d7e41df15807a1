"""Writes the rows of a dataset, a range at a time: slices of its arrays, or item by item."""

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lightning_memmap.errors import SchemaError
from lightning_memmap.sampling import Integers
from lightning_memmap.schema import Field, Values
from lightning_memmap.schema.values import join_values
from lightning_memmap.store.building import RowWriter, StorePlan
from lightning_memmap.store.samples import read_sample, read_samples, stack_rows
from lightning_memmap.store.sources import reading_order, source_of
from lightning_memmap.store.workers import threads

#: Of slices, most of which are views: long, so that each of many shards gets much of it at once.
_SLICE_BYTES = 128 * 2**20
#: Of rows that are read item by item.
_ITEM_BYTES, _MAX_ITEM_ROWS = 32 * 2**20, 2**14
#: Of slices of fields whose rows differ in length, which may be longer than those that were probed.
_MAX_PACKED_ROWS = 2**18
#: Items that are held as Python objects, before they are copied.
_PIECE_BYTES, _MAX_PIECE_ROWS = 2**20, 1024


class _Block:
    """Memory for rows of one field that are written together.

    Args:
        field: The field.
        max_rows: Rows that fit into the block.
    """

    def __init__(self, field: Field, max_rows: int) -> None:
        self._rows = None
        if not field.num_variable:
            self._rows = torch.empty((max_rows, *field.item_shape), dtype=field.dtype, device="cpu")
        #: Rows that differ in length, by the row of the block at which they begin.
        self._pieces: dict[int, Values] = {}

    def room(self, index: int, num_rows: int) -> Tensor | None:
        """The memory of rows, into which they may be put without `put`."""
        return None if self._rows is None else self._rows[index : index + num_rows]

    def put(self, index: int, values: Values) -> None:
        """Put rows into the block, which are copied unless they are there already."""
        if self._rows is None:
            if not index:
                # Rows of a range that failed may be there still.
                self._pieces.clear()
            self._pieces[index] = values
        elif values.data.data_ptr() != self._rows[index : index + 1].data_ptr():
            self._rows[index : index + len(values.data)].copy_(values.data)

    def values(self, num_rows: int) -> Values:
        """The first rows of the block."""
        if self._rows is not None:
            return Values(self._rows[:num_rows])
        return join_values(list(self._pieces.values()))


class RangeWriter:
    """Reads the rows of a range, checks and writes them.

    It shares the lock of the journal, which tells the next build that this process is alive.

    Args:
        dataset: The dataset.
        plan: The store that is being built.
        building: Its generation.
        journal: The name of its journal.
        row_bytes: Bytes of a row, estimated where rows differ in length.
        first_row: The row of the store that row 0 of the dataset is.

    Attributes:
        has_arrays: Whether the rows lie in arrays, which are read by slices.
        max_rows: The most rows of a range.
    """

    def __init__(
        self,
        dataset: Any,
        plan: StorePlan,
        building: Path,
        journal: str,
        row_bytes: int,
        first_row: int = 0,
    ) -> None:
        self._dataset = dataset
        self._first_row = first_row
        self._plan = plan
        self._row_bytes = max(1, row_bytes)
        self._source = source_of(dataset, plan.schema)
        self._order = reading_order(self._source, len(dataset))
        self._blocks: list[list[_Block]] = [[], []]
        self._thread = threads(1)
        self._writing: Future[None] = Future()
        self._writing.set_result(None)
        self.has_arrays = self._source is not None
        self.max_rows = self._rows_of(_SLICE_BYTES)
        self._max_item_rows = min(_MAX_ITEM_ROWS, self._rows_of(_ITEM_BYTES))
        if not self.has_arrays:
            self.max_rows = self._max_item_rows
        elif any(field.num_variable for field in plan.schema.fields):
            self.max_rows = min(_MAX_PACKED_ROWS, self.max_rows)
        self._max_piece_rows = min(_MAX_PIECE_ROWS, self._rows_of(_PIECE_BYTES))
        self._writer = RowWriter(building, plan.columns, journal)

    def _rows_of(self, num_bytes: int) -> int:
        """The rows that take so many bytes, at least one."""
        return max(1, num_bytes // self._row_bytes)

    def __call__(self, task: tuple[int, int]) -> tuple[range, float]:
        """Write a range."""
        outcome = self.begin(task)
        self.finish()
        return outcome

    def begin(self, task: tuple[int, int]) -> tuple[range, float]:
        """Write a range, of which the items that were read last may be written later, while others
        are read."""
        start = perf_counter()
        first, num_rows = task
        places = range(first - self._first_row, first - self._first_row + num_rows)
        rows = places if self._order is None else self._order[places.start : places.stop]
        self.write_rows(rows)
        return range(first, first + num_rows), perf_counter() - start

    def write_rows(self, rows: range | Integers) -> None:
        """Write rows of the dataset, of which the last may be written later."""
        if not self._write_slices(rows):
            for index in range(0, len(rows), self._max_item_rows):
                self._write_items(rows[index : index + self._max_item_rows])

    def finish(self) -> None:
        """Wait until all rows that were read are written."""
        self._writing.result()

    def _stored(self, rows: range | Integers) -> range | Integers:
        """The rows of the store that rows of the dataset are."""
        if isinstance(rows, range):
            return range(rows.start + self._first_row, rows.stop + self._first_row)
        return rows + self._first_row

    def _write_slices(self, rows: range | Integers) -> bool:
        """Write rows that are read many at once.

        False where they must be read as items. So must rows that do not fit, to be named.
        """
        if self._source is None:
            return False
        try:
            found = self._source.read(rows)
        except SchemaError:
            return False
        if any(values.num_rows != len(rows) for values in found):
            return False
        # Once all of them fit: what is written of rows that differ in length takes place on the
        # disk even where they are written again.
        self.finish()
        self._writer.write(self._stored(rows), found)
        return True

    def _write_items(self, rows: range | Integers) -> None:
        # Two blocks take turns where the one that was filled last is still being written.
        if not self._writing.done():
            self._blocks.reverse()
        blocks = self._blocks[0]
        if not blocks:
            blocks += [_Block(field, self._max_item_rows) for field in self._plan.schema.fields]
        for index in range(0, len(rows), self._max_piece_rows):
            self._put_items(blocks, index, rows[index : index + self._max_piece_rows])
        self.finish()
        self._writing = self._thread.submit(self._write_blocks, blocks, self._stored(rows))

    def _write_blocks(self, blocks: Sequence[_Block], rows: range | Integers) -> None:
        self._writer.write(rows, [block.values(len(rows)) for block in blocks])

    def _put_items(self, blocks: Sequence[_Block], index: int, rows: range | Integers) -> None:
        """Copy items into blocks, whose row ``index`` is the first of them."""
        schema = self._plan.schema
        samples = read_samples(self._dataset, rows)
        memory = [block.room(index, len(rows)) for block in blocks]
        room = {
            field.name: each
            for field, each in zip(schema.fields, memory, strict=True)
            if each is not None
        }
        stacked = stack_rows(samples, rows, schema, lambda: read_sample(self._dataset, 0), room)
        for block, values in zip(blocks, stacked, strict=True):
            block.put(index, values)

    def close(self) -> None:
        """Wait for what is being written, and close the directory and the files."""
        self._thread.shutdown()
        self._writer.close()
