"""Rows that come more or less often than others, by weight."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lightning_memmap.errors import call_text, check_integer
from lightning_memmap.sampling.factory import Fields, SamplerFactory
from lightning_memmap.sampling.permutations import Permutation, permuted, random_bits
from lightning_memmap.sampling.sampler import Sampler, WindowedSampler, check_seed, derive_seed
from lightning_memmap.sampling.shards import Integers, Shards, shard_rows
from lightning_memmap.sampling.weighted_shards import WeightedShards
from lightning_memmap.sampling.window_permutation import WindowPermutation

#: The part of an epoch's random bits for where its points lie, and the first of those for the
#: orders of rows on the line. Part 0 is for the order of positions.
_OFFSET, _ORDERS = 1, 2
#: Shards of about the same size, up to one of so many parts of the largest, share an order.
_SIZES = 16


class Weighted(SamplerFactory):
    """Draws rows by weight, anew in each epoch, for ``MemmapDataModule(sampler=...)``.

    In each epoch, a row comes as often as ``num_samples * weight / sum(weights)`` says, rounded up
    or down at random so that this is the mean over epochs. So rows are as even as their weights
    allow: those of equal weight come equally often, up to once, which independent draws would not
    do. In windows, see ``shuffle_window``, an epoch has the same rows.

    Args:
        weights: One weight for each row of the dataset, in its order, not negative: a tensor, an
            array or a sequence. Or the name of a field: where it has floating-point values, they
            are the weights. Otherwise they are classes, and all classes come equally often. It must
            not be None in a row to draw from.
        num_samples: Positions of an epoch; by default as many as there are rows, or without
            replacement, as there are rows with a weight.
        replacement: Whether a row may come more than once in an epoch. If not, a row that would
            comes exactly once, and the others share the rest.

    Raises:
        TypeError: ``num_samples`` is not an integer, or ``replacement`` not a bool.
        ValueError: ``num_samples`` is below 1.
    """

    def __init__(
        self, weights: Any, num_samples: int | None = None, replacement: bool = True
    ) -> None:
        if num_samples is not None:
            reason = "at least 1 position of an epoch"
            num_samples = check_integer("num_samples", num_samples, 1, reason)
        if not isinstance(replacement, bool):
            raise TypeError(f"replacement={replacement!r}: give True or False")
        self.weights, self.num_samples, self.replacement = weights, num_samples, replacement

    @override
    def __repr__(self) -> str:
        count = self.num_samples
        return call_text(
            "Weighted", weights=self.weights, num_samples=count, replacement=self.replacement
        )

    @override
    def make(
        self, shards: Shards, seed: int, fields: Fields, window: int | None = None
    ) -> "WeightedSampler":
        """Make the sampler; see `SamplerFactory.make`.

        Raises:
            TypeError: The weights are not numbers.
            ValueError: There is not one weight for each row; one is negative, not finite or None;
                all are zero; or ``num_samples`` is out of range.
        """
        weights = self._weights(shards.all_rows(), fields)
        num_weighted = int(np.count_nonzero(weights))
        if not num_weighted:
            raise ValueError("Weighted: all weights of the training rows are 0")
        default = shards.num_rows if self.replacement else num_weighted
        count = default if self.num_samples is None else self.num_samples
        if not self.replacement and count > num_weighted:
            raise ValueError(
                f"Weighted: num_samples={count} without replacement, and {num_weighted} rows have a"
                " weight: give fewer, or replacement=True"
            )
        if self.replacement:
            weighted = WeightedShards.of(shards, weights * (count / weights.sum()), count)
        else:
            weighted = WeightedShards.of(shards, _at_most_once(weights, count), 1)
        if window is None:
            return WeightedSampler(weighted, seed)
        return WindowedWeightedSampler(weighted, seed, window)

    def _weights(self, rows: Integers, fields: Fields) -> NDArray[np.float64]:
        """The weights of rows, the largest of which is 1."""
        if isinstance(self.weights, str):
            found = fields.values(self.weights, rows)
            if not np.issubdtype(found.dtype, np.floating):
                _, classes, counts = np.unique(found, return_inverse=True, return_counts=True)
                found = 1 / counts[classes]
        else:
            given = np.asarray(self.weights)
            if given.shape != (fields.num_rows,):
                raise ValueError(
                    f"Weighted: weights of shape {given.shape}, and the dataset has"
                    f" {fields.num_rows} rows: give one weight for each, or the name of a field"
                )
            if not (np.issubdtype(given.dtype, np.number) or given.dtype == np.bool_):
                raise TypeError(f"Weighted: weights of {given.dtype}: give numbers")
            found = given[rows]
        weights: NDArray[np.float64] = found.astype(np.float64)
        wrong = np.flatnonzero(~((weights >= 0) & np.isfinite(weights)))
        if len(wrong):
            raise ValueError(
                f"Weighted: row {rows[wrong[0]]} has the weight {weights[wrong[0]]}: weights are"
                " finite, and 0 or more"
            )
        weights /= max(weights.max(), np.finfo(np.float64).tiny)
        return weights


@dataclass(frozen=True)
class WeightedSampler(Sampler):
    """Rows by weight: the points of a grid on the line of the rows, in random order.

    Points lie at a distance of one, from a random offset on, which is another in each epoch. A row
    is drawn once for each point on it: the systematic sampling of Madow, "On the Theory of
    Systematic Sampling, II", 1949. Its number of points is its length, rounded up or down, and the
    mean over offsets is its length. Before that, the rows of each shard are permuted, so that other
    rows share an epoch each time; those on the cuts keep their places.

    Args:
        shards: The rows, which are divided into shards by weight.
        seed: Seed of offsets and permutations, ``0 <= seed < 2**63``.

    Raises:
        ValueError: The seed is out of range.
    """

    shards: WeightedShards
    seed: int

    def __post_init__(self) -> None:
        check_seed(self.seed)

    @property
    @override
    def num_positions(self) -> int:
        return self.shards.num_positions

    @override
    def grid(
        self, epoch: int, first: int, last: int, shards: Integers, starts: Integers
    ) -> Integers:
        return _draws(self, epoch).grid(first, last, shards, starts)

    def permutation(self, epoch: int) -> Permutation:
        """The order of the draws of each shard.

        Args:
            epoch: Epoch, counted from 0.
        """
        return permuted(
            shard_rows(self.num_positions, self.num_shards), random_bits(self.seed, epoch)
        )


@dataclass(frozen=True)
class WindowedWeightedSampler(WeightedSampler, WindowedSampler):
    """The rows that `WeightedSampler` draws, shuffled within windows.

    In each epoch each row comes as often as there. The draws of a shard are put in the order of the
    file, where those of one row are neighbours, and then permuted as by
    `lightning_memmap.sampling.BlockShuffledSampler`, which sees draws instead of rows.

    Args:
        shards: The rows, which are divided into shards by weight.
        seed: Seed of the draws and permutations, ``0 <= seed < 2**63``.
        shuffle_window: Draws of a shard in a window.

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
        sizes = shard_rows(self.num_positions, self.num_shards)
        seed = derive_seed(self.seed, 1)  # Bits that are not those of the draws.
        return WindowPermutation(sizes, self.shuffle_window, seed, epoch)


class _Draws:
    """The rows of one epoch, each as often as it comes, and their order.

    Those of a shard are drawn once they are asked for: a process draws those of its own shards.

    Args:
        sampler: The sampler.
        epoch: The epoch, counted from 0.
    """

    def __init__(self, sampler: WeightedSampler, epoch: int) -> None:
        shards, words = sampler.shards, (sampler.seed, epoch)
        self._line, self._starts = shards.line, shards.starts
        self._positions = sampler.permutation(epoch)
        self._is_in_windows = isinstance(sampler, WindowedSampler)
        self._orders = _Orders(shards.sizes, *words)
        bits = shards.line.unit_bits
        self._offset = int(random_bits(*words, _OFFSET).random_raw(1)[0]) >> (64 - bits)
        #: For each place in the order of a shard's positions, shard after shard, the offset of a
        #: row in its shard.
        self._drawn = np.empty(shards.num_positions, np.min_scalar_type(shards.longest))
        self._is_drawn = np.zeros(shards.num_shards, np.bool_)

    def grid(self, first: int, last: int, columns: Integers, begins: Integers) -> Integers:
        """The rows of positions; see `Sampler.grid`."""
        for shard in columns[~self._is_drawn[columns]].tolist():
            self._draw(shard)
        places = self._positions.grid(first, last, columns, self._line.cuts[columns])
        # Behind the last position, places may be anywhere.
        drawn = self._drawn.take(places, mode="wrap")
        np.add(drawn.reshape(-1, len(columns)), begins, out=places.reshape(-1, len(columns)))
        return places

    def _draw(self, shard: int) -> None:
        line, order = self._line, self._orders.of(shard)
        begin, size = int(self._starts[shard]), self._orders.sizes[shard]
        # A copy: in order, they come from memory in half of the time.
        lengths = line.pieces[begin : begin + size].copy()
        # The points before an end: point k lies at k, plus the offset. The first row stays there.
        lengths[:1] += (1 << line.unit_bits) - 1 - self._offset
        # The last row has what is left. Numbers of no row have no length.
        ends = lengths.take(order[:-1], mode="clip").cumsum()
        ends >>= line.unit_bits
        # Before the row of a point come as many rows as end at this point or before it.
        drawn = self._drawn[line.cuts[shard] : line.cuts[shard + 1]]
        rows = np.bincount(ends, minlength=len(drawn)).cumsum()[: len(drawn)]
        found = order.take(rows, mode="wrap")
        if self._is_in_windows:
            found.sort()
        # At once: a thread that reads windows may look up what another one draws again.
        drawn[:] = found
        self._is_drawn[shard] = True


class _Orders:
    """A permutation of the rows of each shard in one epoch. The first and the last row stay.

    Args:
        sizes: Rows of each shard, int64 of shape (C,).
        seed: Seed of the permutations.
        epoch: The epoch.
    """

    def __init__(self, sizes: Integers, seed: int, epoch: int) -> None:
        self.sizes: list[int] = sizes.tolist()
        self._words = seed, epoch
        bits = random_bits(seed, epoch, _ORDERS)
        self._most = max(1, max(self.sizes) - 2)
        starts = bits.random_raw(len(sizes)) % np.uint64(self._most)
        self._starts: list[int] = starts.tolist()
        #: By the largest offset, the order that shards share, twice over, and the place of each
        #: offset among those of the largest shard.
        shared = np.tile(_permutation(self._most, bits) + 1, 2)
        self._shared = {self._most: (shared, np.arange(len(shared)))}

    def of(self, shard: int) -> Integers:
        """The order of the rows of a shard.

        Args:
            shard: Its number.

        Returns:
            Each offset once, int64. Numbers behind the last offset may be among them.
        """
        size, most = self.sizes[shard], self._most
        inner = size - 2
        if inner < 2:
            return np.arange(size, dtype=np.int64)
        if most > 4 * inner:
            bits = random_bits(*self._words, _ORDERS + 1 + shard)
            order = _permutation(inner, bits) + 1
        else:
            # That of the largest shard, from a random place on.
            order, places = self._shared_order(inner)
            start = self._starts[shard]
            first, end = np.searchsorted(places, (start, start + most))
            order = order[first:end]
        return np.concatenate([[0], order, [size - 1]])

    def _shared_order(self, largest: int) -> tuple[Integers, Integers]:
        """The order that shards share, without most of the offsets beyond the largest of one."""
        unit = -(-self._most // _SIZES)
        largest = min(-(-largest // unit) * unit, self._most)
        if largest not in self._shared:
            order, _ = self._shared[self._most]
            places = np.flatnonzero(order <= largest)
            self._shared[largest] = order[places], places
        return self._shared[largest]


def _permutation(size: int, bits: np.random.Philox) -> Integers:
    zero = np.zeros(1, np.int64)
    return permuted(np.array([size]), bits).grid(0, size - 1, zero, zero)


@lru_cache(maxsize=2)
def _draws(sampler: WeightedSampler, epoch: int) -> _Draws:
    return _Draws(sampler, epoch)


def _at_most_once(weights: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """How often rows are expected to come, if none comes twice: their weights, limited to once."""
    expected = np.zeros_like(weights)
    free, left = weights > 0, count
    while left > 0:
        share: NDArray[np.float64] = weights * free * (left / weights[free].sum())
        is_over = share >= 1
        if not is_over.any():
            expected += share
            return expected
        expected[is_over] = 1
        free &= ~is_over
        left = count - int(expected.sum())
    return expected
