"""How rows are divided into shards: row ``i`` is at offset ``i // C`` of shard ``i % C``."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

#: Shards by default, of fewer rows than `_MANY_ROWS` and of more.
_SHARDS = 24, 192
_MANY_ROWS = 20_000


def default_shards(num_rows: int) -> int:
    """The shards that a store of so many rows has unless its user says otherwise."""
    return _SHARDS[num_rows >= _MANY_ROWS]


def divisors(number: int) -> list[int]:
    """The numbers that divide a number, ascending."""
    return [count for count in range(1, number + 1) if not number % count]


def shard_rows(num_rows: int, num_shards: int) -> Integers:
    """Count the rows of each shard: row ``i`` is in shard ``i % num_shards``."""
    shards = np.arange(num_shards, dtype=np.int64)
    return (num_rows - shards + num_shards - 1) // num_shards


def firsts_of(sizes: Integers) -> Integers:
    """Where each of several parts begins that lie one after the other."""
    firsts: Integers = np.cumsum(sizes, dtype=np.int64) - sizes
    return firsts


def striping(num_shards: int, num_data_devices: int) -> int:
    """The number of shards that data devices divide: ``num_shards``, or the next one above it."""
    return -(-num_shards // num_data_devices) * num_data_devices


@dataclass(frozen=True)
class Shards:
    """The shards that rows are divided into: row ``i`` is in shard ``i % C``."""

    num_rows: int
    num_shards: int

    def __post_init__(self) -> None:
        for name in ("num_rows", "num_shards"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1 is needed")

    @cached_property
    def sizes(self) -> Integers:
        """Rows of each shard, int64 of shape (C,)."""
        return shard_rows(self.num_rows, self.num_shards)

    @cached_property
    def starts(self) -> Integers:
        """The place of each shard's first row, int64 of shape (C,)."""
        return firsts_of(self.sizes)

    def rows_of(self, shard: int) -> range:
        """The rows of one shard, in its order."""
        return range(shard, self.num_rows, self.num_shards)

    def locate(self, rows: Integers) -> Integers:
        """The places of rows, int64 of the same shape."""
        offsets = rows // self.num_shards
        # numpy takes several times as long for a remainder as for a quotient.
        located: Integers = self.starts[rows - offsets * self.num_shards]
        return located + offsets

    def rows_at(self, places: Integers) -> Integers:
        """The rows at places: the inverse of `locate`."""
        shards = np.searchsorted(self.starts, places, side="right") - 1
        return (places - self.starts[shards]) * self.num_shards + shards
