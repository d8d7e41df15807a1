"""The rows of one field: the only form between what reads a dataset and what writes a store."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_memmap.sampling import Integers
from lightning_memmap.schema.fields import Field

#: Torch has no index for these, and their bits do as well.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class Values(NamedTuple):
    """Rows of one field, in the dtype in which it is kept."""

    data: Tensor
    """Of shape (n, *field shape); of a field whose rows differ in length, the items of all rows one
    after the other, (items, *item shape)."""
    sizes: Integers | None = None
    """Of such a field, the sizes of each row in the dimensions that differ, int64 of shape (n,
    number of these)."""
    given: NDArray[np.bool_] | None = None
    """Which rows are not None, whose place zeros or nothing take; None for all."""

    @property
    def num_rows(self) -> int:
        """How many rows these are."""
        return len(self.data if self.sizes is None else self.sizes)

    @classmethod
    def none(cls, field: Field) -> "Values":
        """No rows of a field."""
        count = field.num_variable
        data = torch.empty((0, *field.item_shape), dtype=field.dtype, device="cpu")
        return cls(data, np.empty((0, count), np.int64) if count else None)

    @classmethod
    def of_rows(cls, field: Field, rows: Sequence[Tensor]) -> "Values":
        """Rows of a field, at least one, of its dtype, of shapes that it admits, on one device."""
        if not (count := field.num_variable):
            return cls(torch.stack(tuple(rows)))
        sizes = np.array([row.shape[:count] for row in rows], np.int64)
        return cls(torch.cat([row.reshape(-1, *field.item_shape) for row in rows]), sizes)

    def rows(self) -> Iterator[Tensor]:
        """Each row in its shape, of the same memory."""
        if self.sizes is None:
            yield from self.data
            return
        pieces = self.data.split_with_sizes(self.sizes.prod(axis=1).tolist())
        for piece, shape in zip(pieces, self.sizes.tolist(), strict=True):
            yield piece.view(*shape, *self.data.shape[1:])

    def take(self, rows: Integers) -> "Values":
        """Some of these rows in any order, int64 of shape (n,)."""
        if self.sizes is None:
            return Values(take_rows(self.data, rows))
        lengths = self.sizes.prod(axis=1)
        starts, taken = np.cumsum(lengths) - lengths, lengths[rows]
        shifts = starts[rows] - (np.cumsum(taken) - taken)
        items = np.repeat(shifts, taken) + np.arange(taken.sum())
        return Values(take_rows(self.data, items), self.sizes[rows])

    def spread(self, given: NDArray[np.bool_]) -> "Values":
        """These as the given ones among more rows: zeros, or nothing, take the place of others."""
        is_given = given.copy()
        if self.given is not None:
            is_given[given] = self.given
        if self.sizes is not None:
            sizes = np.zeros((len(given), self.sizes.shape[1]), np.int64)
            sizes[given] = self.sizes
            return Values(self.data, sizes, is_given)
        return Values(_among_zeros(self.data, given), None, is_given)

    def in_lists(self, lengths: Integers) -> "Values":
        """These as the records of lists, of which each row has some: int64 of shape (n,)."""
        if self.sizes is None:
            return Values(self.data, lengths[:, None])
        given = np.ones(len(self.sizes), np.bool_) if self.given is None else self.given
        rows = np.repeat(np.arange(len(lengths)), lengths)
        sizes = np.zeros((len(lengths), self.sizes.shape[1]), np.int64)
        sizes[rows[given]] = self.sizes[given]
        wrong = np.flatnonzero(given & (sizes[rows] != self.sizes).any(axis=1))
        if len(wrong):
            mine = self.sizes[(rows == rows[wrong[0]]) & given]
            shapes = sorted({(*shape, *self.data.shape[1:]) for shape in map(tuple, mine.tolist())})
            raise ValueError(f"found records of the shapes {shapes} in one list")
        data = self.data
        if not given.all():
            data = _among_zeros(data, np.repeat(given, sizes[rows].prod(axis=1)))
        return Values(data, np.concatenate([lengths[:, None], sizes], axis=1))


def join_values(parts: Sequence[Values]) -> Values:
    """Join rows of one field, at least one part."""
    if len(parts) == 1:
        return parts[0]
    sizes = [part.sizes for part in parts if part.sizes is not None]
    data = torch.cat([part.data for part in parts])
    return Values(data, np.concatenate(sizes) if sizes else None)


def take_rows(data: Tensor, rows: Integers) -> Tensor:
    """Copy rows of a tensor of any dtype, in any order, int64 of shape (n,)."""
    signed, numbers = _SIGNED.get(data.dtype, data.dtype), torch.from_numpy(rows)
    return data.detach().view(signed).index_select(0, numbers.to(data.device)).view(data.dtype)


def _among_zeros(data: Tensor, places: NDArray[np.bool_]) -> Tensor:
    """Rows at some places, and zeros at the others."""
    found = torch.zeros((len(places), *data.shape[1:]), dtype=data.dtype, device="cpu")
    signed = _SIGNED.get(data.dtype, data.dtype)
    found.view(signed)[torch.from_numpy(places)] = data.view(signed)
    return found
