"""The data order: which rows come when, the same for every strategy and device count.

Integers only: no file, no tensor, no device.

    rows          what is ordered: rows of a store, some of them, of several stores, windows; and
                  how these are divided into shards
    pool          which rows each shard has
    sampler       an order: draws from the pool, permutes, arranges; dataset order, and shuffled;
                  and what makes one
    weighted, bucketed, mixture, curriculum
                  the other orders, each with what makes it of a user's options
    permutations  the order within shards, from random bits
    selection     which rows of which store each split has
    schedule      how an epoch is divided into steps, and into what is read from disk at once
    identity      what tells orders from each other, also in words
"""

from lightning_memmap.sampling.bucketed import Bucketed
from lightning_memmap.sampling.curriculum import Curriculum
from lightning_memmap.sampling.mixture import Mixture
from lightning_memmap.sampling.pool import Pool
from lightning_memmap.sampling.sampler import (
    Fields,
    Sampler,
    SamplerFactory,
    SequentialSampler,
    ShuffledSampler,
)
from lightning_memmap.sampling.selection import (
    Holdout,
    KFold,
    Parts,
    RandomSplit,
    Selection,
    Subset,
)
from lightning_memmap.sampling.weighted import Weighted

__all__ = [
    "Bucketed",
    "Curriculum",
    "Fields",
    "Holdout",
    "KFold",
    "Mixture",
    "Parts",
    "Pool",
    "RandomSplit",
    "Sampler",
    "SamplerFactory",
    "Selection",
    "SequentialSampler",
    "ShuffledSampler",
    "Subset",
    "Weighted",
]


def __dir__() -> list[str]:
    return __all__
