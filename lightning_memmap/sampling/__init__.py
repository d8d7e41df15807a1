"""The data order: which rows come when, the same for every strategy and device count.

Integers only: no file, no tensor, no device.

    shards        how rows are dealt to shards
    subset        folds and parts of a dataset
    permutations  the order within shards, from random bits
    windowed      the same, window by window
    stream        the rows of each position of an epoch
    steps         how an epoch is cut into steps
    windows       how an epoch is cut into what is read from disk at once
"""

from lightning_memmap.sampling.schedule import BatchSchedule
from lightning_memmap.sampling.shards import Integers, Shards, shard_rows, shard_starts, striping
from lightning_memmap.sampling.stream import Stream, derive_seed
from lightning_memmap.sampling.subset import RowSubset
from lightning_memmap.sampling.windows import Windows, default_window

__all__ = [
    "BatchSchedule",
    "Integers",
    "RowSubset",
    "Shards",
    "Stream",
    "Windows",
    "default_window",
    "derive_seed",
    "shard_rows",
    "shard_starts",
    "striping",
]
