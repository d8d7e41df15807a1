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
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from typing_extensions import override

from lightning_memmap.errors import DatasetError, SchemaError
from lightning_memmap.sampling import Integers
from lightning_memmap.schema import Field, Schema
from lightning_memmap.schema.rows import stack_samples
from lightning_memmap.store.probes import flatten_row, leaf_bytes
from lightning_memmap.store.progress import Advance
from lightning_memmap.store.sources.field_array import FieldArray
from lightning_memmap.store.workers import describe_error

#: Samples that are held as Python objects, before they are written.
_PIECE_BYTES, _MAX_PIECE_ROWS = 2**20, 1024


def is_stream(dataset: Any) -> bool:
    """Whether a dataset is iterated over: an ``IterableDataset``, a generator or another iterable.

    Args:
        dataset: The dataset.
    """
    kind = type(dataset)
    is_iterable = hasattr(kind, "__iter__") and not hasattr(kind, "__getitem__")
    return isinstance(dataset, IterableDataset) or is_iterable


def samples_of(stream: Any) -> Iterator[Any]:
    """Iterate over the samples of a stream.

    Args:
        stream: The stream.

    Yields:
        The samples, in their order.

    Raises:
        DatasetError: The stream raised an error; the message names the row.
    """
    row = 0
    try:
        for sample in stream:
            yield sample
            row += 1
    except Exception as error:
        raise DatasetError(f"the dataset raised at row {row}: {describe_error(error)}") from error


class Spool:
    """The rows of a stream in temporary files, which have no names and end with this process.

    Args:
        stream: The stream, which is read to its end.
        directory: Where the files are.
        advance: Called with the number of rows read since the last call.
        store_dtypes: Other dtypes in which fields are kept, by name.

    Attributes:
        schema: The schema of all samples, which is that of the first one.
        arrays: The rows of each field, in the dtype in which it is kept.

    Raises:
        ValueError: The stream is empty.
        SchemaError: A sample cannot be stored, or does not fit the first one.
        DatasetError: The stream raised an error.
        OSError: The disk is full.
    """

    def __init__(
        self,
        stream: Any,
        directory: Path,
        advance: Advance,
        store_dtypes: Mapping[str, torch.dtype],
    ) -> None:
        self._num_rows = 0
        samples = samples_of(stream)
        first = list(islice(samples, 1))
        if not first:
            raise ValueError("the dataset is empty: there is nothing to store")
        try:
            self.schema = Schema.from_sample(first[0]).stored_as(store_dtypes)
        except SchemaError as error:
            raise SchemaError(f"row 0, {error}") from error
        for field in self.schema.fields:
            if field.num_variable:
                raise SchemaError(
                    f"field {field.name!r}: rows of a stream cannot differ in length: give a"
                    " dataset with __len__ and __getitem__"
                )
        with ExitStack() as stack:
            self.arrays = [SpooledRows(field, directory) for field in self.schema.fields]
            for array in self.arrays:
                stack.callback(array.close)
            row_bytes = sum(field.row_bytes for field in self.schema.fields)
            piece_rows = max(1, _PIECE_BYTES // max(1, row_bytes))
            piece = first
            while piece:
                self._append(piece)
                advance(len(piece))
                piece = list(islice(samples, min(piece_rows, _MAX_PIECE_ROWS)))
            self._files = stack.pop_all()

    def __len__(self) -> int:
        return self._num_rows

    def leaves(self, row: int) -> list[Tensor]:
        """The leaves of a row.

        Args:
            row: The row.

        Returns:
            One tensor for each field, of the dtype in which it is kept.
        """
        return [array.read(row, row + 1)[0] for array in self.arrays]

    def close(self) -> None:
        """Remove the files."""
        self._files.close()

    def _append(self, samples: list[Any]) -> None:
        schema = self.schema
        stacked = stack_samples(samples, schema.structure, schema.fields)
        if stacked is not None:
            for array, rows in zip(self.arrays, stacked, strict=True):
                array.append(leaf_bytes(rows))
        else:
            for row, sample in enumerate(samples, self._num_rows):
                for array, leaf in zip(self.arrays, flatten_row(sample, row, schema), strict=True):
                    array.append(leaf_bytes(leaf))
        self._num_rows += len(samples)


class SpooledRows(FieldArray):
    """The rows of a field of a stream, in a temporary file.

    Args:
        field: The field.
        directory: Where the file is.
    """

    def __init__(self, field: Field, directory: Path) -> None:
        self._field = field
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  # closed by `close`

    def append(self, data: np.ndarray) -> None:
        """Append rows.

        Args:
            data: Their bytes, uint8 of one dimension.
        """
        self._file.write(data.data)

    @override
    def read(self, first: int, end: int) -> Tensor:
        self._file.flush()
        rows = torch.empty((end - first, *self._field.item_shape), dtype=self._field.dtype)
        data, done = leaf_bytes(rows), 0  # The same memory.
        while done < len(data):
            start = first * self._field.row_bytes + done
            count = os.preadv(self._file.fileno(), [data[done:].data], start)
            if not count:
                raise OSError(f"field {self._field.name!r}: its temporary file was cut short")
            done += count
        return rows

    @override
    def take(self, rows: Integers) -> Tensor:
        return torch.cat([self.read(row, row + 1) for row in rows.tolist()])

    def close(self) -> None:
        """Remove the file."""
        self._file.close()
