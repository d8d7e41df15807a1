"""Shuffled within windows: rows that come together also lie together."""

from dataclasses import dataclass
from functools import lru_cache

from typing_extensions import override

from lightning_memmap.sampling.sampler import WindowedSampler, check_seed
from lightning_memmap.sampling.shards import Integers
from lightning_memmap.sampling.window_permutation import WindowPermutation


@dataclass(frozen=True)
class BlockShuffledSampler(WindowedSampler):
    """Shuffles windows of rows that lie together, and the rows within each window.

    Position ``p`` is in window ``p // C // shuffle_window`` of the epoch, and a window is
    ``shuffle_window`` consecutive rows of each shard, permuted shard by shard. The windows come in
    another order in each epoch, and the first of them starts at another row. The rows of each
    shard that do not fill a window, and the one row by which shards differ, come last.

    Args:
        shards: The rows, and the shards that they are divided into.
        seed: Seed of the permutations, ``0 <= seed < 2**63``.
        shuffle_window: Rows of a shard in a window.

    Raises:
        ValueError: The seed is out of range, or ``shuffle_window`` is below 1.
    """

    seed: int
    shuffle_window: int

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if self.shuffle_window < 1:
            raise ValueError(f"shuffle_window={self.shuffle_window}: at least 1 row of a shard")

    @property
    @override
    def window_rows(self) -> int:
        return self.shuffle_window

    @override
    def window_runs(self, epoch: int, number: int) -> list[range]:
        return _permutation(self, epoch).runs(number)

    @override
    def grid(
        self, epoch: int, first: int, last: int, shards: Integers, starts: Integers
    ) -> Integers:
        return _permutation(self, epoch).grid(first, last, shards, starts)


@lru_cache(maxsize=4)
def _permutation(sampler: BlockShuffledSampler, epoch: int) -> WindowPermutation:
    return WindowPermutation(sampler.shards.sizes, sampler.shuffle_window, sampler.seed, epoch)
