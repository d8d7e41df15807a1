"""Integers in all rooms: their arrays, groups of consecutive elements, and strided positions.

Groups are described by their sizes. With 6 elements in groups of 3, 0, 1 and 2::

    starts_of        0 3 3 4
    bounds_of        0 3 3 4 6
    group_of         0 0 0 2 3 3
    index_in_group   0 1 2 0 0 1
    elements_of      4 5 0 1 2      for the groups 3 and 0
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

#: A numpy array of int64.
Integers: TypeAlias = NDArray[np.int64]


@overload
def ceil_div(dividend: int, divisor: int) -> int: ...


@overload
def ceil_div(dividend: NDArray[Any], divisor: Any) -> NDArray[Any]: ...


def ceil_div(dividend: Any, divisor: Any) -> Any:
    """Divide integers, rounded up."""
    return -(-dividend // divisor)


def items_per_row(sizes: Integers) -> Integers:
    """Count the items of rows from their sizes in k dimensions: (B, k) to int64 of shape (B,)."""
    items: Integers = sizes[:, 0] if sizes.shape[1] == 1 else sizes.prod(axis=1)
    return items


def starts_of(sizes: Integers) -> Integers:
    """Return where each of several consecutive groups starts, along the first axis."""
    starts: Integers = np.cumsum(sizes, axis=0, dtype=np.int64) - sizes
    return starts


def bounds_of(sizes: Integers | Sequence[int]) -> Integers:
    """Return where each group starts, and where the last one stops: of shape (groups + 1,)."""
    sizes = np.asarray(sizes, np.int64)
    bounds = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=bounds[1:])
    return bounds


def group_of(sizes: Integers | Sequence[int]) -> Integers:
    """Return the group of each element, int64 of shape (elements,)."""
    return np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)


def index_in_group(sizes: Integers) -> Integers:
    """Return the index of each element in its group, int64 of shape (elements,)."""
    return ranges(np.zeros_like(sizes), sizes)


def elements_of(groups: Integers, sizes: Integers) -> Integers:
    """Return the indices of all elements of some groups, group after group."""
    return ranges(starts_of(sizes)[groups], sizes[groups])


def group_sums(values: NDArray[Any], sizes: Integers | Sequence[int]) -> NDArray[Any]:
    """Add up the values of each group, 0 for an empty one: of shape (groups,)."""
    sums_before = np.zeros(len(values) + 1, np.result_type(values.dtype, np.int64))
    np.cumsum(values, out=sums_before[1:], dtype=sums_before.dtype)
    sums: NDArray[Any] = np.diff(sums_before[bounds_of(sizes)])
    return sums


def ranges(starts: Integers, counts: Integers, dtype: DTypeLike = np.int64) -> NDArray[Any]:
    """Concatenate ranges of consecutive integers, such as ``[5, 0], [2, 3]`` to 5 6 0 1 2."""
    # Unsigned integers may wrap around on the way.
    integers = np.repeat((starts - starts_of(counts)).astype(dtype), counts)
    integers += np.arange(len(integers), dtype=dtype)
    return integers


class Runs(NamedTuple):
    """A map from indices to integers that is consecutive run by run."""

    #: The index at which each run starts, int64 of shape (runs,), ascending.
    starts: Integers
    #: Added to an index in each run, int64 of shape (runs,).
    shifts: Integers

    @classmethod
    def of_ranges(cls, starts: Integers, sizes: Integers) -> "Runs":
        """Return a map from indices to the integers of ranges, range after range."""
        run_starts = starts_of(sizes)
        is_used = sizes > 0
        return cls(run_starts[is_used], (starts - run_starts)[is_used])

    def at(self, index: Integers) -> Integers:
        """Return the integers at indices, int64 of the same shape."""
        has_one_run = len(self.starts) == 1
        run = 0 if has_one_run else np.searchsorted(self.starts, index, side="right") - 1
        integers: Integers = index + self.shifts[run]
        return integers


def differs_from_previous(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return where a value differs from the one before it; the first does. The shape is kept."""
    return np.append(True, values[1:] != values[:-1])[: len(values)]


def distinct(integers: Integers) -> Integers:
    """Return the distinct integers, ascending. numpy's `unique` takes four times as long."""
    ordered = np.sort(integers)
    kept: Integers = ordered[differs_from_previous(ordered)]
    return kept


def strided(start: int, stop: int, rank: int, size: int) -> range:
    """Return the integers in ``[start, stop)`` that are ``rank`` modulo ``size``."""
    return range(start + (rank - start) % size, stop, size)


@overload
def num_strided(stop: int, rank: int, size: int) -> int: ...


@overload
def num_strided(stop: Integers, rank: int, size: int) -> Integers: ...


@overload
def num_strided(stop: int | Integers, rank: Integers, size: int) -> Integers: ...


def num_strided(stop: Any, rank: Any, size: int) -> Any:
    """Count the integers in ``[0, stop)`` that are ``rank`` modulo ``size``; ``rank < size``."""
    return ceil_div(stop - rank, size)


def evenly_spaced(num: int, most: int) -> list[int]:
    """Choose at most ``most`` of ``num`` indices, from the first to the last."""
    return sorted(set(np.linspace(0, num - 1, min(num, most)).round().astype(int).tolist()))


def even_range(index: int, num_parts: int, num: int) -> range:
    """Return part ``index`` of ``range(num)``, whose parts differ by at most one in size."""
    return range(num * index // num_parts, num * (index + 1) // num_parts)
