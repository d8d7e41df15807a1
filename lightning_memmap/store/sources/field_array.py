"""The rows of one field of a dataset, read many at once."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_memmap.sampling import Integers
from lightning_memmap.schema import Field
from lightning_memmap.schema.leaves import EMPTY
from lightning_memmap.schema.rows import arrays_of_lists

#: Rows that lie closer together than this in a file are read together, with what is between them.
_MAX_GAP_BYTES = 64 * 2**10


@dataclass(frozen=True, eq=False)
class NullableRows:
    """Rows of numbers or times of which some are None.

    Args:
        values: The rows, zeros where they are None.
        is_given: Whether each row is not None, bool of shape (n,).
    """

    values: np.ndarray
    is_given: np.ndarray

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, slice | np.ndarray):
            return NullableRows(self.values[rows], self.is_given[rows])
        return self.values[rows] if self.is_given[rows] else None


#: What is read of the rows of a field.
Found: TypeAlias = Tensor | np.ndarray | NullableRows


class FieldArray(ABC):
    """The rows of one field, one after the other along the first dimension.

    What is read has the field's dtype and shape (n, *field shape), or is a numpy array of objects,
    one for each row. Anything else means that these rows must be read one by one. Of a field that
    may be None, rows are read as `NullableRows` or objects, of which `PartOfRows` takes one part.
    """

    @abstractmethod
    def read(self, first: int, end: int) -> Found:
        """Read consecutive rows.

        Args:
            first: The first row.
            end: One past the last row.
        """

    @abstractmethod
    def take(self, rows: Integers) -> Found:
        """Read rows in any order.

        Args:
            rows: The rows, int64 of shape (n,), none of them negative.
        """


@dataclass(frozen=True, eq=False)
class MemoryArray(FieldArray):
    """Rows in memory, or mapped into it.

    Args:
        values: The rows.
    """

    values: Found

    @override
    def read(self, first: int, end: int) -> Found:
        found: Found = self.values[first:end]
        return found

    @override
    def take(self, rows: Integers) -> Found:
        if isinstance(self.values, Tensor):
            return self.values[torch.from_numpy(rows).to(self.values.device)]
        found: Found = self.values[rows]
        return found


@dataclass(frozen=True, eq=False)
class FileArray(FieldArray):
    """Rows in a file, which is read by slices, such as an array of h5py or zarr.

    Args:
        values: Has a ``dtype`` of numpy, a ``shape``, and slices that are arrays.
    """

    values: Any

    @override
    def read(self, first: int, end: int) -> np.ndarray:
        return np.asarray(self.values[first:end])

    @override
    def take(self, rows: Integers) -> np.ndarray:
        taken = np.empty((len(rows), *self.values.shape[1:]), self.values.dtype)
        order = np.argsort(rows, kind="stable")
        gap = max(1, _MAX_GAP_BYTES * len(taken) // max(1, taken.nbytes))
        for places in np.split(order, np.flatnonzero(np.diff(rows[order]) > gap) + 1):
            if len(places):
                first, last = rows[places[0]], rows[places[-1]]
                taken[places] = self.read(int(first), int(last) + 1)[rows[places] - first]
        return taken


@dataclass(frozen=True, eq=False)
class SubsetArray(FieldArray):
    """Some rows of another array, in an order of their own.

    Args:
        array: The other array.
        rows: Its rows, int64 of shape (n,), none of them negative.
    """

    array: FieldArray
    rows: Integers

    @override
    def read(self, first: int, end: int) -> Found:
        return self._take(self.rows[first:end])

    @override
    def take(self, rows: Integers) -> Found:
        return self._take(self.rows[rows])

    def _take(self, rows: Integers) -> Found:
        if len(rows) and (np.diff(rows) == 1).all():
            return self.array.read(int(rows[0]), int(rows[-1]) + 1)
        return self.array.take(rows)


@dataclass(frozen=True, eq=False)
class JoinedArray(FieldArray):
    """The rows of several arrays, one array after the other.

    Args:
        arrays: The arrays.
        sizes: Rows of each array.
    """

    arrays: Sequence[FieldArray]
    sizes: Sequence[int]

    @cached_property
    def _ends(self) -> Integers:
        return np.cumsum(self.sizes, dtype=np.int64)

    @override
    def read(self, first: int, end: int) -> Found:
        parts = []
        for array, size, stop in zip(self.arrays, self.sizes, self._ends.tolist(), strict=True):
            start = stop - size
            if max(first, start) < min(end, stop):
                parts.append(array.read(max(first, start) - start, min(end, stop) - start))
        return join(parts)

    @override
    def take(self, rows: Integers) -> Found:
        numbers = np.searchsorted(self._ends, rows, side="right")
        order = np.argsort(numbers, kind="stable")
        parts = []
        for places in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
            number = int(numbers[places[0]])
            start = int(self._ends[number]) - self.sizes[number]
            parts.append(self.arrays[number].take(rows[places] - start))
        joined = join(parts)
        back = np.argsort(order)
        in_order: Found = (
            joined[torch.from_numpy(back)] if isinstance(joined, Tensor) else joined[back]
        )
        return in_order


@dataclass(frozen=True, eq=False)
class PartOfRows(FieldArray):
    """The values of rows of which some may be None, or which of them are not.

    Args:
        array: The rows.
        is_mask: Whether it is the latter.
    """

    array: FieldArray
    is_mask: bool

    @override
    def read(self, first: int, end: int) -> Tensor | np.ndarray:
        return self._part(self.array.read(first, end))

    @override
    def take(self, rows: Integers) -> Tensor | np.ndarray:
        return self._part(self.array.take(rows))

    def _part(self, found: Found) -> Tensor | np.ndarray:
        if isinstance(found, NullableRows):
            return found.is_given if self.is_mask else found.values
        if found.dtype != object:
            return np.ones(len(found), bool) if self.is_mask else found
        # Objects say for themselves whether they are None.
        if self.is_mask:
            return np.array([value is not None for value in found], bool)
        return object_array([EMPTY if value is None else value for value in found])


@dataclass(frozen=True, eq=False)
class RowsOfLists(FieldArray):
    """Lists of numbers, read as arrays.

    Args:
        array: The lists, or None.
        field: The field whose rows they are.
    """

    array: FieldArray
    field: Field

    @override
    def read(self, first: int, end: int) -> np.ndarray:
        return self._arrays(self.array.read(first, end))

    @override
    def take(self, rows: Integers) -> np.ndarray:
        return self._arrays(self.array.take(rows))

    def _arrays(self, found: Found) -> np.ndarray:
        lists = found.tolist() if isinstance(found, np.ndarray) and found.dtype == object else [0]
        arrays = arrays_of_lists(self.field, lists)
        # Numbers are no rows of this field, so that they are read one by one.
        return np.zeros(len(found), object) if arrays is None else object_array(arrays)


def object_array(values: Sequence[Any]) -> np.ndarray:
    """Make an array with one object for each value, also where these are lists of one length."""
    objects = np.empty(len(values), object)
    for index, value in enumerate(values):
        objects[index] = value
    return objects


def join(parts: Sequence[Found]) -> Found:
    """Join arrays along their first dimension.

    Args:
        parts: Tensors, numpy arrays or rows of which some are None, at least one.

    Returns:
        A tensor if all are tensors of one dtype, an array if all are arrays of one dtype and row
        shape, and else an array of objects. If rows of a part are None, then of the whole as well.
    """
    if len(parts) == 1:
        return parts[0]
    if any(isinstance(part, NullableRows) for part in parts):
        values, given = (
            join([PartOfRows(MemoryArray(part), is_mask).read(0, len(part)) for part in parts])
            for is_mask in (False, True)
        )
        assert isinstance(values, np.ndarray)
        assert isinstance(given, np.ndarray)
        return NullableRows(values, given)
    return _joined([part for part in parts if not isinstance(part, NullableRows)])


def _joined(parts: Sequence[Tensor | np.ndarray]) -> Tensor | np.ndarray:
    if len({(type(part), part.dtype, tuple(part.shape[1:])) for part in parts}) > 1:
        return object_array([row for part in parts for row in part])
    if isinstance(parts[0], Tensor):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    return np.concatenate([np.asarray(part) for part in parts])
