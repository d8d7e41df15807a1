"""Rows of similar length come together, so that little of a padded batch is padding."""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self, override

from lightning_memmap.errors import Described, check_integer
from lightning_memmap.sampling.identity import Numbers
from lightning_memmap.sampling.permutations import (
    Alike,
    Permutation,
    order_within,
    permuted,
    random_bits,
)
from lightning_memmap.sampling.pool import Pool
from lightning_memmap.sampling.rows import Integers, Shards
from lightning_memmap.sampling.sampler import (
    Fields,
    Sampler,
    SamplerFactory,
    check_by_row,
    kept,
    one_by_row,
)

#: Buckets that are exchanged with each other, at least.
_GROUP = 4
#: Parts of the random bits: how rows are dealt, and the first of those for shards. Part 0 is for
#: the order of layers, and part 1 for that of buckets.
_DEAL, _STRATA = 2, 3


@dataclass(eq=False, repr=False)
class Bucketed(Described, SamplerFactory):
    """Puts rows of similar length into one step, for ``MemmapDataModule(sampler=...)``.

    In each epoch all rows come exactly once. Those of a window, that is ``num_buckets *
    bucket_size`` consecutive positions or some more, are drawn at random from rows of all lengths,
    sorted by length and divided into buckets, which come in random order. Within a bucket, rows
    ascend in length.

    Args:
        lengths: The name of a field whose rows differ in length; where several dimensions differ, a
            length is their product. Or one length for each row of the dataset, in its order: a
            tensor, an array or a sequence of integers, not negative.
        bucket_size: Rows of a bucket: those of a step over all devices, ``batch_size`` times the
            number of devices, or a multiple of it. With another number, some steps have rows of two
            buckets, and more padding.
        num_buckets: Buckets of a window. With more of them, a bucket has rows of more equal length;
            with one, the rows of a bucket are all rows that are near each other.

    Raises:
        TypeError: ``lengths`` is neither, or a number is not an integer.
        ValueError: A number is below 1.
    """

    lengths: Any
    bucket_size: int
    num_buckets: int = 100

    def __post_init__(self) -> None:
        check_by_row("Bucketed: lengths", self.lengths)
        self.bucket_size = check_integer("bucket_size", self.bucket_size, 1)
        self.num_buckets = check_integer("num_buckets", self.num_buckets, 1)

    @override
    def make(self, pool: Pool, seed: int, fields: Fields) -> "BucketedSampler":
        """Make the sampler; see `SamplerFactory.make`.

        Raises:
            TypeError: The lengths are not integers.
            ValueError: There is not one length for each row, one is negative, or the rows of the
                field do not differ in length.
        """
        found = self._lengths(fields)
        lengths = found.astype(np.min_scalar_type(int(found.max(initial=0))))
        lengths = lengths[pool.dataset_rows(pool.index())]
        if pool.is_striped:
            pool = _dealt(pool, lengths, seed)
        counts = {"bucket_size": self.bucket_size, "num_buckets": self.num_buckets}
        return BucketedSampler(pool, seed, lengths=Numbers(lengths), **counts)

    def _lengths(self, fields: Fields) -> Integers:
        """The length of each row of the dataset."""
        if isinstance(self.lengths, str):
            return fields.lengths(self.lengths)
        given = one_by_row("Bucketed: lengths", self.lengths, fields.num_rows)
        if not np.issubdtype(given.dtype, np.integer):
            raise TypeError(f"Bucketed: lengths of {given.dtype}: give integers")
        wrong = np.flatnonzero(given < 0)
        if len(wrong):
            raise ValueError(
                f"Bucketed: row {wrong[0]} has the length {given[wrong[0]]}: lengths are 0 or more"
            )
        return given.astype(np.int64)


def _dealt(pool: Pool, lengths: NDArray[Any], seed: int) -> Pool:
    """The rows of a pool dealt to its shards by length, as cards are: all shards are alike."""
    places = Shards(pool.num_rows, pool.num_shards).locate(np.arange(pool.num_rows))
    dealt = places[order_within(lengths[places], random_bits(seed, 0, _DEAL))]
    each = [dealt[shard :: pool.num_shards] for shard in range(pool.num_shards)]
    return pool.drawing(pool.sizes, pool.counts, np.concatenate(each))


@dataclass(frozen=True, kw_only=True)
class BucketedSampler(Sampler):
    """A shuffled epoch whose rows are sorted by length within windows, bucket by bucket."""

    # A bucket is ``bucket_size`` consecutive positions, and a window ``num_buckets`` buckets, which
    # are ranked at random. Each shard sorts its rows of the window by length, and its positions by
    # the ranks of their buckets; the first row is at the first position, and so on.
    # So that rows of a bucket are of similar length whichever shard they are of, rows are dealt to
    # shards by length: those at one offset of all shards are a layer of neighbours in length. All
    # shards have the same random order of layers, and exchange rows between a few of them that lie
    # together. And buckets are ranked among those that begin at the same shard, of which a window
    # has several, as far as there are enough: rows then come to their positions as if there were no
    # shards. In blocks, where rows that lie together come together, shards are those of the store
    # instead.

    #: By the index in the pool of all rows.
    lengths: Numbers
    bucket_size: int
    num_buckets: int
    version: ClassVar[int] = 2

    @override
    def in_blocks(self, block: int) -> Self:
        return replace(self, pool=replace(self.pool, chosen=None), shuffle_window=block)

    @override
    def draw(self, epoch: int, shard: int) -> Integers:
        drawn = super().draw(epoch, shard)
        # What not all shards have comes last, as everywhere.
        num_layers = int(self.pool.sizes.min())
        # How many layers a bucket would span if there were no shards, and a part of them.
        together = 1 + round((num_layers / self.num_buckets + 0.5) / 4)
        if self.pool.chosen is None or together == 1 or not num_layers:
            return drawn
        strata = np.arange(num_layers) // together
        drawn[:num_layers] = order_within(strata, random_bits(self.seed, epoch, _STRATA + shard))
        return drawn

    @override
    def permutation(self, epoch: int) -> Permutation:
        if self.pool.chosen is None:
            return super().permutation(epoch)
        # The rows that all shards have are in one order, the same for each.
        num_layers, zero = max(1, int(self.pool.sizes.min())), np.zeros(1, np.int64)
        found = permuted(np.array([num_layers]), random_bits(self.seed, epoch))
        layers = found.grid(0, num_layers - 1, zero, zero)
        return Alike(np.append(layers, np.arange(num_layers, self.pool.longest)))

    @override
    def arrange(self, epoch: int, shard: int, offsets: Integers) -> Integers:
        positions = np.arange(len(offsets), dtype=np.int64) * self.num_shards + shard
        buckets = positions // self.bucket_size
        lengths = self._held(0)[self.pool.starts[shard] + offsets]
        found = np.empty_like(offsets)
        windows = buckets // self._window
        found[self._ranks(epoch)[buckets].argsort(kind="stable")] = offsets[
            np.lexsort((lengths, windows))
        ]
        return found

    @kept
    def _held(self, _: int) -> NDArray[Any]:
        """The lengths of the rows of each shard, shard after shard."""
        return self.lengths.array[self.pool.whole(self.pool.index())]

    @property
    def _num_begins(self) -> int:
        """How many shards there are that a bucket may begin at."""
        return self.num_shards // math.gcd(self.bucket_size, self.num_shards)

    @property
    def _window(self) -> int:
        """Buckets of a window: whole rounds over the shards that one may begin at."""
        if self._num_begins == 1 or self.num_buckets == 1:
            return self.num_buckets
        return self._num_begins * max(_GROUP, -(-self.num_buckets // self._num_begins))

    @kept
    def _ranks(self, epoch: int) -> Integers:
        """The rank of each bucket in the order of lengths, window after window."""
        count = -(-self.num_positions // self.bucket_size)
        buckets = np.arange(count)
        windows, begins = buckets // self._window, buckets * self.bucket_size % self.num_shards
        # Buckets of one group are exchanged. Too small a group would be no random order.
        most = max(1, min(count, self._window) // _GROUP)
        groups = begins * most // self.num_shards if self._num_begins > most else begins
        if self.num_positions % self.bucket_size:
            # One that is shorter would move all that come after it to other shards.
            groups[-1] = self.num_shards
        groups += windows * (self.num_shards + 1)
        ranks = np.empty(count, np.int64)
        ranks[groups.argsort(kind="stable")] = order_within(
            groups, random_bits(self.seed, epoch, 1)
        )
        return ranks
