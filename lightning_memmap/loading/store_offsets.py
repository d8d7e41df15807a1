"""Where the rows of a split lie in a store, whose shards may differ from those of the split."""

from dataclasses import dataclass

from lightning_memmap.sampling import Integers, Shards


@dataclass(frozen=True)
class StoreOffsets:
    """Where the rows of a split lie in the files of its store.

    Args:
        stored: The rows of the store and its shards.
        shards: The rows of the split, and the shards that they are divided into.
    """

    stored: Shards
    shards: Shards

    @property
    def is_as_stored(self) -> bool:
        """Whether the shards of the split are those of the store."""
        return self.shards == self.stored

    def of(self, shards: Integers, offsets: Integers) -> Integers:
        """Where rows lie in the files.

        Args:
            shards: Shards of the split, int64 of shape (B,).
            offsets: Offsets within them, int64 of shape (B,).

        Returns:
            Rows of the files, int64 of shape (B,).
        """
        return self.stored.locate(self.shards.dataset_rows(shards, offsets))
