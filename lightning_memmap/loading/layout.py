"""Where the rows of a stream lie in a store whose shards may be others than those of the stream."""

from dataclasses import dataclass

import numpy as np

from lightning_memmap.sampling import Integers, RowSubset, shard_starts


@dataclass(frozen=True)
class Layout:
    """Where the rows of a stream lie in the files of a store.

    Args:
        num_rows: Rows of the store.
        num_shards: Shards of the store.
        subset: The rows of the store that the stream is of; all of them where it is None.
    """

    num_rows: int
    num_shards: int
    subset: RowSubset | None

    def is_as_stored(self, num_shards: int) -> bool:
        """Whether so many shards of the stream are those of the store."""
        return self.subset is None and num_shards == self.num_shards

    def places(self, rows: Integers) -> Integers:
        """Positions along the first dimension, int64 of shape (B,) as the rows of the stream."""
        if self.subset is not None:
            rows = self.subset.rows(rows)
        offsets, shards = np.divmod(rows, self.num_shards)
        return shard_starts(self.num_rows, self.num_shards)[shards] + offsets
