"""A new permutation of every shard in each epoch."""

from dataclasses import dataclass
from functools import lru_cache

from typing_extensions import override

from lightning_memmap.sampling.permutations import Permutation, permuted, random_bits
from lightning_memmap.sampling.sampler import Sampler, check_seed
from lightning_memmap.sampling.shards import Integers


@dataclass(frozen=True)
class ShuffledSampler(Sampler):
    """Permutes the rows of each shard, anew in each epoch.

    Args:
        shards: The rows, and the shards that they are divided into.
        seed: Seed of the permutations, ``0 <= seed < 2**63``.

    Raises:
        ValueError: The seed is out of range.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)

    @override
    def grid(
        self, epoch: int, first: int, last: int, shards: Integers, starts: Integers
    ) -> Integers:
        return _permutation(self, epoch).grid(first, last, shards, starts)


@lru_cache(maxsize=4)
def _permutation(sampler: ShuffledSampler, epoch: int) -> Permutation:
    return permuted(sampler.shards.sizes, random_bits(sampler.seed, epoch))
