"""Where the rows of a split lie in a store, whose shards may differ from those of the split."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_memmap.sampling import Integers, Pool, Sampler
from lightning_memmap.store import Store

#: Up to so many rows, a table has their places, in 4 bytes each where these are below 2**32.
TABLE_ROWS = 2**24


@dataclass(frozen=True)
class StoreOffsets:
    """Where the rows of a split lie in the files of its store.

    Args:
        pool: The rows of each shard of the split.
        num_stored: Rows of the files.
        in_memory: Where rows of the files lie in memory, if not where they lie in the files; see
            `Store.in_memory`.
    """

    pool: Pool
    num_stored: int
    in_memory: Callable[[Integers], Integers] | None = None

    @classmethod
    def into(cls, store: Store, pool: Pool) -> "StoreOffsets":
        """Where the rows of a split lie in the memory of a store."""
        return cls(pool, store.num_rows, store.in_memory if store.has_gaps else None)

    @cached_property
    def starts(self) -> Integers | None:
        """Where each shard of the split starts in the files, int64 of shape (C,).

        None where the rows of a shard do not lie there one after the other.
        """
        return self.pool.begins if self.in_memory is None else None

    @cached_property
    def _table(self) -> NDArray[np.unsignedinteger[Any]]:
        """Where each row lies, shard after shard, of shape (rows of all shards,)."""
        sizes = self.pool.sizes.tolist()
        located = [self.of(np.full(n, c), np.arange(n)) for c, n in enumerate(sizes)]
        dtype = np.min_scalar_type(max(int(each.max(initial=0)) for each in located))
        return np.concatenate(located, dtype=dtype, casting="unsafe")

    def of(self, shards: Integers, offsets: Integers) -> Integers:
        """Where rows lie in the files."""
        return self._moved(self.pool.places(shards, offsets))

    @property
    def num_places(self) -> int:
        """One more than the last row of the files."""
        return int(self._moved(np.array([self.num_stored - 1]))[0]) + 1

    def _moved(self, locations: Integers) -> Integers:
        return locations if self.in_memory is None else self.in_memory(locations)

    def locate(self, sampler: Sampler, epoch: int, positions: range) -> Integers:
        """Where the rows lie in the files that supply positions."""
        if self.starts is not None:
            return sampler.row_offsets(epoch, positions, self.starts)
        if self.pool.num_rows > TABLE_ROWS:
            return self.of(*sampler.at(epoch, positions))
        rows = sampler.row_offsets(epoch, positions, self.pool.starts)
        # No row is outside: "wrap" is the fastest mode.
        return self._table.take(rows, mode="wrap").astype(np.int64)
