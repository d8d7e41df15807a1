"""The data order: which rows come when, the same for every strategy and device count.

Integers only: no file, no tensor, no device.

    shards              how rows are divided into shards
    subset              some rows of a dataset, as a dataset of their own
    selection           which rows of which store each split has
    sampler             what every sampler has: the rows of each position of an epoch
    sequential, shuffled, block_shuffled, weighted, bucketed
                        the samplers, one a file
    factory             what makes a sampler of a user's options:
    mixture, curriculum of several sets; another one from an epoch on
    weighted_shards     shards that are equal in weight
    line_shards         shards that are pieces of a line:
    window_shards       of windows over series
    joined_shards       of the rows of several stores
    identity            what tells orders from each other
    differences         in which way two of them differ, in words
    permutations        the order within shards, from random bits
    window_permutation  the same, window by window
    mixture_windows     several sets, each of which is read on and on
    schedule            how an epoch is divided into steps
    windows             how an epoch is divided into what is read from disk at once
"""

from lightning_memmap.sampling.block_shuffled import BlockShuffledSampler
from lightning_memmap.sampling.bucketed import Bucketed, BucketedSampler
from lightning_memmap.sampling.curriculum import Curriculum
from lightning_memmap.sampling.factory import Fields, SamplerFactory
from lightning_memmap.sampling.joined_shards import JoinedRows, JoinedShards
from lightning_memmap.sampling.line_shards import LineShards
from lightning_memmap.sampling.mixture import Mixture
from lightning_memmap.sampling.sampler import Sampler, WindowedSampler, derive_seed
from lightning_memmap.sampling.schedule import BatchSchedule
from lightning_memmap.sampling.selection import KFold, Parts, RandomSplit, Selection, Subset
from lightning_memmap.sampling.sequential import SequentialSampler
from lightning_memmap.sampling.shards import Integers, Shards, shard_rows, shard_starts, striping
from lightning_memmap.sampling.shuffled import ShuffledSampler
from lightning_memmap.sampling.subset import ChosenRows, RowSubset, StridedRows
from lightning_memmap.sampling.weighted import Weighted, WeightedSampler
from lightning_memmap.sampling.window_shards import WindowShards, spans_of
from lightning_memmap.sampling.windows import ReadWindows, default_window

__all__ = [
    "BatchSchedule",
    "BlockShuffledSampler",
    "Bucketed",
    "BucketedSampler",
    "ChosenRows",
    "Curriculum",
    "Fields",
    "Integers",
    "JoinedRows",
    "JoinedShards",
    "KFold",
    "LineShards",
    "Mixture",
    "Parts",
    "RandomSplit",
    "ReadWindows",
    "RowSubset",
    "Sampler",
    "SamplerFactory",
    "Selection",
    "SequentialSampler",
    "Shards",
    "ShuffledSampler",
    "StridedRows",
    "Subset",
    "Weighted",
    "WeightedSampler",
    "WindowShards",
    "WindowedSampler",
    "default_window",
    "derive_seed",
    "shard_rows",
    "shard_starts",
    "spans_of",
    "striping",
]
