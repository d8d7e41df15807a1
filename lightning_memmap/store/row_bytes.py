"""Bytes that rows take, and windows over them."""

from collections.abc import Sequence

import numpy as np

from lightning_memmap.sampling import Integers, Pool, WindowedRows, spans_of
from lightning_memmap.store.columns import Column


def rows_bytes(columns: Sequence[Column], rows: range | Integers) -> int:
    """Return the bytes of rows over all columns of a store."""
    return sum(column.num_bytes(rows) for column in columns)


def window_bytes(columns: Sequence[Column], pool: Pool, num_data_devices: int) -> Integers:
    """Bytes that each shard takes of series that are cut into windows."""
    line = pool.rows
    assert isinstance(line, WindowedRows)
    step_bytes = series_bytes = 0
    for column in columns:
        if column.field.name in line.fields:
            step_bytes += column.field.step_bytes
        else:
            num_rows = column.shards.num_rows
            series_bytes += -(-rows_bytes([column], range(num_rows)) // num_rows)

    def held_bytes(chosen: Sequence[int]) -> int:
        counts = spans_of(pool, chosen).counts
        counts = counts[counts > 0]
        num_steps = int((counts - 1).sum()) * line.stride + len(counts) * line.length
        return num_steps * step_bytes + len(counts) * series_bytes

    count = pool.num_shards
    if pool.is_striped:
        # In dataset order all shards have windows of all series, and those of a device share them.
        total = held_bytes(range(count)) * num_data_devices
        return np.full(count, -(-total // count), np.int64)
    return np.array([held_bytes([shard]) for shard in range(count)], np.int64)
