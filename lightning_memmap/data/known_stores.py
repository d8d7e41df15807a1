"""The stores that a data module has built or recognized, so that it need not check them again."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StoreOrigin:
    """The dataset and options that a store was built from, and the build that it holds."""

    dataset: Any
    num_shards: int | None
    fingerprint: str | None
    generation: str

    def is_same(self, other: "StoreOrigin") -> bool:
        """Return whether both are the same build of the same dataset object."""
        return (
            self.dataset is other.dataset
            and self.num_shards == other.num_shards
            and self.fingerprint == other.fingerprint
            and self.generation == other.generation
        )


class KnownStores:
    """The stores that one data module has built or recognized, by split."""

    def __init__(self) -> None:
        self._origins = dict[str, StoreOrigin]()

    def add(self, split: str, origin: StoreOrigin) -> None:
        """Remember the store of a split."""
        self._origins[split] = origin

    def has(self, split: str, origin: StoreOrigin) -> bool:
        """Return whether the store of a split is the one that was last added."""
        last_origin = self._origins.get(split)
        return last_origin is not None and last_origin.is_same(origin)

    def copy(self) -> "KnownStores":
        """Return an independent copy, for another data module over the same datasets."""
        copied = KnownStores()
        copied._origins.update(self._origins)
        return copied
