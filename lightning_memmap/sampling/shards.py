"""How rows are dealt to shards: row ``i`` is the row at offset ``i // C`` of shard ``i % C``."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

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
    """The number of shards to stream over so that the data devices divide it.

    Returns:
        ``num_shards`` where ``num_data_devices`` divides it, else the next multiple of
        ``num_data_devices``: rows are then dealt anew, and the order differs from that of the
        store's own shards.
    """
    return -(-num_shards // num_data_devices) * num_data_devices


@dataclass(frozen=True)
class Shards:
    """The rows of a dataset, dealt to shards, and where they lie in files that hold shard 0's rows,
    then shard 1's, and so on.

    Args:
        num_rows: Rows of the dataset.
        num_shards: Shards that they are dealt to, at least 1.
    """

    num_rows: int
    num_shards: int

    @cached_property
    def sizes(self) -> Integers:
        """Rows in each shard, int64 of shape (num_shards,)."""
        return shard_rows(self.num_rows, self.num_shards)

    @cached_property
    def starts(self) -> Integers:
        """The location of each shard's first row, int64 of shape (num_shards,)."""
        return shard_starts(self.num_rows, self.num_shards)

    def locate(self, rows: Integers) -> Integers:
        """Where rows lie, counted in rows from the start of the file.

        Args:
            rows: Rows in dataset order, int64 of any shape.

        Returns:
            Their locations, int64 of the same shape.
        """
        return self.starts[rows % self.num_shards] + rows // self.num_shards

    def rows_at(self, locations: Integers) -> Integers:
        """The rows that lie at locations: the inverse of `locate`."""
        shards = np.searchsorted(self.starts, locations, side="right") - 1
        return (locations - self.starts[shards]) * self.num_shards + shards
