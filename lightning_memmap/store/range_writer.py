"""Writes the rows of a dataset, a range at a time: slices of its arrays, or item by item."""

import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.errors import DatasetError, describe_error
from lightning_memmap.schema import Field
from lightning_memmap.schema.rows import fitting_rows, packed_rows, stack_samples
from lightning_memmap.schema.values import Values
from lightning_memmap.store.building import RowWriter, StorePlan
from lightning_memmap.store.columns import Block
from lightning_memmap.store.samples import flatten_row, read_samples
from lightning_memmap.store.sources import FieldArray, field_arrays
from lightning_memmap.store.sources.stream import Spool, SpooledItems

_RANGE_BYTES = 32 * 2**20
#: Of rows that are read item by item: such a range should take little time, whatever its size.
_MAX_RANGE_ROWS = 2048
#: Of slices of fields whose rows differ in length, which may be longer than those that were probed.
_MAX_PACKED_ROWS = 2**15
#: Items that are held as Python objects, before they are copied.
_PIECE_BYTES, _MAX_PIECE_ROWS = 2**20, 1024


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
        self._arrays: Sequence[FieldArray | SpooledItems] = field_arrays(dataset, plan.schema) or ()
        self._fields: Sequence[Field] = plan.schema.fields
        if isinstance(dataset, Spool):  # Its rows have been checked and converted.
            self._fields = [
                replace(field, given=None, kind="tensor", names=()) for field in self._fields
            ]
        self._blocks: list[list[Block]] = [[], []]
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[None] = Future()
        self._writing.set_result(None)
        self.has_arrays = bool(self._arrays)
        self.max_rows = self._rows_of(_RANGE_BYTES)
        self._max_item_rows = min(_MAX_RANGE_ROWS, self.max_rows)
        if not self.has_arrays:
            self.max_rows = self._max_item_rows
        elif any(field.num_variable for field in self._fields):
            self.max_rows = min(_MAX_PACKED_ROWS, self.max_rows)
        self._max_piece_rows = min(_MAX_PIECE_ROWS, self._rows_of(_PIECE_BYTES))
        self._writer = RowWriter(building, plan.columns, journal)

    def _rows_of(self, num_bytes: int) -> int:
        """The rows that take so many bytes, at least one."""
        return max(1, num_bytes // self._row_bytes)

    def __call__(self, task: tuple[int, int]) -> tuple[range, float]:
        """Write a range.

        Args:
            task: Its first row in the store, and the number of its rows.

        Returns:
            The rows, and the seconds that it took.

        Raises:
            SchemaError: A sample does not fit the schema; the message names row and field.
            DatasetError: The dataset raised an error.
            OSError: The files cannot be written.
        """
        outcome = self.begin(task)
        self.finish()
        return outcome

    def begin(self, task: tuple[int, int]) -> tuple[range, float]:
        """Write a range, of which the items that were read last may be written later, while others
        are read.

        Args:
            task: As for a call.

        Returns:
            As from a call. The rows are written once `finish` has returned.

        Raises:
            SchemaError: As from a call.
            DatasetError: As from a call.
            OSError: Rows that were read before cannot be written.
        """
        start = perf_counter()
        first, num_rows = task
        rows = range(first - self._first_row, first - self._first_row + num_rows)
        if not (self.has_arrays and self._write_slices(rows)):
            for index in range(0, num_rows, self._max_item_rows):
                self._write_items(rows[index : index + self._max_item_rows])
        return self._stored(rows), perf_counter() - start

    def finish(self) -> None:
        """Wait until all rows that were read are written.

        Raises:
            OSError: Some cannot be written. So says every later call.
        """
        self._writing.result()

    def _stored(self, rows: range) -> range:
        """The rows of the store that rows of the dataset are."""
        return range(rows.start + self._first_row, rows.stop + self._first_row)

    def _write_slices(self, rows: range) -> bool:
        """Write slices of the arrays in which the rows lie.

        False where they must be read as items. So must rows that do not fit, to be named.
        """
        slices = list[Values]()
        for array, field in zip(self._arrays, self._fields, strict=True):
            try:
                found = array.read(rows.start, rows.stop)
            except Exception as error:
                raise DatasetError(
                    f"the dataset raised at rows {rows.start} to {rows.stop - 1}, field"
                    f" {field.name!r}: {describe_error(error)}"
                ) from error
            values = found if isinstance(found, Values) else _fitting(field, found, len(rows))
            if values is None:
                return False
            slices.append(values)
        # Once all of them fit: what is written of rows that differ in length takes place on the
        # disk even where they are written again.
        self.finish()
        self._writer.write(self._stored(rows), slices)
        return True

    def _write_items(self, rows: range) -> None:
        # Two blocks take turns where the one that was filled last is still being written.
        if not self._writing.done():
            self._blocks.reverse()
        blocks = self._blocks[0]
        if not blocks:
            blocks += [column.block(self._max_item_rows) for column in self._plan.columns]
        for index in range(0, len(rows), self._max_piece_rows):
            self._put_items(blocks, index, rows[index : index + self._max_piece_rows])
        self.finish()
        self._writing = self._thread.submit(self._write_blocks, blocks, self._stored(rows))

    def _write_blocks(self, blocks: Sequence[Block], rows: range) -> None:
        self._writer.write(rows, [block.values(len(rows)) for block in blocks])

    def _put_items(self, blocks: Sequence[Block], index: int, rows: range) -> None:
        """Copy items into blocks, whose row ``index`` is the first of them."""
        schema = self._plan.schema
        samples = read_samples(self._dataset, rows.start, len(rows))
        room = [block.room(index, len(rows)) for block in blocks]
        stacked = stack_samples(samples, schema.structure, schema.fields, room)
        if stacked is not None:
            for block, leaves in zip(blocks, stacked, strict=True):
                if isinstance(leaves, tuple):
                    block.put_rows(index, Values(_as_tensor(leaves[0]), leaves[1]))
                else:
                    block.put_rows(index, leaves)
            return
        for offset, sample in enumerate(samples):
            row = flatten_row(sample, rows[offset], schema)
            for block, leaf in zip(blocks, row, strict=True):
                block.put(index + offset, leaf)

    def close(self) -> None:
        """Wait for what is being written, and close the directory and the files."""
        self._thread.shutdown()
        self._writer.close()


def _fitting(field: Field, found: Any, num_rows: int) -> Values | None:
    """Rows of a field, in the memory in which they lie where torch can use it; else None."""
    if field.num_variable:
        packed = packed_rows(field, found)
        if packed is None or len(packed[1]) != num_rows:
            return None
        return Values(_as_tensor(packed[0]), packed[1])
    values = fitting_rows(field, found)
    return None if values is None or len(values) != num_rows else Values(_as_tensor(values))


def _as_tensor(values: Tensor | np.ndarray) -> Tensor:
    if isinstance(values, Tensor):
        return values
    array = values.astype(values.dtype.newbyteorder("="), copy=False)
    if min(array.strides) < 0:
        array = np.ascontiguousarray(array)
    with warnings.catch_warnings():
        # Of memory that torch must not write to, such as a file that is mapped: it is only read.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)
