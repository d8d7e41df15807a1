"""The data order: which row is at which position.

It is the same under every strategy and on any number of devices that divides the shards.

Integers only: no file, no tensor, no device. The numberings, with those of store and loading::

    row           index of a sample in the whole dataset, in its order; also "dataset row"
    subset_index  index of a row in a subset, in its order; without a subset, the row
    file_row      index of a row in the files of its store, shard after shard
    storage_rank  index of a row, or of a window, among the used ones in the order of the files
    shard         0 .. C-1; in a store, row i belongs to shard i % C
    pool_index    index of a row in a pool, shard by shard; offsets count from the shard's start
    position      index in the order of an epoch; position p is served by shard p % C
    memory_row    store: index of a row in mapped columns, which may have gaps between stores
    slot          loading: index of a row in memory, or of the first step of a window
    start, stop   half-open bounds

Modules, from the bottom up:

    identity      what identifies an order in checkpoints, and how two orders differ
    rows          the rows of a dataset, of a subset, of several datasets, or windows
    pool          the rows of each shard
    permutations  the order within shards, from random bits
    sampler       an order; dataset order and shuffled order, which are computed
    table_sampler orders that draw and arrange rows in a table of an epoch
    factory       how an order is made from the user's options, and from values of rows
    weighted, bucketed, mixture, curriculum, packed
                  further orders, each with the option that makes it
    documents     the documents of each shard, by their lengths
    packing       how documents are packed into sequences
    packed_sampler, pack_plan
                  the order of packs, and how many packs an epoch has
    selection     which rows of which store each split uses
    schedule      how an epoch is divided into steps and into blocks
"""

from lightning_memmap.sampling.bucketed import Bucketed
from lightning_memmap.sampling.curriculum import Curriculum
from lightning_memmap.sampling.factory import Fields, SamplerFactory
from lightning_memmap.sampling.mixture import Mixture
from lightning_memmap.sampling.packed import Packed
from lightning_memmap.sampling.pool import Pool
from lightning_memmap.sampling.sampler import (
    ComputedSampler,
    Sampler,
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
from lightning_memmap.sampling.table_sampler import DrawnSampler, TableSampler
from lightning_memmap.sampling.weighted import Weighted

__all__ = [
    "Bucketed",
    "ComputedSampler",
    "Curriculum",
    "DrawnSampler",
    "Fields",
    "Holdout",
    "KFold",
    "Mixture",
    "Packed",
    "Parts",
    "Pool",
    "RandomSplit",
    "Sampler",
    "SamplerFactory",
    "Selection",
    "SequentialSampler",
    "ShuffledSampler",
    "Subset",
    "TableSampler",
    "Weighted",
]


def __dir__() -> list[str]:
    return __all__
