"""Open columns: the rows of each field of a store, as they lie in memory.

The files are mapped, and of a stranger: whatever an index says is checked before it is used.
"""

import math
import os
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self, override

from lightning_memmap.errors import StoreError
from lightning_memmap.sampling.rows import Integers, starts_of
from lightning_memmap.schema.fields import Field, Values, take_rows
from lightning_memmap.store.files import leaf_bytes, open_plain, unreadable
from lightning_memmap.store.segments import copy_segments

#: No dimension of a row is larger, so that products of sizes can be checked.
_MAX_SIZE = 2**40
#: The largest size of a row without items in a dimension that differs: nothing else bounds it, and
#: whoever pads such rows makes memory of that size.
MAX_EMPTY_SIZE = 2**16
#: Rows whose places are looked up at once.
LOCATED_ROWS = 2**18


class OpenColumn(Protocol):
    """The rows of one field of an open store."""

    @property
    def tensor(self) -> Tensor:
        """All rows as one mapped tensor of shape (num_rows, *field shape), on the CPU, shard after
        shard."""

    def row(self, row: int) -> Tensor:
        """Copy one row, given in dataset order and in ``[0, num_rows)``."""

    def fetch(self, rows: Integers) -> Values:
        """Copy rows, given by their numbers in dataset order, int64 of shape (B,)."""


class Located(NamedTuple):
    """Where rows lie among items."""

    starts: Integers
    """The first item of each row, int64 of shape (B,)."""
    sizes: Integers
    """Its sizes in the dimensions that differ, int64 of shape (B, number of these)."""


class Locating(Protocol):
    """Knows where rows lie in memory: the shards of a store, or of several."""

    @property
    def num_rows(self) -> int:
        """How many rows there are."""

    def file_rows(self, rows: Any) -> Any:
        """Return where rows are stored, int64 of the same shape, or one integer."""


@dataclass(frozen=True)
class Supplied:
    """A column whose rows are brought before they are read."""

    column: OpenColumn
    #: Brings rows, or all.
    get: Callable[[Integers | None], None]

    @property
    def tensor(self) -> Tensor:
        """All rows."""
        self.get(None)
        return self.column.tensor

    def row(self, row: int) -> Tensor:
        """A copy of one row."""
        self.get(np.array([row]))
        return self.column.row(row)

    def fetch(self, rows: Integers) -> Values:
        """Copies of rows."""
        self.get(rows)
        return self.column.fetch(rows)


def map_rows(path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Map a file as a tensor, by its descriptor: what was checked is what is mapped."""
    count = math.prod(shape)
    try:
        file = open_plain(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        found = os.fstat(file).st_size
        if found != count * dtype.itemsize:
            raise StoreError(
                f"{path} has {found} bytes, expected {count * dtype.itemsize}: build the store"
                " again"
            )
        # Not shared: copy-on-write.
        mapped = torch.from_file(f"/proc/self/fd/{file}", shared=False, size=count, dtype=dtype)
    except (OSError, RuntimeError) as error:
        raise StoreError(
            f"{path} cannot be mapped: {error}: see that you have the right to read it, that its"
            " disk works, and that the process may map that much (`ulimit -v`) and that many files"
            " (`sysctl vm.max_map_count`)"
        ) from error
    finally:
        os.close(file)
    return mapped.view(shape)


@dataclass(frozen=True)
class MappedRows:
    """The rows of a file that is mapped."""

    shards: Locating
    tensor: Tensor

    def row(self, row: int) -> Tensor:
        """A copy of one row."""
        return self.tensor[int(self.shards.file_rows(row))].clone()

    def fetch(self, rows: Integers) -> Values:
        """Copies of rows."""
        return Values(take_rows(self.tensor, self.shards.file_rows(rows)))


def packed_index(sizes: Integers) -> Integers:
    """The index of rows whose items lie one after the other."""
    ends = np.cumsum(sizes.prod(axis=1))
    index: Integers = ends[:, None] if sizes.shape[1] == 1 else np.c_[ends, sizes]
    return index


@dataclass(frozen=True)
class ItemRows:
    """Rows that differ in length, in one place in memory. An open column is one."""

    field: Field
    shards: Locating
    items: Tensor
    index: Integers

    @property
    def tensor(self) -> Tensor:
        """Never: the rows do not lie in one tensor."""
        raise StoreError(
            f"field {self.field.name!r}: its rows differ in length, so that they do not lie in one"
            " tensor: read them by row, or through a loader"
        )

    def at(self, locations: Integers) -> Located:
        """Find rows."""
        # As an unsigned integer, a negative location is larger than any other.
        if len(locations) and int(locations.view(np.uint64).max()) >= len(self.index):
            raise IndexError(f"locations {locations.min()} to {locations.max()}: outside the rows")
        ends = self.index[:, 0].take(locations)
        starts = self.index[:, 0].take(locations - 1, mode="wrap")
        starts[locations == 0] = 0
        # Compared, not subtracted: a difference may overflow.
        least, most = starts.min(initial=0), ends.max(initial=0)
        is_valid = least >= 0 and most <= len(self.items) and bool((starts <= ends).all())
        lengths = ends - starts
        sizes = lengths[:, None]
        if is_valid and self.field.num_variable > 1:
            sizes = self.index[:, 1:].take(locations, axis=0)
            most = np.where(lengths, _MAX_SIZE, MAX_EMPTY_SIZE)[:, None]
            is_small = ((sizes >= 0) & (sizes <= most)).all()
            # As floats too, which do not overflow.
            products = sizes.astype(np.float64).prod(axis=1)
            is_valid = bool(is_small and (products == lengths).all())
        if not is_valid:
            raise StoreError(
                f"field {self.field.name!r}: the index of its rows is damaged: check the store with"
                " `lightning-memmap store verify`, and build it again"
            )
        return Located(starts, sizes)

    def among(self, locations: Integers) -> tuple[Tensor, Located]:
        """The items that rows are among, and where they are."""
        return self.items, self.at(locations)

    def lengths(self) -> Integers:
        """The items of each row, int64 of shape (rows,), in dataset order."""
        lengths = np.empty(self.shards.num_rows, np.int64)
        for first in range(0, len(lengths), LOCATED_ROWS):
            rows = np.arange(first, min(first + LOCATED_ROWS, len(lengths)), dtype=np.int64)
            lengths[rows] = self.at(self.shards.file_rows(rows)).sizes.prod(axis=1)
        return lengths

    def row(self, row: int) -> Tensor:
        """A copy of one row."""
        items, ((start,), sizes) = self.among(self.shards.file_rows(np.array([row])))
        end = start + math.prod(shape := sizes[0].tolist())
        return items[start:end].clone().view(*shape, *self.field.item_shape)

    def fetch(self, rows: Integers) -> Values:
        """Copies of rows."""
        return self.read(self.shards.file_rows(rows))

    def read(self, locations: Integers) -> Values:
        """Copies of rows that are given by where they lie."""
        items, (starts, sizes) = self.among(locations)
        lengths, size = sizes.prod(axis=1), self.field.item_bytes
        shape = int(lengths.sum()), *items.shape[1:]
        data = torch.empty(shape, dtype=items.dtype, device="cpu")
        target, places = leaf_bytes(data), starts_of(lengths)
        copy_segments(leaf_bytes(items), starts * size, target, places * size, lengths * size)
        return Values(data, sizes)


@dataclass(frozen=True)
class ComingItems(ItemRows):
    """Rows that differ in length, of which some are still to come. They lie in several files."""

    #: Waits for all rows, and gives them.
    whole: Callable[[], ItemRows]

    @classmethod
    def of(cls, field: Field, shards: Locating, *more: Any) -> Self:
        """The rows of a field, with what subclasses need."""
        return cls(field, shards, Values.none(field).data, np.empty((0, 1), np.int64), *more)

    @override
    def at(self, locations: Integers) -> Located:
        return self.whole().at(locations)

    @override
    @abstractmethod
    def among(self, locations: Integers) -> tuple[Tensor, Located]:
        """Rows that are there."""
