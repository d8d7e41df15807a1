"""Where the rows of a split lie in a store, whose shards may be others than those of the split."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_memmap.sampling import Integers, Shards, shard_starts


@dataclass(frozen=True)
class StoreOffsets:
    """Where the rows of a split lie in the files of its store.

    Args:
        num_rows: Rows of the store.
        num_shards: Shards of the store.
        shards: The rows of the split, and the shards that they are divided into.
    """

    num_rows: int
    num_shards: int
    shards: Shards

    @property
    def is_as_stored(self) -> bool:
        """Whether the shards of the split are those of the store."""
        return self.shards.subset is None and self.shards.num_shards == self.num_shards

    @cached_property
    def starts(self) -> Integers:
        """Where each shard of the store starts in its files, in rows, int64 of shape (C,)."""
        return shard_starts(self.num_rows, self.num_shards)

    def of(self, shards: Integers, offsets: Integers) -> Integers:
        """Where rows lie in the files.

        Args:
            shards: Shards of the split, int64 of shape (B,).
            offsets: Offsets within them, int64 of shape (B,).

        Returns:
            Rows of the files, int64 of shape (B,).
        """
        stored, home = np.divmod(self.shards.dataset_rows(shards, offsets), self.num_shards)
        return self.starts[home] + stored
