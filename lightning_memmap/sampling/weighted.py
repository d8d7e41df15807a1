"""Rows drawn more or less often, by weight.

Rows are laid out on a line, each as long as its expected number of draws, and drawn by points that
are spaced 1 apart. 7 rows with the weights 2 1 1 1 1 1 1 in 3 shards, for 8 positions::

    row            0       1   2   3   4   5   6        7 rows of length 2 1 1 1 1 1 1
    line           0 . . . 2 . 3 . 4 . 5 . 6 . 7 . 8    8 long
    shards         |-----------|-----------|-------|    3, 3 and 2 positions
    points at .5     x   x   x   x   x   x   x   x
    drawn          0   0   1   2   3   4   5   6

Shard 0 holds the rows 0 and 1, shard 1 the rows 2, 3 and 4, shard 2 the rows 5 and 6. A row that is
cut by a boundary belongs to all shards that it covers. A row of length 2.4 is drawn 2 or 3 times,
depending on the first point.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lightning_memmap.errors import ReprAsCall
from lightning_memmap.integers import Integers, Runs, group_of, ranges, starts_of
from lightning_memmap.sampling.columns import (
    Column,
    ColumnValues,
    ColumnVersion,
    DatasetIdentity,
    EpochColumn,
)
from lightning_memmap.sampling.factory import (
    Fields,
    SamplerFactory,
    check_num_samples,
    check_per_row,
    per_row_array,
)
from lightning_memmap.sampling.identity import FrozenArray
from lightning_memmap.sampling.permutations import bit_generator, order_within
from lightning_memmap.sampling.pool import Pool
from lightning_memmap.sampling.rows import shard_rows
from lightning_memmap.sampling.sampler import cached_once, cached_per_epoch
from lightning_memmap.sampling.table_sampler import DrawnSampler

#: Streams of the random bits: the first point of an epoch and the order of segments, and how
#: shards are divided into segments. Stream 0 is used for the order of positions.
_POINT_BITS = 1
_SEGMENT_BITS = 2
#: The first of the streams that draw the rows of shards by the weights of an epoch.
_DRAW_BITS = 3
#: Approximate number of segments of a shard. Rows of one segment share epochs more or less often
#: than other rows do.
_NUM_SEGMENTS = 48
#: The line of an epoch is shorter than 2 to the power of this, in units.
_LINE_BITS = 62
_MAX_SAMPLES = 2**40


@dataclass(eq=False, repr=False)
class Weighted(ReprAsCall, SamplerFactory):
    """Draws rows by weight, afresh in each epoch, for ``MemmapDataModule(sampler=...)``.

    In each epoch, a row is drawn ``num_samples * weight / sum(weights)`` times, rounded up or down
    at random, so that this is the mean over epochs. Rows of equal weight are drawn equally often,
    within 1, which independent draws would not achieve. Blocks (see ``shuffle_block``) do not
    change which rows an epoch holds.

    Args:
        weights: One non-negative weight for each row of the dataset, or each window of its series,
            in dataset order: a tensor, an array or a sequence. Or the name of a field. Values of a
            floating-point field are the weights. Other values are classes, which are all drawn
            equally often. The field must not be None in a row to draw from. Or
            `lightning_memmap.results.Results`, a column that training made: a row without a value
            has the mean weight of the others. With ``each_epoch=True`` the weights are read again
            before each epoch, and are relative to the row's shard; see docs/results.md.
        num_samples: Positions of an epoch; by default the number of rows.

    Raises:
        TypeError: ``weights`` is of another type, or ``num_samples`` is not an integer.
        ValueError: ``num_samples`` is below 1.
    """

    weights: Any
    num_samples: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.weights, (str, Column)):
            check_per_row("Weighted: weights", self.weights)
        self.num_samples = check_num_samples(self.num_samples)

    @override
    def make(
        self, pool: Pool, seed: int, fields: Fields
    ) -> "WeightedSampler | EpochWeightedSampler":
        """Make the sampler; see `SamplerFactory.make`.

        Raises:
            TypeError: The weights are not numbers.
            ValueError: The number of weights isn't the number of rows; one is negative, not finite
                or None; all are zero; or ``num_samples`` is out of range.
        """
        rows = pool.dataset_rows(pool.indices())
        if isinstance(self.weights, Column) and self.weights.each_epoch:
            return EpochWeightedSampler(
                pool,
                seed,
                column=EpochColumn(self.weights, DatasetIdentity.of(fields)),
                num_samples=self.num_samples,
            )
        weights, results = self._weights(rows, fields)
        if not weights.any():
            raise ValueError(
                f"Weighted: all weights of the {len(weights)} training rows are 0: pass a positive"
                " weight for at least one of them, or choose other rows with subset"
            )
        count = pool.num_rows if self.num_samples is None else self.num_samples
        if count > _MAX_SAMPLES:
            raise ValueError(f"num_samples={count}: must be at most 2**40")
        lengths = _in_units(weights * (count / weights.sum()), count)
        pool = _cut(pool, lengths, count)
        return WeightedSampler(
            pool, seed, lengths=FrozenArray(lengths), results=results, num_samples=count
        )

    def _weights(
        self, rows: Integers, fields: Fields
    ) -> tuple[NDArray[np.float64], ColumnVersion | None]:
        """Return the weights of rows, scaled so that the largest is 1."""
        results = None
        if isinstance(self.weights, Column):
            column = self.weights.read(DatasetIdentity.of(fields))
            results = column.version
            values = _column_weights(self.weights, column, rows)
        elif isinstance(self.weights, str):
            values = fields.values(self.weights, rows)
            if not np.issubdtype(values.dtype, np.floating):
                values = _class_weights(values)
            elif np.isin(values, (0, 1)).all() and (num_zeros := int((values == 0).sum())):
                warnings.warn(
                    f"Weighted({self.weights!r}): the field is floating-point, so its values are"
                    f" weights, and all are 0 or 1: {num_zeros} of {len(values)} rows are never"
                    " drawn. Store classes as integers or bools",
                    stacklevel=2,
                )
        else:
            all_weights = per_row_array("Weighted: weights", self.weights, fields.num_rows)
            if all_weights.dtype.kind not in "buif":
                raise TypeError(f"Weighted: weights of {all_weights.dtype}: pass numbers")
            values = all_weights[rows]
        _check_weights(values, rows)
        return _scaled(values), results


def _class_weights(classes: NDArray[Any]) -> NDArray[np.float64]:
    """Return weights by which all classes are drawn equally often."""
    _, class_index, counts = np.unique(classes, return_inverse=True, return_counts=True)
    weights: NDArray[np.float64] = 1 / counts[class_index]
    return weights


def _column_weights(column: Column, values: ColumnValues, rows: Integers) -> NDArray[np.float64]:
    """Return the weights of dataset rows by a column; the mean of all if a row has no value."""
    has_value = values.has_value[rows]
    weights = np.ones(len(rows), np.float64)
    if has_value.any():
        column_values = values.values[rows[has_value]]
        if column_values.dtype.kind != "f":
            column_values = _class_weights(column_values)
        _check_weights(column_values, rows[has_value], f"Weighted({column!r}): {column.remedy}")
        weights[has_value] = column_values
        weights[~has_value] = column_values.mean(dtype=np.float64)
    return weights


def _scaled(values: NDArray[Any]) -> NDArray[np.float64]:
    """Scale weights so that the largest is 1."""
    weights: NDArray[np.float64] = values.astype(np.float64)
    weights /= max(weights.max(), np.finfo(np.float64).tiny)
    return weights


def _check_weights(
    weights: NDArray[Any], rows: Integers, remedy: str = "Set it to 0 to leave the row out"
) -> None:
    """Check the weights of dataset rows."""
    wrong = np.flatnonzero(~((weights >= 0) & np.isfinite(weights)))
    if len(wrong):
        raise ValueError(
            f"Weighted: row {rows[wrong[0]]} has the weight {weights[wrong[0]]}: weights must be"
            f" finite and not negative. {remedy}"
        )


class _Line(NamedTuple):
    """The rows of all shards on the line, in segments of neighbouring rows."""

    #: By position, shard after shard: the offset of a row drawn for the integer part of its length,
    #: and which positions are left for fractional parts.
    integer_draws: NDArray[Any]
    is_fractional: NDArray[np.bool_]
    #: By index in the pool: the row's offset in its shard, the fractional part of its length, the
    #: sum of these parts up to its end, and its segment.
    offsets: NDArray[Any]
    fractions: NDArray[np.uint32]
    stops: NDArray[np.uint32]
    segments: NDArray[Any]
    #: By segment: the sum before it, and the group of segments that it is exchanged with.
    segment_starts: NDArray[np.uint32]
    segment_groups: Integers


@dataclass(frozen=True, kw_only=True)
class WeightedSampler(DrawnSampler):
    """Rows by weight: the points of a grid on the line of the rows, in random order."""

    # Points are spaced 1 apart, from an offset on that is random in each epoch. A row is drawn
    # once per point: the systematic sampling of Madow, "On the Theory of Systematic Sampling, II",
    # 1949. Before that, the segments of each shard are permuted, so that other rows share an epoch
    # each time. Rows that are cut, and so belong to several shards, keep their places at its ends.
    # The integer part of a length is always drawn. The fractional part is drawn if the sum of
    # lengths passes an integer within it. In units of 2**-32, an integer is where the sum wraps
    # around. Shards are integers long, so one sum serves all of them.

    lengths: FrozenArray
    #: The version of the column that the lengths come from, if they come from one.
    results: ColumnVersion | None = None
    version: ClassVar[int] = 3

    @override
    def draw_shards(self, epoch: int, shards: Integers) -> NDArray[Any]:
        line = self._line()
        counts = self.positions_per_shard
        rows = _concatenated(self.pool.starts[shards], self.pool.sizes[shards])
        shifts = self._segment_shifts(epoch).take(line.segments[rows], mode="wrap")
        hits = np.flatnonzero(line.stops[rows] + shifts < line.fractions[rows])
        positions = _concatenated(starts_of(counts)[shards], counts[shards])
        drawn: NDArray[Any] = line.integer_draws[positions].copy()
        drawn[line.is_fractional[positions]] = line.offsets[rows].take(hits)
        if self.shuffle_block is not None:
            for shard_draws in np.split(drawn, counts[shards].cumsum()):
                shard_draws.sort()
        return drawn

    @cached_per_epoch
    def _segment_shifts(self, epoch: int) -> NDArray[np.uint32]:
        """Return how far each segment is moved from its place in file order."""
        line = self._line()
        bits = bit_generator(self.seed, epoch, _POINT_BITS)
        first_point = bits.random_raw(1).astype(np.uint32)
        order = order_within(line.segment_groups, bits)
        sizes = np.diff(line.segment_starts, append=np.uint32(0))[order]
        starts = np.empty_like(sizes)
        starts[order] = sizes.cumsum(dtype=np.uint32) - sizes + first_point
        return starts - line.segment_starts

    @cached_once
    def _line(self) -> _Line:
        """Lay out the rows of all shards, and divide them into segments."""
        pool = self.pool
        unit_bits = _unit_bits(self.num_positions)
        shards = group_of(pool.sizes)
        rows = pool.base_index(pool.indices())
        offsets = pool.indices() - pool.starts[shards]
        # A row that is cut ends with its first shard, and starts with the next one.
        stops = self.lengths.array.cumsum()[rows]
        stops = np.minimum(stops, (self.positions_per_shard.cumsum() << unit_bits)[shards])
        lengths = np.diff(stops >> max(0, unit_bits - 32), prepend=0)
        unit_bits = min(unit_bits, 32)
        integer_parts = lengths >> unit_bits
        fractions = (lengths << (32 - unit_bits)).astype(np.uint32)
        stops = fractions.cumsum(dtype=np.uint32)

        counts = np.bincount(shards, integer_parts, pool.num_shards).astype(np.int64)
        is_fractional = np.ones(self.num_positions, np.bool_)
        is_fractional[ranges(starts_of(self.positions_per_shard), counts)] = False
        integer_draws = np.zeros(self.num_positions, np.min_scalar_type(pool.longest))
        integer_draws[~is_fractional] = np.repeat(offsets, integer_parts)

        is_repeated = np.diff(rows, prepend=-1) == 0
        is_cut = is_repeated | np.append(is_repeated[1:], False)
        # Segments of many sizes: the sums of segments of one size might all be integers.
        keys = bit_generator(self.seed, 0, _SEGMENT_BITS).random_raw(len(shards))
        mean_sizes = np.maximum(1, pool.sizes // _NUM_SEGMENTS).astype(np.uint64)
        is_first = keys % mean_sizes[shards] == 0
        # A cut row forms a segment by itself.
        is_first |= (offsets == 0) | is_cut | np.append(False, is_cut[:-1])
        segments = is_first.cumsum() - 1
        # Within a shard, cut rows at its start and its end are groups by themselves.
        groups = 3 * shards + np.where(is_cut, 2 * (offsets > 0), 1)
        return _Line(
            integer_draws,
            is_fractional,
            offsets.astype(integer_draws.dtype),
            fractions,
            stops,
            segments.astype(np.min_scalar_type(len(segments))),
            (stops - fractions)[is_first],
            groups[is_first],
        )


@dataclass(frozen=True, kw_only=True)
class EpochWeightedSampler(DrawnSampler):
    """Rows by weights that are read from a column before each epoch.

    A shard of three rows and 4 positions, with the weights 2, 1 and 1 and a first point at .5::

        rows in random order   1       0           2
        line                   0 . . . 1 . . . . . 3 . . . 4
        points                   x       x   x       x
        drawn                  1       0   0       2
    """

    # Rows stay in their shards, and shards keep their numbers of positions, so that rows need not
    # move between devices. A weight therefore counts relative to the sum of its shard.

    column: EpochColumn

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.positions_per_shard[self.pool.sizes == 0] > 0).any():
            raise ValueError(
                f"Weighted: weights={self.column.column!r}: {self.pool.num_rows} rows in"
                f" {self.num_shards} shards, some of which are empty: use fewer shards, such as"
                f" num_shards={max(1, self.pool.num_rows // 2)}"
            )

    @property
    @override
    def epoch_columns(self) -> Sequence[Column]:
        return (self.column.column,)

    @override
    def results_in(self, epoch: int) -> dict[str, Any]:
        version = self._weights(epoch)[1]
        return {} if version is None else version.identity

    @cached_per_epoch
    def _weights(self, epoch: int) -> tuple[NDArray[np.float64], ColumnVersion | None]:
        """Return the weights of all rows of the pool. There are no results before epoch 0."""
        rows = self.pool.dataset_rows(self.pool.indices())
        if epoch == 0:
            return np.ones(len(rows)), None
        column = self.column.read_before(epoch)
        values = _column_weights(self.column.column, column, rows)
        return _scaled(values), column.version

    @override
    def draw(self, epoch: int, shard: int) -> Integers:
        start = int(self.pool.starts[shard])
        size = int(self.pool.sizes[shard])
        count = int(self.positions_per_shard[shard])
        if not count:
            return np.empty(0, np.int64)
        weights = self._weights(epoch)[0][start : start + size]
        if not weights.any():
            weights = np.ones(size)
        bits = bit_generator(self.seed, epoch, _DRAW_BITS + shard)
        order = order_within(np.zeros(size, np.int64), bits)
        stops = weights[order].cumsum()
        first_point = int(bits.random_raw(1)[0]) / 2**64
        points = (np.arange(count) + first_point) * (stops[-1] / count)
        # A rounded point may be at the end of the line.
        last = int(np.flatnonzero(weights[order])[-1])
        drawn: Integers = order[np.minimum(np.searchsorted(stops, points, side="right"), last)]
        drawn.sort()
        return drawn


def _concatenated(starts: Integers, counts: Integers) -> Integers | slice:
    """Concatenate ranges of integers: as a slice if each starts where the last one stops."""
    if np.array_equal(starts[1:], (starts + counts)[:-1]):
        return slice(int(starts[0]), int(starts[-1] + counts[-1]))
    return ranges(starts, counts)


def _cut(pool: Pool, lengths: Integers, num_samples: int) -> Pool:
    """Cut the line of rows into shards, each as long as the number of its positions."""
    # A row on a cut belongs to all shards it covers, and a row without weight to none. Lengths are
    # integers of a small unit, so nothing is rounded.
    weighted = np.flatnonzero(lengths)
    stops = np.cumsum(lengths[weighted])
    counts = shard_rows(num_samples, pool.num_shards)
    cuts = np.append(starts_of(counts), num_samples) << _unit_bits(num_samples)
    firsts = np.searchsorted(stops, cuts[:-1], side="right")
    lasts = np.searchsorted(stops, cuts[1:], side="left")
    # A shard without a position has no row.
    sizes = np.where(counts > 0, lasts + 1 - firsts, 0)
    runs = Runs.of_ranges(firsts, sizes)
    if len(weighted) == len(lengths):
        return pool.choose(sizes, runs)
    return pool.choose(sizes, weighted[runs.at(np.arange(int(sizes.sum())))])


def _unit_bits(num_samples: int) -> int:
    """Return ``k`` such that a length of 1 is ``2**k`` units."""
    return _LINE_BITS - num_samples.bit_length()


def _in_units(expected: NDArray[np.float64], num_samples: int) -> Integers:
    """Convert lengths to units, and make them add up to the line exactly."""
    unit_bits = _unit_bits(num_samples)
    units = np.floor(expected * 2.0**unit_bits).astype(np.int64)
    units[(units == 0) & (expected > 0)] = 1
    # The longest row makes up for rounding, less than a unit per row.
    units[units.argmax()] += (num_samples << unit_bits) - int(units.sum())
    return units
