"""Orders that put rows of similar length into one step, so that batches need little padding.

An epoch is divided into sections of several buckets. Rows are assigned to sections at random, and
sorted by length within each. With a ``bucket_size`` of 2 and 3 buckets in a section::

    lengths drawn for a section    5 9 1 7 2 8
    sorted into buckets            1 2 | 5 7 | 8 9
    buckets in random order        5 7 | 1 2 | 8 9
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self, override

from lightning_memmap.errors import ReprAsCall, check_integer
from lightning_memmap.integers import Integers, ceil_div
from lightning_memmap.sampling.columns import Column, read_whole_column
from lightning_memmap.sampling.factory import Fields, SamplerFactory, check_per_row, per_row_array
from lightning_memmap.sampling.identity import FrozenArray
from lightning_memmap.sampling.permutations import (
    Alike,
    Permutation,
    bit_generator,
    order_within,
    permuted,
)
from lightning_memmap.sampling.pool import Pool
from lightning_memmap.sampling.rows import Shards
from lightning_memmap.sampling.sampler import cached_once, cached_per_epoch
from lightning_memmap.sampling.table_sampler import DrawnSampler

#: Minimum number of buckets that are exchanged with each other.
_MIN_GROUP = 4
#: Streams of the random bits: how rows are dealt to shards, and the first of the streams of shards.
#: Stream 0 is used for the order of layers, and stream 1 for the order of buckets.
_DEAL_BITS = 2
_SHARD_BITS = 3


@dataclass(eq=False, repr=False)
class Bucketed(ReprAsCall, SamplerFactory):
    """Puts rows of similar length into one step, for ``MemmapDataModule(sampler=...)``.

    Each epoch holds all rows exactly once. It is divided into sections of ``num_buckets``
    buckets, rounded up so that buckets start at each shard equally often. The rows of a section are
    drawn at random from rows of all lengths, sorted by length and divided into buckets, whose order
    is random. Within a bucket, lengths ascend.

    Args:
        lengths: The name of a field of variable length; if several dimensions vary, a length is
            their product. Or one length for each row of the dataset, in dataset order: a tensor, an
            array or a sequence of integers, not negative. Or `lightning_memmap.results.Results`, a
            column that training made, of numbers of any kind: their ranks count.
        bucket_size: Rows of a bucket: the rows of a step over all devices, which is ``batch_size``
            times the number of devices, or a multiple of it. With another number, some steps span
            two buckets, and need more padding.
        num_buckets: Buckets of a section. The more there are, the more equal the lengths in a
            bucket. With 1, a bucket simply holds rows that are close together in a shuffle.

    Raises:
        TypeError: ``lengths`` is of another type, or a number is not an integer.
        ValueError: A number is below 1.
    """

    lengths: Any
    bucket_size: int
    num_buckets: int = 100

    def __post_init__(self) -> None:
        if not isinstance(self.lengths, (str, Column)):
            check_per_row("Bucketed: lengths", self.lengths)
        self.bucket_size = check_integer("bucket_size", self.bucket_size, 1)
        self.num_buckets = check_integer("num_buckets", self.num_buckets, 1)

    @override
    def make(self, pool: Pool, seed: int, fields: Fields) -> "BucketedSampler":
        """Make the sampler; see `SamplerFactory.make`.

        Raises:
            TypeError: The lengths are not integers.
            ValueError: The number of lengths isn't the number of rows, one is negative, or all rows
                of the field have one length.
        """
        dataset_lengths = self._dataset_lengths(fields)
        dtype = np.min_scalar_type(int(dataset_lengths.max(initial=0)))
        lengths = dataset_lengths.astype(dtype)[pool.dataset_rows(pool.indices())]
        if pool.is_striped:
            pool = _deal(pool, lengths, seed)
        return BucketedSampler(
            pool,
            seed,
            lengths=FrozenArray(lengths),
            bucket_size=self.bucket_size,
            num_buckets=self.num_buckets,
        )

    def _dataset_lengths(self, fields: Fields) -> Integers:
        """Return the length of each row of the dataset."""
        if isinstance(self.lengths, str):
            return fields.lengths(self.lengths)
        if isinstance(self.lengths, Column):
            values = read_whole_column("Bucketed: lengths", fields, self.lengths)
            ranks: Integers = np.unique(values, return_inverse=True)[1]
            return ranks
        lengths = per_row_array("Bucketed: lengths", self.lengths, fields.num_rows)
        if not np.issubdtype(lengths.dtype, np.integer):
            raise TypeError(f"Bucketed: lengths of {lengths.dtype}: pass integers")
        negative = np.flatnonzero(lengths < 0)
        if len(negative):
            row = negative[0]
            raise ValueError(
                f"Bucketed: row {row} has the length {lengths[row]}: lengths can't be negative"
            )
        return lengths.astype(np.int64)


def _deal(pool: Pool, lengths: NDArray[Any], seed: int) -> Pool:
    """Deal the rows of a pool to its shards by length, like cards, so that all shards are alike."""
    index = Shards(pool.num_rows, pool.num_shards).file_rows(np.arange(pool.num_rows))
    dealt = index[order_within(lengths[index], bit_generator(seed, 0, _DEAL_BITS))]
    shards = [dealt[shard :: pool.num_shards] for shard in range(pool.num_shards)]
    return pool.choose(pool.sizes, np.concatenate(shards))


@dataclass(frozen=True, kw_only=True)
class BucketedSampler(DrawnSampler):
    """A shuffled epoch whose rows are sorted by length within sections, bucket by bucket."""

    # Bucket b holds the positions b * bucket_size and so on, and the buckets of a section are
    # ranked at random. Each shard sorts its rows of the section by length, and its positions by the
    # ranks of their buckets: its shortest row is assigned to its first position in that order, etc.
    # To make the rows of a bucket similar in length whichever shards they belong to, rows are dealt
    # to shards by length. The rows at one offset of all shards form a layer of neighbours in
    # length. All shards have the same random order of layers, and exchange rows between a few
    # neighbouring layers. Buckets are ranked among those that start at the same shard, of which a
    # section has several if there are enough, so rows are placed as if there were no shards.
    # In blocks, whose rows must be close together in the files, shards are the store's instead.

    #: By the index in the pool of all rows.
    lengths: FrozenArray
    bucket_size: int
    num_buckets: int
    version: ClassVar[int] = 2
    draws_each_row_once: ClassVar[bool] = True

    @override
    def in_blocks(self, block: int) -> Self:
        return replace(self, pool=replace(self.pool, chosen=None), shuffle_block=block)

    @override
    def draw(self, epoch: int, shard: int) -> Integers:
        drawn = super().draw(epoch, shard)
        # The row by which some shards are longer stays last.
        num_layers = int(self.pool.sizes.min())
        # A quarter of the layers that a bucket would span if there were no shards.
        num_exchanged = 1 + round((num_layers / self.num_buckets + 0.5) / 4)
        if self.pool.chosen is None or num_exchanged == 1 or not num_layers:
            return drawn
        groups = np.arange(num_layers) // num_exchanged
        bits = bit_generator(self.seed, epoch, _SHARD_BITS + shard)
        drawn[:num_layers] = order_within(groups, bits)
        return drawn

    @override
    def permutation(self, epoch: int) -> Permutation:
        if self.pool.chosen is None:
            return super().permutation(epoch)
        # All shards have the same order of layers.
        num_layers = max(1, int(self.pool.sizes.min()))
        zero = np.zeros(1, np.int64)
        order = permuted(np.array([num_layers]), bit_generator(self.seed, epoch))
        layers = order.grid(0, num_layers, zero, zero)
        return Alike(np.append(layers, np.arange(num_layers, self.pool.longest)))

    @override
    def arrange(self, epoch: int, shard: int, offsets: Integers) -> Integers:
        positions = np.arange(len(offsets), dtype=np.int64) * self.num_shards + shard
        buckets = positions // self.bucket_size
        sections = buckets // self._section_buckets
        lengths = self._pool_lengths()[self.pool.starts[shard] + offsets]
        by_length = np.lexsort((lengths, sections))
        by_rank = self._ranks(epoch)[buckets].argsort(kind="stable")
        arranged = np.empty_like(offsets)
        arranged[by_rank] = offsets[by_length]
        return arranged

    @cached_once
    def _pool_lengths(self) -> NDArray[Any]:
        """Return the length of each row of the pool, shard after shard."""
        return self.lengths.array[self.pool.base_index(self.pool.indices())]

    @property
    def _num_start_shards(self) -> int:
        """The number of shards at which a bucket may start."""
        return self.num_shards // math.gcd(self.bucket_size, self.num_shards)

    @property
    def _section_buckets(self) -> int:
        """Buckets of a section: a multiple of the shards at which they may start."""
        if self._num_start_shards == 1 or self.num_buckets == 1:
            return self.num_buckets
        rounds = ceil_div(self.num_buckets, self._num_start_shards)
        return self._num_start_shards * max(_MIN_GROUP, rounds)

    @cached_per_epoch
    def _ranks(self, epoch: int) -> Integers:
        """Rank the buckets of each section at random, section after section."""
        num_buckets = ceil_div(self.num_positions, self.bucket_size)
        buckets = np.arange(num_buckets)
        sections = buckets // self._section_buckets
        start_shards = buckets * self.bucket_size % self.num_shards
        # Buckets of one group are exchanged. In too small a group, the order would not be random.
        max_groups = max(1, min(num_buckets, self._section_buckets) // _MIN_GROUP)
        groups = start_shards
        if self._num_start_shards > max_groups:
            groups = start_shards * max_groups // self.num_shards
        if self.num_positions % self.bucket_size:
            # A shorter bucket would move all later ones to other shards, so it stays last.
            groups[-1] = self.num_shards
        groups += sections * (self.num_shards + 1)
        ranks = np.empty(num_buckets, np.int64)
        bits = bit_generator(self.seed, epoch, 1)
        ranks[groups.argsort(kind="stable")] = order_within(groups, bits)
        return ranks
