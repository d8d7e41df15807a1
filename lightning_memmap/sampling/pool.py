"""The rows of each shard, which orders draw from.

Rows of a pool are counted shard after shard: index ``starts[c] + j`` is row ``j`` of shard ``c``.
There are three kinds of pool, here for the rows 0 to 6 in 3 shards::

    striped      shards 0 3 6 | 1 4 | 2 5    row i belongs to shard i % 3, as a store's files do
    contiguous   shards 0 1 2 | 3 4 | 5 6    ranges of storage order: neighbours share a shard, as
                                             windows over a series should
    chosen       shards 3 6 | 6 4 | 2 5      other rows, here one in two shards: a table, or runs,
                                             of indices in one of the two pools above, its base
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_memmap.integers import Integers, Runs, distinct, starts_of
from lightning_memmap.sampling.rows import Rows, Shards, StoreRows, WindowedRows, shard_rows

#: Windows whose series are looked up at once.
_WINDOWS_AT_ONCE = 2**18


@dataclass(frozen=True, eq=False)
class Pool:
    """The rows of each shard, shard after shard. A row may be in several shards, or in none.

    Args:
        rows: The rows.
        num_shards: Shards, ``C``.
        is_striped: Whether row ``i`` belongs to shard ``i % C``, which dataset order needs.
            Otherwise a shard is a contiguous range of storage order.
        sizes: Rows of each shard, int64 of shape (C,).
        chosen: Indices of the rows of each shard, shard after shard, in the pool that holds all
            rows once: a table, or runs. None for that pool itself.
        global_batch: Rows of a step over all devices, if the order depends on it.
    """

    rows: Rows
    num_shards: int
    is_striped: bool
    sizes: Integers = field(repr=False)
    chosen: NDArray[Any] | Runs | None = field(default=None, repr=False)
    global_batch: int | None = field(default=None, repr=False)

    @classmethod
    def of(cls, rows: Rows, num_shards: int, is_striped: bool | None = None) -> "Pool":
        """Make a pool that holds each row once.

        Args:
            rows: The rows.
            num_shards: Shards to divide them into.
            is_striped: As for this class; by default as the rows prefer.
        """
        is_striped = not rows.is_contiguous if is_striped is None else is_striped
        return cls(rows, num_shards, is_striped, shard_rows(rows.num_rows, num_shards))

    def choose(self, sizes: Integers, chosen: NDArray[Any] | Runs) -> "Pool":
        """Make a pool whose shards hold other rows of this pool, which must hold all rows once.

        Args:
            sizes: As for this class.
            chosen: As for this class.
        """
        if isinstance(chosen, np.ndarray):
            chosen = chosen.astype(np.min_scalar_type(self.num_rows))
        return replace(self, sizes=sizes, chosen=chosen)

    @property
    def identity(self) -> dict[str, Any]:
        """The values that identify its rows and shards, as JSON values."""
        return {**self.rows.identity, "num_shards": self.num_shards}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pool):
            return NotImplemented
        is_alike = (self.is_striped, type(self.chosen)) == (other.is_striped, type(other.chosen))
        if not is_alike or self.identity != other.identity:
            return False
        if self.chosen is not None and not np.array_equal(
            np.asarray(self.chosen), np.asarray(other.chosen)
        ):
            return False
        return np.array_equal(self.sizes, other.sizes)

    def __hash__(self) -> int:
        return hash((self.num_shards, self.rows.num_rows))

    @cached_property
    def starts(self) -> Integers:
        """The index of each shard's first row, int64 of shape (C,)."""
        return starts_of(self.sizes)

    @cached_property
    def num_rows(self) -> int:
        """Rows of all shards together."""
        return int(self.sizes.sum())

    @cached_property
    def longest(self) -> int:
        """Rows of the longest shard."""
        return int(self.sizes.max())

    @cached_property
    def _striping(self) -> Shards:
        return Shards(self.rows.num_rows, self.num_shards)

    @cached_property
    def _is_file_order(self) -> bool:
        """Whether the index of a row in the pool of all rows is what `file_rows` returns."""
        if self.is_striped:
            return self.rows == StoreRows(self._striping)
        return self.rows.is_file_order

    @cached_property
    def file_starts(self) -> Integers | None:
        """The file row, or storage rank, of each shard's first row, int64 of shape (C,).

        None if the rows of some shard are not consecutive in the files.
        """
        if not self._is_file_order or isinstance(self.chosen, np.ndarray):
            return None
        if self.chosen is None:
            return self.starts
        # Every shard is a single run if no run starts inside of a shard.
        stops = self.starts + self.sizes
        run_starts = np.searchsorted(self.chosen.starts, [self.starts + 1, stops])
        if ((run_starts[1] > run_starts[0]) & (self.sizes > 0)).any():
            return None
        return self.chosen.at(np.minimum(self.starts, max(0, self.num_rows - 1)))

    def indices(self, shard: int | None = None) -> Integers:
        """Return the indices of one shard's rows, or of all rows."""
        if shard is None:
            return np.arange(self.num_rows, dtype=np.int64)
        return np.arange(self.starts[shard], self.starts[shard] + self.sizes[shard])

    def subset_index(self, index: Integers) -> Integers:
        """Return the subset indices of rows, int64 of the shape of ``index``."""
        base = self.base_index(index)
        return self._striping.rows(base) if self.is_striped else self.rows.subset_index_at(base)

    def file_rows(self, index: Integers) -> Integers:
        """Return the file rows, or of windows the storage ranks, from pool indices."""
        if self._is_file_order:
            return self.base_index(index)
        return self.rows.file_rows(self.subset_index(index))

    def dataset_rows(self, index: Integers) -> Integers:
        """Return the rows of the dataset."""
        return self.rows.dataset_rows(self.subset_index(index))

    def shard_dataset_rows(self, shard: int) -> Integers:
        """Return the dataset rows of one shard, in the order of the pool."""
        return self.dataset_rows(self.indices(shard))

    def base_index(self, index: Integers) -> Integers:
        """Return the indices of rows in the base, the pool that holds all rows once."""
        if isinstance(self.chosen, Runs):
            return self.chosen.at(index)
        return index if self.chosen is None else self.chosen[index].astype(np.int64)

    def base_index_of(self, other: "Pool", shard: int) -> Integers:
        """Return the indices of another pool's shard in this pool's base.

        If only one of the bases is striped, it must be the other one.
        """
        index = other.indices(shard)
        if self.is_striped == other.is_striped:
            return other.base_index(index)
        return self.rows.storage_ranks[other.subset_index(index)]

    def offsets_of(self, other: "Pool", shard: int) -> Integers:
        """Return the offsets in this pool's shard of the rows of another pool's shard.

        This pool must be a union that contains the other one; see `unite_pools`.
        """
        base_index = self.base_index(self.indices(shard))
        return np.searchsorted(base_index, self.base_index_of(other, shard))


def unite_pools(pools: Sequence[Pool]) -> Pool:
    """Return the union of pools shard by shard, without duplicates, in storage order."""
    first = pools[0]
    is_striped = all(pool.is_striped for pool in pools)
    base = replace(
        Pool.of(first.rows, first.num_shards, is_striped), global_batch=first.global_batch
    )
    united = [
        distinct(np.concatenate([base.base_index_of(pool, shard) for pool in pools]))
        for shard in range(first.num_shards)
    ]
    sizes = np.array([len(index) for index in united], np.int64)
    run_starts = np.array([index[0] if len(index) else 0 for index in united], np.int64)
    run_stops = np.array([index[-1] + 1 if len(index) else 0 for index in united], np.int64)
    if (run_stops - run_starts == sizes).all():
        return base.choose(sizes, Runs.of_ranges(run_starts, sizes))
    return base.choose(sizes, np.concatenate(united))


def held_windows_by_series(pool: Pool, shards: Sequence[int]) -> tuple[Integers, Integers]:
    """Find the windows of each series from the first to the last that some shards hold.

    Returns:
        By series, the first of these windows and their number, which may be 0: int64 of shape
        (series,) each.
    """
    rows = pool.rows
    assert isinstance(rows, WindowedRows)
    firsts = rows.windows_per_series.copy()
    lasts = np.full(len(rows.windows_per_series), -1, np.int64)
    for shard in shards:
        for series, ranks, counts in _window_runs(pool, rows, shard):
            windows = ranks - rows.starts[series]
            np.minimum.at(firsts, series, windows)
            np.maximum.at(lasts, series, windows + counts - 1)
    return firsts, np.maximum(0, lasts + 1 - firsts)


def _window_runs(
    pool: Pool, rows: WindowedRows, shard: int
) -> Iterator[tuple[Integers, Integers, Integers | int]]:
    """Yield the windows of a shard in runs: series, rank of the first window, and length."""
    if (file_starts := pool.file_starts) is not None:
        bounds = file_starts[shard], file_starts[shard] + pool.sizes[shard]
        series, ranks, counts = rows.runs_between(pool.num_shards, [bounds], None)
        yield series, ranks, counts
        return
    index = pool.indices(shard)
    for start in range(0, len(index), _WINDOWS_AT_ONCE):
        ranks = pool.file_rows(index[start : start + _WINDOWS_AT_ONCE])
        yield rows.in_series(ranks)[0], ranks, 1
