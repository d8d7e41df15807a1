"""Rows that come more or less often than others, by weight."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lightning_memmap.errors import Described
from lightning_memmap.sampling.identity import Numbers
from lightning_memmap.sampling.permutations import (
    Permutation,
    columns_of,
    permutation,
    permuted,
    random_bits,
)
from lightning_memmap.sampling.pool import Pool, Runs
from lightning_memmap.sampling.rows import Integers, firsts_of, shard_rows
from lightning_memmap.sampling.sampler import (
    Fields,
    Sampler,
    SamplerFactory,
    checked_positions,
    kept,
    one_by_row,
)

#: The part of an epoch's random bits for where its points lie, and the first of those for the
#: orders of rows on the line. Part 0 is for the order of positions.
_OFFSET, _ORDERS = 1, 2
#: The line of an epoch is shorter than 2 to the power of this, in units.
_LINE_BITS = 62
_MAX_POSITIONS = 2**40


@dataclass(eq=False, repr=False)
class Weighted(Described, SamplerFactory):
    """Draws rows by weight, again in each epoch, for ``MemmapDataModule(sampler=...)``.

    In each epoch, a row comes as often as ``num_samples * weight / sum(weights)`` says, rounded up
    or down at random so that this is the mean over epochs. So rows are as even as their weights
    allow: those of equal weight come equally often, up to once, which independent draws would not
    do. In blocks, see ``shuffle_window``, an epoch has the same rows.

    Args:
        weights: One weight for each row of the dataset, in its order, not negative: a tensor, an
            array or a sequence. Or the name of a field: where it has floating-point values, they
            are the weights. Otherwise they are classes, and all classes come equally often. It must
            not be None in a row to draw from.
        num_samples: Positions of an epoch; by default as many as there are rows.

    Raises:
        TypeError: ``num_samples`` is not an integer.
        ValueError: ``num_samples`` is below 1.
    """

    weights: Any
    num_samples: int | None = None

    def __post_init__(self) -> None:
        self.num_samples = checked_positions(self.num_samples)

    @override
    def make(self, pool: Pool, seed: int, fields: Fields) -> "WeightedSampler":
        """Make the sampler; see `SamplerFactory.make`.

        Raises:
            TypeError: The weights are not numbers.
            ValueError: There is not one weight for each row; one is negative, not finite or None;
                all are zero; or ``num_samples`` is out of range.
        """
        weights = self._weights(pool.dataset_rows(pool.index()), fields)
        if not weights.any():
            raise ValueError("Weighted: all weights of the training rows are 0")
        count = pool.num_rows if self.num_samples is None else self.num_samples
        if count > _MAX_POSITIONS:
            raise ValueError(f"num_samples={count}: an epoch has 2**40 positions at most")
        lengths = _in_units(weights * (count / weights.sum()), count)
        return WeightedSampler(_cut(pool, lengths, count), seed, lengths=Numbers(lengths))

    def _weights(self, rows: Integers, fields: Fields) -> NDArray[np.float64]:
        """The weights of rows, the largest of which is 1."""
        if isinstance(self.weights, str):
            found = fields.values(self.weights, rows)
            if not np.issubdtype(found.dtype, np.floating):
                _, classes, counts = np.unique(found, return_inverse=True, return_counts=True)
                found = 1 / counts[classes]
        else:
            given = one_by_row("Weighted: weights", self.weights, fields.num_rows)
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


@dataclass(frozen=True, kw_only=True)
class WeightedSampler(Sampler):
    """Rows by weight: the points of a grid on the line of the rows, in random order."""

    # Points lie at a distance of one, from a random offset on, which is another in each epoch. A
    # row is drawn once for each point on it: the systematic sampling of Madow, "On the Theory of
    # Systematic Sampling, II", 1949. Before that, the rows of each shard are permuted, so that
    # other rows share an epoch each time; those on the cuts keep their places.

    lengths: Numbers

    @override
    def draws(self, epoch: int, shards: Integers) -> Integers:
        pool, unit_bits = self.pool, _unit_bits(self.num_positions)
        point = int(random_bits(self.seed, epoch, _OFFSET).random_raw(1)[0]) >> (64 - unit_bits)
        order = self._orders(epoch, shards)
        # Shard after shard: each is as long as it has points.
        lengths = self._pieces(0).take(order + pool.starts[shards][:, None], mode="clip")
        lengths[:, :-1] *= order[:, :-1] < (pool.sizes[shards] - 1)[:, None]
        # The points before the end of each row: point k lies at k, plus the offset.
        lengths[0, 0] += (1 << unit_bits) - 1 - point
        ends = lengths.ravel().cumsum()
        ends >>= unit_bits
        # Before the row of a point come as many rows as end at this point or before it.
        rows = np.bincount(ends)[:-1].cumsum()
        found = order.ravel().take(rows).reshape(len(shards), -1)
        return np.sort(found) if self.shuffle_window is not None else found

    def _orders(self, epoch: int, shards: Integers) -> Integers:
        """The rows of shards permuted, of shape (shards, n); those that a shard lacks anywhere."""
        # The first and the last row of a shard may be in others too, and keep their places.
        sizes, most = self.pool.sizes[shards], self.pool.longest - 2
        order = np.empty((len(shards), max(2, most + 2)), np.int64)
        order[:, 0], order[:, -1] = 0, sizes - 1
        if most < 1:
            return order
        np.add(columns_of(self._rows(epoch), shards, most), 1, out=order[:, 1:-1])
        for index in np.flatnonzero(4 * (sizes - 2) < most).tolist():
            order[index, 1:-1] = most + 2
            if (size := int(sizes[index]) - 2) > 0:
                bits = random_bits(self.seed, epoch, _ORDERS + 1 + int(shards[index]))
                order[index, 1 : 1 + size] = 1 + permutation(size, bits)
        return order

    @kept
    def _rows(self, epoch: int) -> Permutation:
        """The permutation of the inner rows of the largest shard: shards share tables."""
        inner = np.full(self.num_shards, self.pool.longest - 2)
        return permuted(inner, random_bits(self.seed, epoch, _ORDERS))

    @kept
    def _pieces(self, _: int) -> Integers:
        """How much of each row is in each shard, in units, shard after shard."""
        pool = self.pool
        ends = self.lengths.array.cumsum()[pool.whole(pool.index())]
        cuts = np.repeat(pool.counts.cumsum() << _unit_bits(self.num_positions), pool.sizes)
        pieces: Integers = np.diff(np.minimum(ends, cuts), prepend=0)
        return pieces


def _cut(pool: Pool, lengths: Integers, num_positions: int) -> Pool:
    """The rows of a pool in shards that are equal in weight."""
    # Rows lie one after the other, each as long as it is expected to come often, and the shards are
    # pieces of this line, as long as the numbers of their positions. A row on a cut is in both
    # shards; one without weight is in none. Lengths are whole numbers of a small unit: nothing is
    # rounded.
    has_length = lengths > 0
    kept = None if has_length.all() else np.flatnonzero(has_length)
    ends = np.cumsum(lengths if kept is None else lengths[kept])
    counts = shard_rows(num_positions, pool.num_shards)
    cuts = np.append(firsts_of(counts), num_positions) << _unit_bits(num_positions)
    firsts = np.searchsorted(ends, cuts[:-1], side="right")
    lasts = np.searchsorted(ends, cuts[1:], side="left")
    # A piece of no length has no row.
    sizes = np.where(counts > 0, lasts + 1 - firsts, 0)
    starts, has_rows = firsts_of(sizes), sizes > 0
    runs = Runs(starts[has_rows], (firsts - starts)[has_rows])
    if kept is None:
        return pool.drawing(sizes, counts, runs)
    return pool.drawing(sizes, counts, kept[runs.at(np.arange(int(sizes.sum())))])


def _unit_bits(num_positions: int) -> int:
    """A length of one is 2 to the power of this in units."""
    return _LINE_BITS - num_positions.bit_length()


def _in_units(expected: NDArray[np.float64], num_positions: int) -> Integers:
    """Lengths in units that add up to the line exactly."""
    unit_bits = _unit_bits(num_positions)
    units = np.floor(expected * 2.0**unit_bits).astype(np.int64)
    units[(units == 0) & (expected > 0)] = 1
    # Rounding is made good by the longest row: by far less than 2**-20 of a position.
    units[units.argmax()] += (num_positions << unit_bits) - int(units.sum())
    return units
