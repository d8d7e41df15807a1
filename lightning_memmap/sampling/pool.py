"""Which rows each shard has: what orders draw from."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_memmap.sampling.rows import (
    Integers,
    Rows,
    Runs,
    Shards,
    StoreRows,
    WindowedRows,
    distinct,
    firsts_of,
    shard_rows,
)

#: Windows that are located at once.
_BLOCK_WINDOWS = 2**18


@dataclass(frozen=True, eq=False)
class Pool:
    """The rows of each shard, shard after shard. A row may be in several shards, or in none.

    Args:
        rows: The rows.
        num_shards: Shards, ``C``.
        is_striped: Whether row ``i`` is in shard ``i % C``, as dataset order needs. Otherwise a
            shard is a piece of the line of rows.
        sizes: Rows of each shard, int64 of shape (C,).
        counts: Positions of each shard in an epoch, int64 of shape (C,): those of shard ``c`` are
            ``c``, ``c + C``, ``c + 2C`` and so on.
        chosen: Where shards have other rows than these by themselves, which rows they have, shard
            after shard, counted as in the pool that has all rows once: a table, or runs.
        global_batch: Rows of a step over all devices, where an order depends on it.
    """

    rows: Rows
    num_shards: int
    is_striped: bool
    sizes: Integers = field(repr=False)
    counts: Integers = field(repr=False)
    chosen: NDArray[Any] | Runs | None = field(default=None, repr=False)
    global_batch: int | None = field(default=None, repr=False)

    @classmethod
    def of(cls, rows: Rows, num_shards: int, is_striped: bool | None = None) -> "Pool":
        """All rows, each once.

        Args:
            rows: The rows.
            num_shards: Shards to divide them into.
            is_striped: As for this class; by default shards are pieces of the files where rows
                that lie together belong together.
        """
        sizes = shard_rows(rows.num_rows, num_shards)
        lined = rows.is_lined if is_striped is None else not is_striped
        return cls(rows, num_shards, not lined, sizes, sizes)

    def drawing(self, sizes: Integers, counts: Integers, chosen: NDArray[Any] | Runs) -> "Pool":
        """Shards of other rows of this pool, which has all rows once.

        Args:
            sizes: As for this class.
            counts: As there.
            chosen: Which rows, counted as in this pool.
        """
        if isinstance(chosen, np.ndarray):
            chosen = chosen.astype(np.min_scalar_type(self.num_rows))
        return replace(self, sizes=sizes, counts=counts, chosen=chosen)

    @property
    def identity(self) -> dict[str, Any]:
        """What tells its rows from others, as JSON values."""
        return {**self.rows.identity, "num_shards": self.num_shards}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pool):
            return NotImplemented
        same = (self.is_striped, type(self.chosen)) == (other.is_striped, type(other.chosen))
        if not same or self.identity != other.identity:
            return False
        pairs = [(self.sizes, other.sizes), (self.counts, other.counts)]
        if self.chosen is not None:
            pairs.append((np.asarray(self.chosen), np.asarray(other.chosen)))
        return all(np.array_equal(one, two) for one, two in pairs)

    def __hash__(self) -> int:
        return hash((self.num_shards, self.rows.num_rows))

    def with_positions(self, num_positions: int) -> "Pool":
        """The same rows for an epoch of another number of positions."""
        return replace(self, counts=shard_rows(num_positions, self.num_shards))

    @cached_property
    def starts(self) -> Integers:
        """The index of each shard's first row, int64 of shape (C,)."""
        return firsts_of(self.sizes)

    @cached_property
    def num_rows(self) -> int:
        """Rows of all shards together."""
        return int(self.sizes.sum())

    @cached_property
    def num_positions(self) -> int:
        """Positions of an epoch."""
        return int(self.counts.sum())

    @cached_property
    def longest(self) -> int:
        """Rows of the longest shard."""
        return int(self.sizes.max())

    @cached_property
    def _striping(self) -> Shards:
        return Shards(self.rows.num_rows, self.num_shards)

    @cached_property
    def _are_files(self) -> bool:
        """Whether the pool that has all rows once is the files: index 0 lies at place 0."""
        if self.is_striped:
            return self.rows == StoreRows(self._striping)
        return self.rows.is_in_files

    @cached_property
    def begins(self) -> Integers | None:
        """Where the rows of each shard begin in the files, int64 of shape (C,).

        None where the rows of a shard do not lie there one after the other.
        """
        if not self._are_files or isinstance(self.chosen, np.ndarray):
            return None
        if self.chosen is None:
            return self.starts
        # Each shard is one run: none begins inside of it.
        ends = self.starts + self.sizes
        inside = np.searchsorted(self.chosen.begins, [self.starts + 1, ends])
        if ((inside[1] > inside[0]) & (self.sizes > 0)).any():
            return None
        return self.chosen.at(np.minimum(self.starts, max(0, self.num_rows - 1)))

    def index(self, shard: int | None = None) -> Integers:
        """The rows of one shard, or of all, as they are counted here: shard after shard."""
        if shard is None:
            return np.arange(self.num_rows, dtype=np.int64)
        return np.arange(self.starts[shard], self.starts[shard] + self.sizes[shard])

    def numbers(self, index: Integers) -> Integers:
        """The numbers of rows, int64 of shape (B,) like the index."""
        whole = self.whole(index)
        return self._striping.rows_at(whole) if self.is_striped else self.rows.on_line(whole)

    def places(self, index: Integers) -> Integers:
        """Where rows lie in the files."""
        return self.whole(index) if self._are_files else self.rows.places(self.numbers(index))

    def dataset_rows(self, index: Integers) -> Integers:
        """The numbers of rows in the whole dataset."""
        return self.rows.dataset_rows(self.numbers(index))

    def rows_of(self, shard: int) -> Integers:
        """The dataset rows of one shard, in its order."""
        return self.dataset_rows(self.index(shard))

    def whole(self, index: Integers) -> Integers:
        """The index in the pool of all rows."""
        if isinstance(self.chosen, Runs):
            return self.chosen.at(index)
        return index if self.chosen is None else self.chosen[index].astype(np.int64)

    def whole_of(self, other: "Pool", shard: int) -> Integers:
        """The same of a shard of another pool, as they are counted in this one."""
        index = other.index(shard)
        is_alike = self.is_striped == other.is_striped
        return other.whole(index) if is_alike else self.rows.ranks[other.numbers(index)]


def united(pools: Sequence[Pool]) -> Pool:
    """A pool whose shards have what those of several pools have, once, as it lies in the files."""
    first, is_striped = pools[0], all(pool.is_striped for pool in pools)
    whole = Pool.of(first.rows, first.num_shards, is_striped)
    whole = replace(whole, global_batch=first.global_batch)
    each = [
        distinct(np.concatenate([whole.whole_of(pool, shard) for pool in pools]))
        for shard in range(first.num_shards)
    ]
    sizes = np.array([len(found) for found in each], np.int64)
    firsts = np.array([found[0] if len(found) else 0 for found in each], np.int64)
    lasts = np.array([found[-1] if len(found) else -1 for found in each], np.int64)
    if (lasts - firsts + 1 == sizes).all():
        starts, kept = firsts_of(sizes), sizes > 0
        return whole.drawing(sizes, first.counts, Runs(starts[kept], (firsts - starts)[kept]))
    return whole.drawing(sizes, first.counts, np.concatenate(each))


def spans_of(pool: Pool, chosen: Sequence[int]) -> tuple[Integers, Integers]:
    """The windows of each series that some shards have, and those between them.

    The first one, and how many there are to the last one, or 0: both int64 of shape (series,).
    """
    line = pool.rows
    assert isinstance(line, WindowedRows)
    firsts, lasts = line.counts.copy(), np.full(len(line.counts), -1, np.int64)
    for shard in chosen:
        for series, places, counts in _stretches(pool, line, shard):
            windows = places - line.begins[series]
            np.minimum.at(firsts, series, windows)
            np.maximum.at(lasts, series, windows + counts - 1)
    return firsts, np.maximum(0, lasts + 1 - firsts)


def _stretches(
    pool: Pool, line: WindowedRows, shard: int
) -> Iterator[tuple[Integers, Integers, Integers | int]]:
    """The windows of a shard: their series, their places, and how many follow one another."""
    if (begins := pool.begins) is not None:
        edges = begins[shard], begins[shard] + pool.sizes[shard]
        series, places, counts = line.stretches(pool.num_shards, [edges], None)
        yield series, places, counts
        return
    index = pool.index(shard)
    for first in range(0, len(index), _BLOCK_WINDOWS):
        places = pool.places(index[first : first + _BLOCK_WINDOWS])
        yield line.in_series(places)[0], places, 1
