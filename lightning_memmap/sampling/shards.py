"""How rows are divided into shards: row ``i`` is at offset ``i // C`` of shard ``i % C``."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_memmap.sampling.subset import RowSubset

Integers = NDArray[np.int64]


def shard_rows(num_rows: int, num_shards: int) -> Integers:
    """Rows in each shard: row ``i`` is in shard ``i % num_shards``.

    Returns:
        int64 array of shape (num_shards,) that sums to ``num_rows``.
    """
    shards = np.arange(num_shards, dtype=np.int64)
    return (num_rows - shards + num_shards - 1) // num_shards


def shard_starts(num_rows: int, num_shards: int) -> Integers:
    """Where each shard starts in a file that holds shard 0's rows, then shard 1's, and so on.

    Returns:
        int64 array of shape (num_shards,), in rows.
    """
    rows = shard_rows(num_rows, num_shards)
    return np.cumsum(rows) - rows


def striping(num_shards: int, num_data_devices: int) -> int:
    """The number of shards to divide rows into so that the data devices divide that number.

    Returns:
        ``num_shards`` where ``num_data_devices`` divides it, else the next multiple of
        ``num_data_devices``: the rows are then re-striped, and their order differs from that of
        the store's own shards.
    """
    return -(-num_shards // num_data_devices) * num_data_devices


@dataclass(frozen=True)
class Shards:
    """The rows of a split, and the shards that they are divided into.

    Args:
        num_rows: Rows of the split, ``N``.
        num_shards: Shards, ``C``.
        subset: Which rows of the dataset the split has; all of them where it is None.

    Raises:
        ValueError: A count is below 1.
    """

    num_rows: int
    num_shards: int
    subset: RowSubset | None = None

    def __post_init__(self) -> None:
        for name in ("num_rows", "num_shards"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1 is needed")

    @cached_property
    def sizes(self) -> Integers:
        """Rows of each shard, int64 of shape (C,)."""
        return shard_rows(self.num_rows, self.num_shards)

    @property
    def longest(self) -> int:
        """Rows of the longest shard."""
        return -(-self.num_rows // self.num_shards)

    def dataset_rows(self, shards: Integers, offsets: Integers) -> Integers:
        """The dataset rows at offsets of shards.

        Args:
            shards: Shards, int64 of shape (B,).
            offsets: Offsets within them, int64 of shape (B,).

        Returns:
            Rows of the dataset, int64 of shape (B,).
        """
        rows = offsets * self.num_shards + shards
        return rows if self.subset is None else self.subset.rows(rows)
