"""Open columns: the rows of one field of a store, mapped into memory.

The files may come from an untrusted source, so every index entry is checked before it is used.
"""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_memmap.errors import StoreError
from lightning_memmap.integers import Integers, items_per_row, starts_of
from lightning_memmap.schema.fields import Field, Values, take_rows
from lightning_memmap.store.files import (
    copy_segments,
    leaf_bytes,
    make_unreadable_error,
    open_plain,
)

#: Largest size of a row in one dimension, so that products of sizes can be checked.
_MAX_SIZE = 2**40
#: Largest size, in a variable dimension, of a row without items. No file bounds it, and padding
#: such a row allocates memory of that size.
MAX_EMPTY_SIZE = 2**16
#: Rows that are looked up at once.
LOCATED_ROWS = 2**18


class Located(NamedTuple):
    """The items of some rows, as ranges of one tensor of items."""

    starts: Integers
    """The first item of each row, int64 of shape (B,)."""
    sizes: Integers
    """The sizes of each row in its variable dimensions, int64 of shape (B, these dimensions)."""


#: Maps rows in dataset order to file rows: int64 of the same shape, or one integer.
FileRows: TypeAlias = Callable[[Any], Any]


def map_rows(path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Map a file as a tensor, by the descriptor whose size was checked."""
    num_values = math.prod(shape)
    try:
        file = open_plain(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise make_unreadable_error(path, error) from error
    try:
        num_bytes = os.fstat(file).st_size
        if num_bytes != (expected := num_values * dtype.itemsize):
            raise StoreError(
                f"{path} has {num_bytes} bytes, expected {expected}: build the store again"
            )
        # shared=False maps the file copy-on-write.
        name = f"/proc/self/fd/{file}"
        mapped = torch.from_file(name, shared=False, size=num_values, dtype=dtype)
    except (OSError, RuntimeError) as error:
        raise StoreError(
            f"{path} cannot be mapped: {error}. Check that you may read it, that its disk works,"
            " and the limits of memory (`ulimit -v`) and of mappings (`sysctl vm.max_map_count`)."
        ) from error
    finally:
        os.close(file)
    return mapped.view(shape)


@dataclass(frozen=True)
class MappedRows:
    """A field whose rows have one shape, in one mapped tensor."""

    file_rows: FileRows
    #: All rows in file order, of shape (num_rows, *field shape), on the CPU.
    tensor: Tensor

    def row(self, row: int) -> Tensor:
        """Copy one row, by its index in dataset order."""
        return self.tensor[int(self.file_rows(row))].clone()

    def fetch(self, rows: Integers) -> Values:
        """Copy rows, by their indices in dataset order, int64 of shape (B,)."""
        return Values(take_rows(self.tensor, self.file_rows(rows)))


def compute_index(sizes: Integers) -> Integers:
    """Compute the index of rows whose items are stored without gaps, from the sizes of the rows."""
    stops = np.cumsum(items_per_row(sizes))
    index: Integers = stops[:, None] if sizes.shape[1] == 1 else np.c_[stops, sizes]
    return index


@dataclass(frozen=True)
class VariableItems(ABC):
    """A field whose rows differ in length."""

    field: Field
    file_rows: FileRows

    @abstractmethod
    def items_and_ranges(self, file_rows: Integers) -> tuple[Tensor, Located]:
        """Return a tensor that contains the items of some rows, and the range of each row in it."""

    def row(self, row: int) -> Tensor:
        """Copy one row, by its index in dataset order."""
        items, ((start,), sizes) = self.items_and_ranges(self.file_rows(np.array([row])))
        shape = sizes[0].tolist()
        stop = start + math.prod(shape)
        return items[start:stop].clone().view(*shape, *self.field.item_shape)

    def fetch(self, rows: Integers) -> Values:
        """Copy rows, by their indices in dataset order, int64 of shape (B,)."""
        return self.read(self.file_rows(rows))

    def read(self, file_rows: Integers) -> Values:
        """Copy rows, by their indices in the files."""
        items, (starts, sizes) = self.items_and_ranges(file_rows)
        lengths = items_per_row(sizes)
        shape = int(lengths.sum()), *items.shape[1:]
        data = torch.empty(shape, dtype=items.dtype, device="cpu")
        num_bytes = lengths * self.field.item_bytes
        starts = starts * self.field.item_bytes
        targets = starts_of(num_bytes)
        copy_segments(leaf_bytes(items), starts, leaf_bytes(data), targets, num_bytes)
        return Values(data, sizes)


@dataclass(frozen=True)
class IndexedItems(VariableItems):
    """A field whose rows differ in length, with all items in one tensor and an index of the rows.

    Rows of 2, 0 and 3 items: the index is 2, 2, 5, where the items of each row stop. If several
    dimensions are variable, each entry also holds the sizes of its row.
    """

    items: Tensor
    #: int64 of shape (num_rows, 1 or 1 + variable dimensions), in file order.
    index: Integers

    def locate(self, file_rows: Integers) -> Located:
        """Look up rows in the index, and check their entries."""
        # As an unsigned integer, a negative index is larger than any other.
        if len(file_rows) and int(file_rows.view(np.uint64).max()) >= len(self.index):
            raise IndexError(f"file rows {file_rows.min()} to {file_rows.max()}: outside the rows")
        stops = self.index[:, 0].take(file_rows)
        starts = self.index[:, 0].take(file_rows - 1, mode="wrap")
        starts[file_rows == 0] = 0
        # Compared, not subtracted, because a difference may overflow.
        is_inside = starts.min(initial=0) >= 0 and stops.max(initial=0) <= len(self.items)
        is_valid = is_inside and bool((starts <= stops).all())
        lengths = stops - starts
        sizes = lengths[:, None]
        if is_valid and self.field.num_variable > 1:
            sizes = self.index[:, 1:].take(file_rows, axis=0)
            max_sizes = np.where(lengths, _MAX_SIZE, MAX_EMPTY_SIZE)[:, None]
            is_small = ((sizes >= 0) & (sizes <= max_sizes)).all()
            # As floats too, which do not overflow.
            products = sizes.astype(np.float64).prod(axis=1)
            is_valid = bool(is_small and (products == lengths).all())
        if not is_valid:
            raise StoreError(
                f"field {self.field.name!r}: the index of its rows is damaged. Check the store with"
                " `lightning-memmap store verify`, and build it again."
            )
        return Located(starts, sizes)

    @override
    def items_and_ranges(self, file_rows: Integers) -> tuple[Tensor, Located]:
        return self.items, self.locate(file_rows)

    def lengths(self, num_rows: int) -> Integers:
        """Count the items of each row, int64 of shape (num_rows,), in dataset order."""
        lengths = np.empty(num_rows, np.int64)
        for start in range(0, len(lengths), LOCATED_ROWS):
            rows = np.arange(start, min(start + LOCATED_ROWS, len(lengths)), dtype=np.int64)
            lengths[rows] = items_per_row(self.locate(self.file_rows(rows)).sizes)
        return lengths


OpenColumn: TypeAlias = MappedRows | VariableItems
