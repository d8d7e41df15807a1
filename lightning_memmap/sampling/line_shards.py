"""Shards that are pieces of a line, for rows whose order in a file is not that of a dataset."""

from abc import abstractmethod
from dataclasses import dataclass, replace

import numpy as np
from typing_extensions import override

from lightning_memmap.sampling.shards import Integers, Shards


@dataclass(frozen=True, kw_only=True)
class LineShards(Shards):
    """Rows on a line, in the order of a file, of which each shard is a piece.

    In dataset order this cannot be, since neighbours there belong to different shards.

    Args:
        num_rows: Rows.
        num_shards: Shards, ``C``.
        subset: Which rows of the dataset these are, or are parts of; all of them where it is None.
        is_ordered: Whether row ``i`` is in shard ``i % C`` instead, as in dataset order.
    """

    is_ordered: bool = False

    @property
    @override
    def base(self) -> Shards:
        return replace(self, is_ordered=False) if self.is_ordered else self

    @property
    @override
    def ordered(self) -> Shards:
        return self if self.is_ordered else replace(self, is_ordered=True)

    @abstractmethod
    @override
    def dataset_rows_at(self, locations: Integers) -> Integers: ...

    @abstractmethod
    @override
    def locate(self, rows: range | Integers) -> Integers: ...

    @override
    def dataset_rows(self, shards: Integers, offsets: Integers) -> Integers:
        if self.is_ordered:
            return offsets * self.num_shards + shards
        return self.dataset_rows_at(self.starts[shards] + offsets)

    @override
    def rows_of(self, shard: int) -> Integers:
        offsets = np.arange(self.sizes[shard], dtype=np.int64)
        return self.dataset_rows(np.full_like(offsets, shard), offsets)

    @override
    def locations_in(self, stored: Shards, shards: Integers, offsets: Integers) -> Integers:
        if self == stored:
            return self.starts[shards] + offsets
        return super().locations_in(stored, shards, offsets)


def as_rows(rows: range | Integers) -> Integers:
    """Rows as an array.

    Args:
        rows: A range, or int64 of any shape.
    """
    return np.arange(rows.start, rows.stop, rows.step) if isinstance(rows, range) else rows
