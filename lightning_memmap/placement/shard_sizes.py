"""Compute or estimate the bytes of each shard, before its rows are loaded."""

from collections.abc import Sequence

import numpy as np

from lightning_memmap.integers import Integers, ceil_div
from lightning_memmap.sampling.pool import Pool, held_windows_by_series
from lightning_memmap.sampling.rows import Shards, WindowedRows
from lightning_memmap.store.joined import JoinedManifest
from lightning_memmap.store.manifest import Manifest


def compute_shard_bytes(manifest: Manifest, pool: Pool, num_global_data_devices: int) -> Integers:
    """Return the bytes of each shard of a pool, int64 of shape (C,).

    They are estimated by the mean row if the pool doesn't have the shards of the store.
    """
    if isinstance(pool.rows, WindowedRows):
        return _compute_window_shard_bytes(manifest, pool, pool.rows, num_global_data_devices)
    if isinstance(manifest, JoinedManifest):
        sizes = np.zeros(pool.num_shards, np.int64)
        for shard in range(pool.num_shards):
            sets = manifest.rows.set_index_of(pool.shard_dataset_rows(shard))
            for set_index, num_rows in enumerate(np.bincount(sets).tolist()):
                columns = manifest.parts[set_index].columns
                sizes[shard] += sum(column.mean_bytes(num_rows) for column in columns)
        return sizes
    if _are_stored(pool, manifest.shards):
        return sum((column.shard_bytes for column in manifest.columns), np.zeros(1, np.int64))
    means = [sum(c.mean_bytes(count) for c in manifest.columns) for count in pool.sizes.tolist()]
    return np.array(means, np.int64)


def _are_stored(pool: Pool, shards: Shards) -> bool:
    """Return whether a pool has the shards of the store."""
    return (
        pool.file_starts is not None
        and np.array_equal(pool.file_starts, shards.starts)
        and np.array_equal(pool.sizes, shards.sizes)
    )


def _compute_window_shard_bytes(
    manifest: Manifest, pool: Pool, windows: WindowedRows, num_global_data_devices: int
) -> Integers:
    """Return the bytes of each shard of windows over series, int64 of shape (C,)."""
    step_bytes = 0
    series_bytes = 0
    for column in manifest.columns:
        if column.field.name in windows.fields:
            step_bytes += column.field.step_bytes
        else:
            series_bytes += column.mean_bytes(1)

    def held_bytes(shards: Sequence[int]) -> int:
        _, counts = held_windows_by_series(pool, shards)
        counts = counts[counts > 0]
        num_steps = int((counts - 1).sum()) * windows.stride + len(counts) * windows.length
        return num_steps * step_bytes + len(counts) * series_bytes

    count = pool.num_shards
    if pool.is_striped:
        # In dataset order each shard has windows of all series, and the shards of a device share
        # them.
        total = held_bytes(range(count)) * num_global_data_devices
        return np.full(count, ceil_div(total, count), np.int64)
    return np.array([held_bytes([shard]) for shard in range(count)], np.int64)
