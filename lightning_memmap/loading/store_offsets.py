"""Where the rows of a split lie in a store, whose shards may differ from those of the split."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_memmap.sampling import Integers, Sampler, Shards
from lightning_memmap.store import Store

#: Up to so many rows, a table has their places, in 4 bytes each where these are below 2**32.
TABLE_ROWS = 2**24


@dataclass(frozen=True)
class StoreOffsets:
    """Where the rows of a split lie in the files of its store.

    Args:
        stored: The rows of the store and its shards.
        shards: The rows of the split, and the shards that they are divided into.
        in_memory: Where rows of the files lie in memory, if not where they lie in the files; see
            `Store.in_memory`.
    """

    stored: Shards
    shards: Shards
    in_memory: Callable[[Integers], Integers] | None = None

    @classmethod
    def into(cls, store: Store, shards: Shards) -> "StoreOffsets":
        """Where the rows of a split lie in the memory of a store.

        Args:
            store: The store.
            shards: The rows of the split, and the shards that they are divided into.
        """
        return cls(store.manifest.shards, shards, store.in_memory if store.has_gaps else None)

    @cached_property
    def starts(self) -> Integers | None:
        """Where each shard of the split starts in the files, int64 of shape (C,).

        None where the rows of a shard do not lie there one after the other.
        """
        return self.shards.starts_in(self.stored) if self.in_memory is None else None

    @cached_property
    def _table(self) -> NDArray[np.unsignedinteger[Any]]:
        """Where each row lies, shard after shard, of shape (rows of all shards,)."""
        sizes = self.shards.sizes.tolist()
        located = [self.of(np.full(n, c), np.arange(n)) for c, n in enumerate(sizes)]
        dtype = np.min_scalar_type(max(int(each.max(initial=0)) for each in located))
        return np.concatenate(located, dtype=dtype, casting="unsafe")

    def of(self, shards: Integers, offsets: Integers) -> Integers:
        """Where rows lie in the files.

        Args:
            shards: Shards of the split, int64 of shape (B,).
            offsets: Offsets within them, int64 of shape (B,).

        Returns:
            Rows of the files, int64 of shape (B,).
        """
        return self._moved(self.shards.locations_in(self.stored, shards, offsets))

    @property
    def num_places(self) -> int:
        """One more than the last row of the files."""
        return int(self._moved(np.array([self.stored.num_rows - 1]))[0]) + 1

    def _moved(self, locations: Integers) -> Integers:
        return locations if self.in_memory is None else self.in_memory(locations)

    def locate(self, sampler: Sampler, epoch: int, positions: range) -> Integers:
        """Where the rows lie in the files that supply positions.

        Args:
            sampler: The order of the rows of the split.
            epoch: Epoch, counted from 0.
            positions: As for `lightning_memmap.sampling.Sampler.at`.

        Returns:
            Rows of the files, int64 of shape (len(positions),).
        """
        if self.starts is not None:
            return sampler.row_offsets(epoch, positions, self.starts)
        if self.shards.num_rows > TABLE_ROWS:
            return self.of(*sampler.at(epoch, positions))
        rows = sampler.row_offsets(epoch, positions, self.shards.starts)
        # No row is outside: "wrap" is the fastest mode.
        return self._table.take(rows, mode="wrap").astype(np.int64)
