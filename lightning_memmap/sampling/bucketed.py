"""Rows of similar length come together, so that little of a padded batch is padding."""

from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lightning_memmap.errors import call_text, check_integer
from lightning_memmap.sampling.factory import Fields, SamplerFactory
from lightning_memmap.sampling.identity import Numbers
from lightning_memmap.sampling.permutations import Permutation, permuted, random_bits
from lightning_memmap.sampling.sampler import Sampler, WindowedSampler, check_seed, derive_seed
from lightning_memmap.sampling.shards import Integers, Shards
from lightning_memmap.sampling.window_permutation import WindowPermutation

#: Windows of an epoch whose order is kept, for all shards: a step may reach from one into the next.
_KEPT_WINDOWS = 4
#: Rows of this length and longer ones are alike.
_MAX_KEY = 2**32


class Bucketed(SamplerFactory):
    """Puts rows of similar length into one step, for ``MemmapDataModule(sampler=...)``.

    In each epoch all rows are shuffled, and come exactly once. The rows of a window, that is
    ``num_buckets * bucket_size`` consecutive positions, are then sorted by length and divided into
    buckets, which come in random order. Within a bucket, rows ascend in length.

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
        TypeError: A number is not an integer.
        ValueError: A number is below 1.
    """

    def __init__(self, lengths: Any, bucket_size: int, num_buckets: int = 100) -> None:
        self.lengths = lengths
        self.bucket_size = check_integer("bucket_size", bucket_size, 1)
        self.num_buckets = check_integer("num_buckets", num_buckets, 1)

    @override
    def __repr__(self) -> str:
        counts = {"bucket_size": self.bucket_size, "num_buckets": self.num_buckets}
        return call_text("Bucketed", lengths=self.lengths, **counts)

    @override
    def make(
        self, shards: Shards, seed: int, fields: Fields, window: int | None = None
    ) -> "BucketedSampler":
        """Make the sampler; see `SamplerFactory.make`.

        Raises:
            TypeError: The lengths are not integers.
            ValueError: There is not one length for each row, one is negative, or the rows of the
                field do not differ in length.
        """
        lengths = Numbers(_narrowed(self._lengths(fields)[shards.all_rows()]))
        given = shards, seed, lengths, self.bucket_size, self.num_buckets
        if window is None:
            return BucketedSampler(*given)
        return WindowedBucketedSampler(*given, window)

    def _lengths(self, fields: Fields) -> Integers:
        """The length of each row of the dataset."""
        if isinstance(self.lengths, str):
            return fields.lengths(self.lengths)
        given = np.asarray(self.lengths)
        if given.shape != (fields.num_rows,):
            raise ValueError(
                f"Bucketed: lengths of shape {given.shape}, and the dataset has {fields.num_rows}"
                " rows: give one for each, or the name of a field"
            )
        if not np.issubdtype(given.dtype, np.integer):
            raise TypeError(f"Bucketed: lengths of {given.dtype}: give integers")
        wrong = np.flatnonzero(given < 0)
        if len(wrong):
            raise ValueError(
                f"Bucketed: row {wrong[0]} has the length {given[wrong[0]]}: lengths are 0 or more"
            )
        return given.astype(np.int64)


@dataclass(frozen=True)
class BucketedSampler(Sampler):
    """A shuffled epoch whose rows are sorted by length within windows, bucket by bucket.

    A bucket is ``bucket_size`` consecutive positions, and a window ``num_buckets`` buckets. The
    buckets of a window are ranked at random. Each shard, by itself, has its rows of the window
    sorted by length, and its positions by the ranks of their buckets; the first row is at the first
    position, and so on. Shards are alike in their lengths, since their rows are shuffled: so rows
    of a bucket are of similar length whichever shard they are of.

    Args:
        shards: The rows, and the shards that they are divided into.
        seed: Seed of the permutations, ``0 <= seed < 2**63``.
        lengths: The length of each row, shard after shard, unsigned integers of shape (rows,).
        bucket_size: Rows of a bucket.
        num_buckets: Buckets of a window.

    Raises:
        ValueError: The seed is out of range.
    """

    seed: int
    lengths: Numbers
    bucket_size: int
    num_buckets: int

    def __post_init__(self) -> None:
        check_seed(self.seed)

    @override
    def grid(
        self, epoch: int, first: int, last: int, shards: Integers, starts: Integers
    ) -> Integers:
        return _order(self, epoch).grid(first, last, shards, starts)

    def permutation(self, epoch: int) -> Permutation:
        """The permutations of the shards, before rows are sorted by length.

        Args:
            epoch: Epoch, counted from 0.
        """
        return permuted(self.shards.sizes, random_bits(self.seed, epoch))


@dataclass(frozen=True)
class WindowedBucketedSampler(BucketedSampler, WindowedSampler):
    """The same for an epoch that is shuffled within windows, of which others are parts.

    Args:
        shards: As for `BucketedSampler`.
        seed: As there.
        lengths: As there.
        bucket_size: As there.
        num_buckets: As there.
        shuffle_window: Rows of a shard in a window that is shuffled; see
            `lightning_memmap.sampling.BlockShuffledSampler`.

    Raises:
        ValueError: The seed is out of range.
    """

    shuffle_window: int

    @property
    @override
    def window_rows(self) -> int:
        return self.shuffle_window

    @override
    def permutation(self, epoch: int) -> Permutation:
        seed = derive_seed(self.seed, 1)  # Bits that are not those of the ranks of buckets.
        return WindowPermutation(self.shards.sizes, self.shuffle_window, seed, epoch)


class _Window(NamedTuple):
    """The rows of a window: those of some shards, in a grid of shape (shards, rounds)."""

    rounds: range
    """The rounds over the shards, which have one position of each, that the window reaches into."""
    inside: NDArray[np.bool_]
    """Whether a position is in the window; some of the first and the last round are not."""
    offsets: Integers
    """The offset of each row within its shard."""


class _Order:
    """The order of one epoch.

    Args:
        sampler: The sampler.
        epoch: The epoch, counted from 0.
    """

    def __init__(self, sampler: BucketedSampler, epoch: int) -> None:
        self._sampler = sampler
        self._words = sampler.seed, epoch
        self._window_size = sampler.bucket_size * sampler.num_buckets
        self._shuffled = sampler.permutation(epoch)
        self._kept: OrderedDict[tuple[int, int, int], _Window] = OrderedDict()

    def grid(self, first: int, last: int, columns: Integers, begins: Integers) -> Integers:
        """Offsets for a grid of positions; see `Sampler.grid`."""
        num_shards, size = self._sampler.num_shards, self._window_size
        offsets = np.zeros((len(columns), last + 1 - first), np.int64)
        end = min((last + 1) * num_shards, self._sampler.num_positions)
        for number in range(first * num_shards // size, -(-end // size)):
            window = self._window(number, columns)
            low, high = max(first, window.rounds.start), min(last + 1, window.rounds.stop)
            there = slice(low - window.rounds.start, high - window.rounds.start)
            here = offsets[:, low - first : high - first]
            np.copyto(here, window.offsets[:, there], where=window.inside[:, there])
        offsets += begins[:, None]
        by_round: Integers = offsets.T.ravel()
        return by_round

    def _window(self, number: int, columns: Integers) -> _Window:
        key = number, int(columns[0]), len(columns)
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = self._sorted(number, columns)
            if len(self._kept) > _KEPT_WINDOWS * self._sampler.num_shards // len(columns):
                # One step, since threads that read windows look rows up too.
                self._kept.popitem(last=False)
        return found

    def _sorted(self, number: int, columns: Integers) -> _Window:
        sampler, shards = self._sampler, self._sampler.shards
        begin = number * self._window_size
        end = min(begin + self._window_size, sampler.num_positions)
        rounds = range(begin // shards.num_shards, -(-end // shards.num_shards))
        positions = np.add.outer(columns, np.arange(rounds.start, rounds.stop) * shards.num_shards)
        inside = (positions >= begin) & (positions < end)
        zeros = np.zeros_like(columns)
        shuffled = self._shuffled.grid(rounds.start, rounds.stop - 1, columns, zeros)
        offsets = shuffled.reshape(-1, len(columns)).T
        # Behind the last position, offsets may be anything.
        places = shards.starts[columns][:, None] + offsets
        lengths = sampler.lengths.array.take(places, mode="clip").astype(np.int64)
        buckets = (positions - begin) // sampler.bucket_size
        ranks = self._ranks(number, end - begin).take(buckets, mode="clip")
        # Positions of other windows are first and last in both orders, and so stay where they are.
        edges = positions < begin, positions >= end
        by_length, by_rank = _indices_in_order(lengths, *edges), _indices_in_order(ranks, *edges)
        found = np.empty_like(positions)
        found.ravel()[by_rank] = offsets.ravel()[by_length]
        return _Window(rounds, inside, found)

    def _ranks(self, number: int, num_positions: int) -> Integers:
        """The place that each bucket of a window has among them by the length of its rows."""
        count = -(-num_positions // self._sampler.bucket_size)
        bits, zero = random_bits(*self._words, 1 + number), np.zeros(1, np.int64)
        return permuted(np.array([count]), bits).grid(0, count - 1, zero, zero)


@lru_cache(maxsize=2)
def _order(sampler: BucketedSampler, epoch: int) -> _Order:
    return _Order(sampler, epoch)


def _indices_in_order(
    keys: Integers, before: NDArray[np.bool_], behind: NDArray[np.bool_]
) -> Integers:
    """Where the keys of each shard are, in ascending order, if those of all lay in one array.

    Args:
        keys: Numbers of 0 or more, int64 of shape (shards, rounds).
        before: Which of them come first instead, of this shape.
        behind: Which come last.

    Returns:
        Indices, int64 of shape (shards * rounds,).
    """
    num_rounds = keys.shape[1]
    width = num_rounds.bit_length()
    numbers = np.minimum(keys, _MAX_KEY) + 1
    numbers[before], numbers[behind] = 0, _MAX_KEY + 2
    numbers <<= width
    numbers |= np.arange(num_rounds)
    # With its index in it, a number is sorted several times as fast as by `argsort`.
    numbers.sort(axis=1)
    numbers &= (1 << width) - 1
    numbers += np.arange(len(numbers))[:, None] * num_rounds
    return numbers.ravel()


def _narrowed(numbers: Integers) -> NDArray[np.unsignedinteger[Any]]:
    """Numbers that are not negative, in the smallest dtype."""
    return numbers.astype(np.min_scalar_type(int(numbers.max(initial=0))))
