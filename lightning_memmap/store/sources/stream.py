"""Streams: datasets that are iterated over, of a length that is known only at their end.

Where a row lies in a store depends on the number of rows. So the rows of a stream are first written
to a temporary file, piece by piece; then the store is built from these pieces. A second pass over
the stream would need no such file, but a generator gives its rows once, and a stream need not give
the same rows twice.
"""

import pickle
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from lightning_memmap.errors import DatasetError, describe_error
from lightning_memmap.schema.fields import Values, join_values
from lightning_memmap.schema.forms import Declared
from lightning_memmap.schema.held import copied
from lightning_memmap.schema.stack import as_tensor
from lightning_memmap.store.files import leaf_bytes
from lightning_memmap.store.progress import Advance
from lightning_memmap.store.samples import (
    MAX_PROBES,
    NUM_PROBES,
    find_schema,
    hash_row,
    rows_at_once,
    stack_rows,
)
from lightning_memmap.store.sources.column import by_piece
from lightning_memmap.store.workers import RowNumbers


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
    """The rows of a stream in a temporary file, which has no name and ends with this process."""

    def __init__(self, stream: Any, directory: Path, advance: Advance, declared: Declared) -> None:
        self._directory = directory
        #: Where the rows, and the bytes, of each piece end.
        self._ends, self._places = [0], [0]
        samples = map(copied, samples_of(stream))
        piece = list(islice(samples, NUM_PROBES))
        if not piece:
            read = " A generator gives its rows once." if is_read_once(stream) else ""
            raise ValueError(f"the dataset is empty: there is nothing to store.{read}")
        self._first = piece[0]
        more = islice(enumerate(samples, len(piece)), MAX_PROBES - len(piece))
        self.schema = find_schema(piece, list(range(len(piece))), declared, more)
        with ExitStack() as stack:
            self._file = stack.enter_context(tempfile.TemporaryFile(dir=directory))
            while piece:
                self._append(piece)
                advance(len(piece))
                piece = list(islice(samples, rows_at_once(self.row_bytes)))
            stack.pop_all()

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, on average."""
        return self._places[-1] // len(self)

    def read(self, rows: RowNumbers) -> list[Values]:
        """Read rows; see `lightning_memmap.store.sources.Source`."""
        pieces, back = by_piece(rows, np.array(self._ends[1:]))
        found = [[each.take(within) for each in self._piece(piece)] for piece, within in pieces]
        return join_values(found, back)

    def hash_row(self, row: int) -> str:
        """Hash a row; see `lightning_memmap.store.samples.hash_row`."""
        return hash_row([next(each.rows()) for each in self.read(range(row, row + 1))])

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    def _append(self, samples: list[Any]) -> None:
        rows = range(len(self), len(self) + len(samples))
        stacked = stack_rows(samples, rows, self.schema, lambda: self._first)
        try:
            pickle.dump([(leaf_bytes(each.data), each.sizes) for each in stacked], self._file, 5)
            self._places.append(self._file.tell())
            self._file.flush()
        except OSError as error:
            raise OSError(
                error.errno,
                f"after {len(self)} rows of the stream, which are kept beside the store until all"
                f" have come: {error.strerror}: make room, or choose a directory on a larger disk",
                str(self._directory),
            ) from error
        self._ends.append(rows.stop)

    def _piece(self, number: int) -> list[Values]:
        """The rows of a piece."""
        self._file.seek(self._places[number])
        found, num_rows = pickle.load(self._file), self._ends[number + 1] - self._ends[number]
        values = list[Values]()
        for field, (data, sizes) in zip(self.schema.fields, found, strict=True):
            count = num_rows if sizes is None else int(sizes.prod(axis=1).sum())
            items = as_tensor(data).view(field.dtype).view(count, *field.item_shape)
            values.append(Values(items, sizes))
        return values
