"""How rows are dealt to shards: row ``i`` is the row at offset ``i // C`` of shard ``i % C``."""

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
