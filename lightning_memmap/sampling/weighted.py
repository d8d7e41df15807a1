"""Rows that come more or less often than others, by weight."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from typing_extensions import override

from lightning_memmap.errors import Described
from lightning_memmap.sampling.identity import Numbers
from lightning_memmap.sampling.permutations import every, random_bits
from lightning_memmap.sampling.pool import Pool, Runs
from lightning_memmap.sampling.rows import Integers, firsts_of, shard_rows
from lightning_memmap.sampling.sampler import (
    Fields,
    Sampler,
    SamplerFactory,
    check_by_row,
    checked_positions,
    kept,
    one_by_row,
)

#: The part of an epoch's random bits for where its points lie, and the first of those for the
#: orders of rows on the line. Part 0 is for the order of positions.
_POINT, _ORDERS = 1, 2
#: The rows of a shard are divided into so many parts, which are walked through at once.
_LAYERS = 8
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
        weights: One weight for each row of the dataset, or each window of its series, in their
            order, not negative: a tensor, an array or a sequence. Or the name of a field: where it
            has floating-point values, they are the weights. Otherwise they are classes, and all
            classes come equally often. It must not be None in a row to draw from.
        num_samples: Positions of an epoch; by default as many as there are rows.

    Raises:
        TypeError: ``weights`` is neither, or ``num_samples`` is not an integer.
        ValueError: ``num_samples`` is below 1.
    """

    weights: Any
    num_samples: int | None = None

    def __post_init__(self) -> None:
        check_by_row("Weighted: weights", self.weights)
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


class _Line(NamedTuple):
    """The rows of each shard on its piece of the line: whole parts of lengths, and what is left."""

    #: The rows of whole parts, as often as they come in any epoch: of shape (C, positions). Where
    #: there are none, the size of the longest shard.
    whole: NDArray[Any]
    #: What is left of the first row of each shard, and of the last one: of shape (2, C).
    edges: NDArray[np.uint32]
    #: What is left of those in between, twice, shard after shard.
    inner: NDArray[np.uint32]
    #: Where those of each shard begin, and how much room they have, int64 of shape (C,) each.
    begins: Integers
    widths: Integers


@dataclass(frozen=True, kw_only=True)
class WeightedSampler(Sampler):
    """Rows by weight: the points of a grid on the line of the rows, in random order."""

    # Points lie at a distance of one, from a random offset on, which is another in each epoch. A
    # row is drawn once for each point on it: the systematic sampling of Madow, "On the Theory of
    # Systematic Sampling, II", 1949. Before that, the rows of each shard are permuted, so that
    # other rows share an epoch each time; those on the cuts keep their places. Shards of about one
    # size have one random permutation, and count their rows from another one on.
    # The whole part of a length is drawn in any case. What is left of a row has a point where the
    # sum of lengths passes a whole number: in units of 2**-32, where it wraps around. The piece of
    # a shard is as long as a whole number, and so the first row of the next one begins there.

    lengths: Numbers
    version: ClassVar[int] = 2

    @override
    def draws(self, epoch: int, shards: Integers) -> Integers:
        line = self._line(0)
        found: NDArray[Any] = line.whole[every(shards)].copy()
        widths = line.widths[shards]
        for width in np.unique(widths).tolist():
            here = widths == width
            is_left = (found == self.pool.longest) & here[:, None]
            found[is_left] = self._left(epoch, shards[here], width)
        if self.shuffle_window is not None:
            # What a shard lacks comes last.
            found[:, -1][self.pool.counts[shards] < found.shape[1]] = self.pool.longest
            found.sort()
        return found

    def _left(self, epoch: int, shards: Integers, width: int) -> NDArray[Any]:
        """The rows that are drawn by what is left of their lengths, shard after shard."""
        line, num = self._line(0), len(shards)
        bits = random_bits(self.seed, epoch, _POINT).random_raw(1 + self.num_shards)
        point, turns = bits[0].astype(np.uint32), (bits[1 + shards] % np.uint64(width)).astype(int)
        order = self._tables.get(
            f"order of {width}",
            epoch,
            lambda: random_bits(self.seed, epoch, _ORDERS + width).random_raw(width).argsort(),
        )

        def permuted(numbers: NDArray[Any], begins: Integers) -> NDArray[Any]:
            return sliding_window_view(numbers, width)[begins].take(order, axis=1, mode="wrap")

        # They lie column after column: sums of many columns are made at once.
        lengths = permuted(line.inner, line.begins[shards] + turns).reshape(num, _LAYERS, -1)
        first, last = line.edges[:, shards]
        sums = lengths.sum(axis=1, dtype=np.uint32)
        ends = sums.cumsum(axis=1, dtype=np.uint32) - sums + (point + first)[:, None]
        hits = np.empty((num, width + 2), np.bool_)
        layers = hits[:, :width].reshape(lengths.shape)
        for layer in range(_LAYERS):
            ends += lengths[:, layer]
            np.less(ends, lengths[:, layer], out=layers[:, layer])
        hits[:, -2], hits[:, -1] = point + first < first, point < last
        offsets = permuted(np.tile(np.arange(width, dtype=line.whole.dtype), 2) + 1, turns)
        lasts = (self.pool.sizes[shards] - 1).astype(offsets.dtype)
        rows = np.column_stack([offsets, np.zeros_like(lasts), lasts])
        return rows.ravel().take(np.flatnonzero(hits))

    @kept
    def _line(self, _: int) -> _Line:
        pool, unit_bits = self.pool, _unit_bits(self.num_positions)
        ends = self.lengths.array.cumsum()[pool.whole(pool.index())]
        ends = np.minimum(ends, np.repeat(pool.counts.cumsum() << unit_bits, pool.sizes))
        pieces = np.diff(ends >> max(0, unit_bits - 32), prepend=0)
        unit_bits = min(unit_bits, 32)
        shards = np.repeat(np.arange(pool.num_shards), pool.sizes)
        offsets, times = pool.index() - pool.starts[shards], pieces >> unit_bits
        num_whole = np.bincount(shards, times, pool.num_shards).astype(np.int64)
        shape = pool.num_shards, int(pool.counts.max())
        whole = np.full(shape, pool.longest, np.min_scalar_type(pool.longest))
        whole[np.arange(shape[1]) < num_whole[:, None]] = np.repeat(offsets, times)
        whole[pool.counts < shape[1], -1] = 0
        left = (pieces << (32 - unit_bits)).astype(np.uint32)
        # As much room as the largest shard needs, or half of that, and so on, in eighths.
        most = pool.longest >> (np.frexp(pool.longest // np.maximum(1, pool.sizes))[1] - 1)
        widths = -(-8 * pool.sizes // most) * most // 8
        widths = np.maximum(1, -(-(widths - 2) // _LAYERS)) * _LAYERS
        begins = firsts_of(2 * widths)
        is_first, is_last = offsets == 0, offsets == pool.sizes[shards] - 1
        edges = np.zeros((2, pool.num_shards), np.uint32)
        edges[0, shards[is_first]], edges[1, shards[is_last]] = left[is_first], left[is_last]
        inner, between = np.zeros(2 * int(widths.sum()), np.uint32), ~(is_first | is_last)
        at = (begins[shards] + offsets - 1)[between]
        inner[at] = inner[at + widths[shards][between]] = left[between]
        return _Line(whole, edges, inner, begins, widths)


def _cut(pool: Pool, lengths: Integers, num_positions: int) -> Pool:
    """The rows of a pool in shards that are equal in weight."""
    # Rows lie one after the other, each as long as it is expected to come often, and the shards are
    # pieces of this line, as long as the numbers of their positions. A row on a cut is in both
    # shards; one without weight is in none. Lengths are whole numbers of a small unit: nothing is
    # rounded.
    kept = np.flatnonzero(lengths)
    ends = np.cumsum(lengths[kept])
    counts = shard_rows(num_positions, pool.num_shards)
    cuts = np.append(firsts_of(counts), num_positions) << _unit_bits(num_positions)
    firsts = np.searchsorted(ends, cuts[:-1], side="right")
    lasts = np.searchsorted(ends, cuts[1:], side="left")
    # A piece of no length has no row.
    sizes = np.where(counts > 0, lasts + 1 - firsts, 0)
    starts, has_rows = firsts_of(sizes), sizes > 0
    runs = Runs(starts[has_rows], (firsts - starts)[has_rows])
    if len(kept) == len(lengths):
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
