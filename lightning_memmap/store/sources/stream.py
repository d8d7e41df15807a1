"""Streams: datasets that are iterated over, of a length that is known only at their end.

Where a row lies in a store depends on the number of rows. So the rows of a stream are first written
to temporary files, one for each field, in their order; then the store is built from slices of these
files. A second pass over the stream would need no such files, but a generator gives its rows once,
and a stream need not give the same rows twice.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from lightning_memmap.errors import DatasetError, describe_error
from lightning_memmap.sampling import Integers
from lightning_memmap.schema import Field, Form, Values
from lightning_memmap.schema.values import join_values
from lightning_memmap.store.files import leaf_bytes
from lightning_memmap.store.progress import Advance
from lightning_memmap.store.samples import MAX_PROBES, NUM_PROBES, find_schema, hash_row, stack_rows

#: Samples that are held as Python objects, before they are written.
_PIECE_BYTES, _MAX_PIECE_ROWS = 2**20, 1024


def is_stream(dataset: Any) -> bool:
    """Whether a dataset is iterated over: an ``IterableDataset``, a generator, another iterable."""
    kind = type(dataset)
    is_iterable = hasattr(kind, "__iter__") and not hasattr(kind, "__getitem__")
    return isinstance(dataset, IterableDataset) or is_iterable


def is_read_once(dataset: Any) -> bool:
    """Whether a dataset gives its rows once, as a generator does."""
    return is_stream(dataset) and hasattr(type(dataset), "__next__")


def samples_of(stream: Any) -> Iterator[Any]:
    """Iterate over the samples of a stream."""
    row = 0
    try:
        for sample in stream:
            yield sample
            row += 1
    except Exception as error:
        raise DatasetError(f"the dataset raised at row {row}: {describe_error(error)}") from error


class Spool:
    """The rows of a stream in temporary files, which have no names and end with this process."""

    def __init__(
        self, stream: Any, directory: Path, advance: Advance, forms: Mapping[str, Form]
    ) -> None:
        self._num_rows, self._directory = 0, directory
        samples = samples_of(stream)
        piece = list(islice(samples, NUM_PROBES))
        if not piece:
            read = " A generator gives its rows once." if is_read_once(stream) else ""
            raise ValueError(f"the dataset is empty: there is nothing to store.{read}")
        self._first = piece[0]
        more = islice(enumerate(samples, len(piece)), MAX_PROBES - len(piece))
        self.schema = find_schema(piece, list(range(len(piece))), forms, more)
        with ExitStack() as stack:
            self._columns = [_SpooledColumn(field, directory) for field in self.schema.fields]
            for column in self._columns:
                stack.callback(column.close)
            while piece:
                self._append(piece)
                advance(len(piece))
                max_rows = max(1, _PIECE_BYTES // self.row_bytes)
                piece = list(islice(samples, min(max_rows, _MAX_PIECE_ROWS)))
            self._files = stack.pop_all()

    def __len__(self) -> int:
        return self._num_rows

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, on average and at least 1."""
        return max(1, sum(column.num_bytes for column in self._columns) // self._num_rows)

    def read(self, rows: range | Integers) -> list[Values]:
        """Read rows; see `lightning_memmap.store.sources.Source`."""
        if isinstance(rows, range):
            return [column.read(rows.start, rows.stop) for column in self._columns]
        found = [self.read(range(row, row + 1)) for row in rows.tolist()]
        return [join_values(values) for values in zip(*found, strict=True)]

    def pieces(self, rows: Integers) -> None:
        """All rows are equally far."""

    def hash_row(self, row: int) -> str:
        """Hash a row; see `lightning_memmap.store.samples.hash_row`."""
        return hash_row([next(each.rows()) for each in self.read(range(row, row + 1))])

    def close(self) -> None:
        """Remove the files."""
        self._files.close()

    def _append(self, samples: list[Any]) -> None:
        rows = range(len(self), len(self) + len(samples))
        stacked = stack_rows(samples, rows, self.schema, lambda: self._first)
        try:
            for column, values in zip(self._columns, stacked, strict=True):
                column.append(values)
        except OSError as error:
            raise OSError(
                error.errno,
                f"after {self._num_rows} rows of the stream, which are kept beside the store until"
                f" all have come: {error.strerror}: make room, or choose a directory on a larger"
                " disk",
                str(self._directory),
            ) from error
        self._num_rows += len(samples)


class _SpooledColumn:
    """The rows of a field of a stream, in a temporary file."""

    def __init__(self, field: Field, directory: Path) -> None:
        self._field = field
        with ExitStack() as stack:
            self._items = stack.enter_context(tempfile.TemporaryFile(dir=directory))
            self._index = stack.enter_context(tempfile.TemporaryFile(dir=directory))
            self._files = stack.pop_all()
        self._end = self.num_bytes = 0
        self._index.write(np.zeros(1 + field.num_variable, np.int64).data)

    def append(self, values: Values) -> None:
        """Append rows."""
        if values.sizes is not None:
            index = np.empty((len(values.sizes), 1 + self._field.num_variable), np.int64)
            index[:, 1:] = values.sizes
            index[:, 0] = self._end + np.cumsum(values.sizes.prod(axis=1))
            self._end = int(index[-1, 0])
            self.num_bytes += self._index.write(index.data)
        self.num_bytes += self._items.write(leaf_bytes(values.data).data)

    def read(self, first: int, end: int) -> Values:
        """Read consecutive rows."""
        sizes = None
        if self._field.num_variable:
            index = np.empty((1 + end - first, 1 + self._field.num_variable), np.int64)
            _read_into(leaf_bytes(index), self._index, first * index[0].nbytes)
            first, end, sizes = int(index[0, 0]), int(index[-1, 0]), index[1:, 1:]
        items = torch.empty((end - first, *self._field.item_shape), dtype=self._field.dtype)
        # The same memory.
        _read_into(leaf_bytes(items), self._items, first * self._field.item_bytes)
        return Values(items, sizes)

    def close(self) -> None:
        """Remove the files."""
        self._files.close()


def _read_into(data: np.ndarray, file: IO[bytes], start: int) -> None:
    """Fill memory, uint8 of one dimension, with bytes of a file."""
    file.flush()
    done = 0
    while done < len(data):
        count = os.preadv(file.fileno(), [data[done:].data], start + done)
        if not count:
            raise OSError("a temporary file with rows of the stream was cut short")
        done += count
