"""Where the rows of a split lie in a store, whose shards may differ from those of the split."""

from dataclasses import dataclass
from functools import cached_property

from lightning_memmap.sampling import Integers, Sampler, Shards


@dataclass(frozen=True)
class StoreOffsets:
    """Where the rows of a split lie in the files of its store.

    Args:
        stored: The rows of the store and its shards.
        shards: The rows of the split, and the shards that they are divided into.
    """

    stored: Shards
    shards: Shards

    @cached_property
    def starts(self) -> Integers | None:
        """Where each shard of the split starts in the files, int64 of shape (C,).

        None where the rows of a shard do not lie there one after the other.
        """
        return self.shards.starts_in(self.stored)

    def of(self, shards: Integers, offsets: Integers) -> Integers:
        """Where rows lie in the files.

        Args:
            shards: Shards of the split, int64 of shape (B,).
            offsets: Offsets within them, int64 of shape (B,).

        Returns:
            Rows of the files, int64 of shape (B,).
        """
        return self.shards.locations_in(self.stored, shards, offsets)

    def locate(self, sampler: Sampler, epoch: int, positions: range) -> Integers:
        """Where the rows lie in the files that supply positions.

        Args:
            sampler: The order of the rows of the split.
            epoch: Epoch, counted from 0.
            positions: As for `lightning_memmap.sampling.Sampler.at`.

        Returns:
            Rows of the files, int64 of shape (len(positions),).
        """
        if self.starts is None:
            return self.of(*sampler.at(epoch, positions))
        return sampler.row_offsets(epoch, positions, self.starts)
