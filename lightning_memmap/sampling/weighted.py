"""Rows that come more or less often than others, by weight."""

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lightning_memmap.errors import Described
from lightning_memmap.sampling.identity import Numbers
from lightning_memmap.sampling.permutations import order_within, random_bits
from lightning_memmap.sampling.pool import Pool
from lightning_memmap.sampling.rows import Integers, Runs, firsts_of, ranges, shard_rows
from lightning_memmap.sampling.sampler import (
    Fields,
    Sampler,
    SamplerFactory,
    check_by_row,
    checked_positions,
    kept,
    one_by_row,
)

#: Parts of the random bits: where the points of an epoch lie and the order on the line, and how the
#: line is divided. Part 0 is for the order of positions.
_POINT, _PARTS = 1, 2
#: A shard has about so many parts. Rows of one part share an epoch more or less often than others.
_NUM_PARTS = 48
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
            elif np.isin(found, (0, 1)).all() and (num_zeros := int((found == 0).sum())):
                warnings.warn(
                    f"Weighted({self.weights!r}): the field has floating-point values, which are"
                    f" weights, and has 0 or 1 alone: {num_zeros} of {len(found)} rows never come;"
                    " store classes as integers or bools",
                    stacklevel=2,
                )
        else:
            given = one_by_row("Weighted: weights", self.weights, fields.num_rows)
            if given.dtype.kind not in "buif":
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
    """The rows of shards on the line, shard after shard, in parts that keep together."""

    #: By position: the rows that whole parts of lengths draw, and where others go.
    whole: NDArray[Any]
    is_left: NDArray[np.bool_]
    #: By row: its offset in the shard, what is left of its length, the sum of this up to it, and
    #: its part.
    offsets: NDArray[Any]
    left: NDArray[np.uint32]
    ends: NDArray[np.uint32]
    parts: NDArray[Any]
    #: By part: the sum before it, and which parts it is exchanged with.
    befores: NDArray[np.uint32]
    groups: Integers


@dataclass(frozen=True, kw_only=True)
class WeightedSampler(Sampler):
    """Rows by weight: the points of a grid on the line of the rows, in random order."""

    # Points lie at a distance of one, from a random offset on, which is another in each epoch. A
    # row is drawn once for each point on it: the systematic sampling of Madow, "On the Theory of
    # Systematic Sampling, II", 1949. Before that, the parts of each shard, some neighbouring rows
    # each, are permuted, so that other rows share an epoch each time; rows that lie on a cut, and
    # so are in two shards, keep their places.
    # The whole part of a length is drawn in any case. What is left of it has a point where the sum
    # of lengths passes a whole number: in units of 2**-32, where it wraps around. A shard is as
    # long as a whole number, and so one sum serves all of them.

    lengths: Numbers
    version: ClassVar[int] = 3

    @override
    def draws(self, epoch: int, shards: Integers) -> NDArray[Any]:
        line, counts = self._line(0), self.pool.counts
        rows = _together(self.pool.starts[shards], self.pool.sizes[shards])
        ends = line.ends[rows] + self._shifts(epoch).take(line.parts[rows], mode="wrap")
        hits = np.flatnonzero(ends < line.left[rows])
        positions = _together(firsts_of(counts)[shards], counts[shards])
        found: NDArray[Any] = line.whole[positions].copy()
        found[line.is_left[positions]] = line.offsets[rows].take(hits)
        if self.shuffle_window is not None:
            for each in np.split(found, counts[shards].cumsum()):
                each.sort()
        return found

    @kept
    def _shifts(self, epoch: int) -> NDArray[np.uint32]:
        """How far each part is from where it lies in the order of the files."""
        line, bits = self._line(0), random_bits(self.seed, epoch, _POINT)
        point = bits.random_raw(1).astype(np.uint32)
        order = order_within(line.groups, bits)
        sums = np.diff(line.befores, append=np.uint32(0))[order]
        begins = np.empty_like(sums)
        begins[order] = sums.cumsum(dtype=np.uint32) - sums + point
        return begins - line.befores

    @kept
    def _line(self, _: int) -> _Line:
        pool, unit_bits = self.pool, _unit_bits(self.num_positions)
        shards = np.repeat(np.arange(pool.num_shards), pool.sizes)
        rows, offsets = pool.whole(pool.index()), pool.index() - pool.starts[shards]
        ends = self.lengths.array.cumsum()[rows]
        ends = np.minimum(ends, (pool.counts.cumsum() << unit_bits)[shards])
        pieces = np.diff(ends >> max(0, unit_bits - 32), prepend=0)
        unit_bits = min(unit_bits, 32)
        num_whole = pieces >> unit_bits
        left = (pieces << (32 - unit_bits)).astype(np.uint32)
        ends = left.cumsum(dtype=np.uint32)
        counts = np.bincount(shards, num_whole, pool.num_shards).astype(np.int64)
        is_left = np.ones(self.num_positions, np.bool_)
        is_left[ranges(firsts_of(pool.counts), counts)] = False
        whole = np.zeros(self.num_positions, np.min_scalar_type(pool.longest))
        whole[~is_left] = np.repeat(offsets, num_whole)
        is_again = np.diff(rows, prepend=-1) == 0
        is_shared = is_again | np.append(is_again[1:], False)
        # Of many sizes: the sums of parts of one size might all be whole numbers.
        numbers = random_bits(self.seed, 0, _PARTS).random_raw(len(shards))
        is_cut = numbers % np.maximum(1, pool.sizes // _NUM_PARTS).astype(np.uint64)[shards] == 0
        # What follows a shared row, and a shared row at the end, begin parts of their own.
        is_cut |= (offsets == 0) | is_shared | np.append(False, is_shared[:-1])
        parts = is_cut.cumsum() - 1
        groups = 3 * shards + np.where(is_shared, 2 * (offsets > 0), 1)
        return _Line(
            whole,
            is_left,
            offsets.astype(whole.dtype),
            left,
            ends,
            parts.astype(np.min_scalar_type(len(parts))),
            (ends - left)[is_cut],
            groups[is_cut],
        )


def _together(firsts: Integers, counts: Integers) -> Integers | slice:
    """Runs of consecutive numbers: as a slice where they follow one another."""
    if np.array_equal(firsts[1:], (firsts + counts)[:-1]):
        return slice(int(firsts[0]), int(firsts[-1] + counts[-1]))
    return ranges(firsts, counts)


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
