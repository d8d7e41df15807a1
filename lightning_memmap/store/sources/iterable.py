"""Iterable datasets, whose length is known only at their end.

The location of a row in a store depends on the number of rows. So the rows of an iterable are first
written to a temporary file in blocks, and the store is built from these blocks. A second pass over
it would need no file, but a generator yields its rows once, and other iterables may yield different
rows.
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
from lightning_memmap.integers import items_per_row
from lightning_memmap.schema.fields import Values, join_values
from lightning_memmap.schema.forms import Declared
from lightning_memmap.schema.shared_memory import copy_sample
from lightning_memmap.schema.stack import as_tensor
from lightning_memmap.store.files import leaf_bytes
from lightning_memmap.store.progress import Advance
from lightning_memmap.store.samples import (
    MAX_PROBES,
    NUM_PROBES,
    choose_block_rows,
    find_schema,
    hash_row,
    stack_rows,
)
from lightning_memmap.store.sources.column import split_by_group
from lightning_memmap.store.workers import RowIndices


def is_iterable_only(dataset: Any) -> bool:
    """Return whether a dataset has no rows by index: an ``IterableDataset``, generator or such."""
    python_type = type(dataset)
    is_iterable = hasattr(python_type, "__iter__") and not hasattr(python_type, "__getitem__")
    return isinstance(dataset, IterableDataset) or is_iterable


def is_read_once(dataset: Any) -> bool:
    """Return whether a dataset yields its rows only once, like a generator."""
    return is_iterable_only(dataset) and hasattr(type(dataset), "__next__")


def iterate_samples(dataset: Any) -> Iterator[Any]:
    """Iterate over the samples of an iterable dataset."""
    row = 0
    try:
        for sample in dataset:
            yield sample
            row += 1
    except Exception as error:
        raise DatasetError(f"the dataset raised at row {row}: {describe_error(error)}") from error


class Spool:
    """The rows of an iterable in a temporary file, which has no name and ends with this process."""

    def __init__(self, dataset: Any, directory: Path, advance: Advance, declared: Declared) -> None:
        self._directory = directory
        #: The first row of each block, and the number of rows.
        self._starts = [0]
        #: The first byte of each block in the file, and the number of bytes.
        self._offsets = [0]
        samples = map(copy_sample, iterate_samples(dataset))
        block = list(islice(samples, NUM_PROBES))
        if not block:
            read = " A generator yields its rows once." if is_read_once(dataset) else ""
            raise ValueError(f"the dataset is empty: there is nothing to store.{read}")
        self._first = block[0]
        more = islice(enumerate(samples, len(block)), MAX_PROBES - len(block))
        self.schema = find_schema(block, list(range(len(block))), declared, more)
        with ExitStack() as stack:
            self._file = stack.enter_context(tempfile.TemporaryFile(dir=directory))
            while block:
                self._append(block)
                advance(len(block))
                block = list(islice(samples, choose_block_rows(self.row_bytes)))
            stack.pop_all()

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, on average."""
        return self._offsets[-1] // len(self)

    def read(self, rows: RowIndices) -> list[Values]:
        """Read rows; see `lightning_memmap.store.sources.Source`."""
        blocks, back = split_by_group(rows, np.array(self._starts[1:]))
        values = [[field.take(rows) for field in self._block(index)] for index, rows in blocks]
        return join_values(values, back)

    def hash_row(self, row: int) -> str:
        """Hash a row; see `lightning_memmap.store.samples.hash_row`."""
        return hash_row([next(field.rows()) for field in self.read(range(row, row + 1))])

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    def _append(self, samples: list[Any]) -> None:
        rows = range(len(self), len(self) + len(samples))
        stacked = stack_rows(samples, rows, self.schema, lambda: self._first)
        try:
            leaves = [(leaf_bytes(values.data), values.sizes) for values in stacked]
            pickle.dump(leaves, self._file, 5)
            self._offsets.append(self._file.tell())
            self._file.flush()
        except OSError as error:
            raise OSError(
                error.errno,
                f"after {len(self)} rows of the iterable, which are kept in a temporary file until"
                f" all have arrived: {error.strerror}. Free disk space, or choose a directory on a"
                " larger disk",
                str(self._directory),
            ) from error
        self._starts.append(rows.stop)

    def _block(self, index: int) -> list[Values]:
        """Read the rows of a block."""
        self._file.seek(self._offsets[index])
        leaves = pickle.load(self._file)
        num_rows = self._starts[index + 1] - self._starts[index]
        values = list[Values]()
        for field, (data, sizes) in zip(self.schema.fields, leaves, strict=True):
            count = num_rows if sizes is None else int(items_per_row(sizes).sum())
            items = as_tensor(data).view(field.dtype).view(count, *field.item_shape)
            values.append(Values(items, sizes))
        return values
