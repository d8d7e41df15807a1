"""Orders that mix several training sets in exact shares.

The positions of an epoch are laid out on a line, set after set, and cut into shards. A shard holds
the rows that its positions of a set are drawn from. Sets a of 4 rows and b of 2 rows, with 3 of the
6 positions each, in 3 shards, which are laid out in the order 0, 2, 1::

    line        a  a  a  b  b  b
    shards      |--0--|--2--|--1--|
    shard 0     2 positions of a, drawn from the rows 0, 1, 2 of a
    shard 2     1 position of a, from the rows 2, 3 of a, and 1 of b, from row 0 of b
    shard 1     2 positions of b, from the rows 0, 1 of b

Row 2 of a and row 0 of b are cut, so two shards hold them. Each shard reads its rows of a set again
and again, and an epoch continues where the previous one stopped.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as short_repr
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lightning_memmap.errors import ReprAsCall, check_number
from lightning_memmap.integers import (
    Integers,
    Runs,
    bounds_of,
    ceil_div,
    differs_from_previous,
    group_of,
    index_in_group,
    ranges,
    starts_of,
)
from lightning_memmap.sampling.factory import Fields, SamplerFactory, check_num_samples
from lightning_memmap.sampling.permutations import bit_generator, order_within
from lightning_memmap.sampling.pool import Pool
from lightning_memmap.sampling.rows import JoinedRows, Rows, WindowedRows, shard_rows
from lightning_memmap.sampling.sampler import cached_once, cached_per_epoch
from lightning_memmap.sampling.table_sampler import DrawnSampler

#: The fractional parts of its multiples are spread evenly, however many there are.
_GOLDEN_RATIO = (5**0.5 - 1) / 2
#: `_GOLDEN_RATIO` in units of 2**-64.
_GOLDEN_UNITS = np.uint64(_GOLDEN_RATIO * 2**64)


@dataclass(eq=False, repr=False)
class Mixture(ReprAsCall, SamplerFactory):
    """Draws from several training sets in exact shares, for ``MemmapDataModule(sampler=...)``.

    In each epoch, a set fills exactly its share of the positions, and each of its rows is drawn
    ``num_samples * share / sum(shares) / rows of the set`` times, rounded up or down, so that this
    is the mean over epochs. All steps have nearly the same shares. Each shard reads its rows of a
    set again and again, and an epoch continues where the previous one stopped: over 60 epochs, the
    rows of a set are drawn equally often, within 4, unless a `Curriculum` changes the shares.

    Args:
        shares: The share of each set by its name in ``train_dataset``, not negative. They need not
            add up to 1.
        num_samples: Positions of an epoch; by default as many as all sets together have rows.
        by_batch: Draw all rows of a global batch from one set. The batches of an epoch, as many as
            ``num_samples`` fill, are then shared among the sets exactly, except for rounding, and
            their order is random.

    Raises:
        TypeError: ``shares`` is not a dict of numbers, ``num_samples`` not an integer, or
            ``by_batch`` not a bool.
        ValueError: A share is negative or not finite, all are 0, or ``num_samples`` is below 1.
    """

    shares: dict[str, float]
    num_samples: int | None = None
    by_batch: bool = False

    def __post_init__(self) -> None:
        shares = self.shares
        if not isinstance(shares, Mapping) or not all(isinstance(name, str) for name in shares):
            raise TypeError(
                f"Mixture: shares={short_repr(shares)}: pass a dict of shares by the name of the"
                " training set, such as {'a': 0.7, 'b': 0.3}"
            )
        self.shares = {
            name: check_number(f"Mixture: shares[{name!r}]", share)
            for name, share in shares.items()
        }
        for name, share in self.shares.items():
            if not 0 <= share < float("inf"):
                raise ValueError(
                    f"Mixture: shares[{name!r}]={share}: must be finite and not negative"
                )
        if not any(self.shares.values()):
            raise ValueError(f"Mixture: shares={self.shares}: at least one must be above 0")
        self.num_samples = check_num_samples(self.num_samples)
        if not isinstance(self.by_batch, bool):
            raise TypeError(f"Mixture: by_batch={self.by_batch!r}: pass True or False")
        self.training_sets = tuple(self.shares)

    @override
    def make(self, pool: Pool, seed: int, fields: Fields) -> "MixtureSampler":
        """Make the sampler; see `SamplerFactory.make`.

        Raises:
            ValueError: ``shares`` names other training sets, or a set with a share has no
                row.
        """
        names, rows_per_set = self._names_and_rows(pool)
        shares = np.array([self.shares[name] for name in names])
        shares /= shares.max()  # The sum of very large numbers would be infinite.
        shares /= shares.sum()
        # Rows of a global batch, or 0 if batches may mix sets.
        batch = pool.global_batch or 0 if self.by_batch else 0
        if self.by_batch and not batch:
            raise ValueError(f"{self!r}: by_batch=True needs a pool with a global_batch")
        count = pool.num_rows if self.num_samples is None else self.num_samples
        # With by_batch, a set has a whole number of batches.
        unit = batch or 1
        num_units = max(1, count // unit)
        counts = [num * unit for num in _round_to_sum(num_units * shares, num_units)]
        for name, share, num_rows, num in zip(names, shares, rows_per_set, counts, strict=True):
            if share and not num_rows:
                raise ValueError(f"{self!r}: the training set {name!r} has no window")
            if batch and share and not num:
                raise ValueError(
                    f"{self!r}: none of the {num_units} batches of an epoch, of {batch} rows each,"
                    f" would be of {name!r}: increase its share, or the number of batches, with"
                    " num_samples and batch_size"
                )
        sets = Sets(tuple(rows_per_set), tuple(counts), batch)
        sampler_type = ByBatchSampler if batch else MixtureSampler
        return sampler_type(sets.pool_of(pool), seed, sets=sets, num_samples=sum(counts))

    def _names_and_rows(self, pool: Pool) -> tuple[tuple[str, ...], list[int]]:
        """Return the names of the training sets, and their numbers of rows or windows."""
        windows = pool.rows if isinstance(pool.rows, WindowedRows) else None
        joined = check_sets(windows.series if windows is not None else pool.rows, self.shares, self)
        # The sets follow each other in storage order.
        bounds = bounds_of(joined.rows_per_set)
        if windows is not None:
            bounds = np.append(windows.starts, windows.num_rows)[bounds]
        return joined.set_names, np.diff(bounds).tolist()


def check_sets(rows: Rows, shares: Mapping[str, float], maker: SamplerFactory) -> JoinedRows:
    """Check that rows are of the training sets that have shares, and return them."""
    if not isinstance(rows, JoinedRows) or {*rows.set_names} != {*shares}:
        names = rows.set_names if isinstance(rows, JoinedRows) else "one set without a name"
        raise ValueError(
            f"{maker!r}: the training sets are {names}; set a share for each of them, such as"
            " train_dataset={'a': ..., 'b': ...} with the shares {'a': 0.7, 'b': 0.3}"
        )
    return rows


def _round_to_sum(numbers: NDArray[np.float64], total: int) -> list[int]:
    """Round numbers up or down so that they add up to a total."""
    rounded = np.floor(numbers).astype(np.int64)
    by_fraction = np.argsort(rounded - numbers, kind="stable")
    rounded[by_fraction[: total - int(rounded.sum())]] += 1
    integers: list[int] = rounded.tolist()
    return integers


class _Sections(NamedTuple):
    """The positions of a set that a shard holds, and the rows they are drawn from.

    Ordered by shard, then by set: int64 of shape (sections,) each.
    """

    shard: Integers
    set_index: Integers
    #: A half-open range of the set's positions.
    start: Integers
    stop: Integers
    #: A half-open range of the set's rows, in storage order.
    row_start: Integers
    row_stop: Integers
    #: The offset of the first row in the shard.
    offset: Integers


@dataclass(frozen=True)
class Sets:
    """The sets of a mixture, and how the positions of an epoch divide them into shards.

    Args:
        rows_per_set: Rows of each set.
        positions_per_set: Positions of each set in an epoch.
        global_batch: Rows of a global batch if all are of one set, else 0.
    """

    # With by_batch, the positions of each set are divided among the shards separately, by the
    # batches that start at a shard. A row on a cut belongs to two shards.

    rows_per_set: tuple[int, ...]
    positions_per_set: tuple[int, ...]
    global_batch: int = 0

    @property
    def identity(self) -> dict[str, Any]:
        """The values that identify these sets, as JSON values."""
        # Errors show the first difference: the batch size determines the positions.
        batch = {"global_batch": self.global_batch} if self.global_batch else {}
        return {**batch, "positions of sets": str(self.positions_per_set)}

    def _position_bounds(self, num_shards: int) -> tuple[Integers, Integers]:
        """Return which positions of each set a shard holds: starts and stops, (C, sets) each."""
        shards = np.arange(num_shards)
        counts = np.array(self.positions_per_set)
        if not self.global_batch:
            order = (shards * _GOLDEN_RATIO % 1).argsort()
            sizes = shard_rows(int(counts.sum()), num_shards)[order]
            cuts = bounds_of(sizes)
            bounds = np.subtract.outer(cuts, starts_of(counts)).clip(0, counts)
            inverse = order.argsort()
            return bounds[:-1][inverse], bounds[1:][inverse]
        start_shards = self.batch_start_shards(num_shards)
        num_batches = np.zeros((num_shards, len(counts)), np.int64)
        sets = self.sets_of_batches(start_shards.argsort(kind="stable"))
        np.add.at(num_batches, (start_shards, sets), 1)
        # A batch holds an additional row of each of the first shards from its start shard on.
        rounds, num_extra = divmod(self.global_batch, num_shards)
        has_extra = np.subtract.outer(shards, shards) % num_shards < num_extra
        positions = (rounds + has_extra) @ num_batches
        return starts_of(positions), np.cumsum(positions, axis=0)

    def batch_start_shards(self, num_shards: int) -> Integers:
        """Return the shard of the first position of each batch of an epoch."""
        batches = np.arange(sum(self.positions_per_set) // self.global_batch)
        return batches * self.global_batch % num_shards

    def sets_of_batches(self, order: Integers) -> Integers:
        """Assign a set to each batch of an epoch, so that sets are spread evenly in this order.

        Args:
            order: The batches, sorted by the shards they start at.
        """
        counts = np.array(self.positions_per_set) // self.global_batch
        sets = group_of(counts)
        ranks = index_in_group(counts)
        spread = sets[np.lexsort((sets, (ranks + 0.5) / counts[sets]))]
        assigned = np.empty_like(spread)
        assigned[order] = spread
        return assigned

    def sections(self, num_shards: int) -> _Sections:
        """Return what each shard holds of each set."""
        starts, stops = self._position_bounds(num_shards)
        shard, set_index = np.nonzero(stops > starts)
        start = starts[shard, set_index]
        stop = stops[shard, set_index]
        # Python integers do not overflow. Row r covers the positions from r * positions / rows on.
        rows = np.array(self.rows_per_set, object)[set_index]
        positions = np.array(self.positions_per_set, object)[set_index]
        row_start = (start * rows // positions).astype(np.int64)
        row_stop = ceil_div(stop * rows, positions).astype(np.int64)
        num_before = starts_of(row_stop - row_start)
        offset = num_before - num_before[np.searchsorted(shard, shard)]
        return _Sections(shard, set_index, start, stop, row_start, row_stop, offset)

    def pool_of(self, pool: Pool) -> Pool:
        """Return a pool whose shards hold these sections of the rows of a pool."""
        sections = self.sections(pool.num_shards)
        lengths = sections.row_stop - sections.row_start
        sizes = np.bincount(sections.shard, lengths, pool.num_shards).astype(np.int64)
        starts = starts_of(lengths)
        set_starts = starts_of(np.array(self.rows_per_set))[sections.set_index]
        shifts = set_starts + sections.row_start - starts
        # Sections that follow each other in storage order form one run.
        is_new = differs_from_previous(shifts)
        return pool.choose(sizes, Runs(starts[is_new], shifts[is_new]))


@dataclass(frozen=True, kw_only=True)
class MixtureSampler(DrawnSampler):
    """Several sets in exact shares, each of which is read again and again."""

    # The first and the last row of a section may belong to other shards too. They are drawn as
    # often as points at a distance of 1 lie on their part of the line of positions, as in
    # weighted.py. Each row of a set is thus drawn positions / rows times, rounded up or down. The
    # first point moves on by the golden ratio from epoch to epoch, so that over several epochs, no
    # part of the line has many points more than another one of its length.
    # All rows between the first and the last belong to this shard alone, and are read in turn.

    sets: Sets

    @cached_once
    def _sections_and_phases(self) -> tuple[_Sections, NDArray[np.uint64]]:
        """Return the sections of all shards, and random bits of where each starts."""
        sections = self.sets.sections(self.num_shards)
        return sections, bit_generator(self.seed, 0, 1).random_raw(len(sections.set_index))

    def _sections_and_phases_of(self, shards: Integers) -> tuple[_Sections, NDArray[np.uint64]]:
        """Return the sections and phases of some shards, shard after shard."""
        sections, phases = self._sections_and_phases()
        starts = np.searchsorted(sections.shard, shards, "left")
        stops = np.searchsorted(sections.shard, shards, "right")
        index = ranges(starts, stops - starts)
        return _Sections(*(column[index] for column in sections)), phases[index]

    @override
    def draw_shards(self, epoch: int, shards: Integers) -> NDArray[Any]:
        sections, phases = self._sections_and_phases_of(shards)
        _, _, start, stop, row_start, row_stop, offset = sections
        inner, inner_past = self._points_before(sections, row_start + 1, epoch)
        outer, outer_past = self._points_before(sections, row_stop - 1, epoch)
        # Each section in three stretches: its first row, all rows that belong to this shard alone,
        # and its last row.
        cuts = np.stack([start, inner, np.maximum(inner, outer), stop], axis=1)
        num_drawn = np.diff(cuts).ravel()
        num_between = np.maximum(1, row_stop - row_start - 2)
        one = np.ones_like(row_start)
        last_offset = offset + row_stop - row_start - 1
        offsets = np.stack([offset, offset + 1, last_offset], axis=1).ravel()
        sizes = np.stack([one, num_between, one], axis=1).ravel()
        read_from = np.zeros((len(row_start), 3), np.int64)
        read_from[:, 1] = (phases + outer_past - inner_past) % num_between
        runs = _read_in_turn(offsets, sizes, read_from.ravel(), num_drawn)
        return ranges(*runs, np.min_scalar_type(self.pool.longest))

    def _points_before(
        self, sections: _Sections, rows: Integers, epoch: int
    ) -> tuple[Integers, Integers]:
        """Count the points before a row of each section, in this epoch and in all earlier ones."""
        # Point k of a set is at (k + turn) * rows, on a line where row r starts at r * positions.
        set_index = sections.set_index
        rows_per_set = np.array(self.sets.rows_per_set, object)[set_index]
        products = rows * np.array(self.sets.positions_per_set, object)[set_index]
        integer_part = products // rows_per_set
        fraction = (products % rows_per_set * 2**64 // rows_per_set).astype(np.uint64)
        turns, past_turns = self._turns(epoch)
        points = integer_part + (turns[set_index] < fraction)
        past_points = epoch * integer_part
        for index, past in enumerate(past_turns):
            is_of_set = set_index == index
            past_points[is_of_set] += past.searchsorted(fraction[is_of_set])
        return np.clip(points.astype(np.int64), sections.start, sections.stop), past_points

    @cached_per_epoch
    def _turns(self, epoch: int) -> tuple[NDArray[np.uint64], list[NDArray[np.uint64]]]:
        """Return where the points of each set start in an epoch and, sorted, in earlier ones.

        In units of 2**-64: uint64 of shape (sets,), and (epoch,) for each set.
        """
        first = bit_generator(self.seed, 0).random_raw(len(self.sets.rows_per_set))[:, None]
        turns = first + _GOLDEN_UNITS * np.arange(epoch + 1, dtype=np.uint64)
        return turns[:, -1], [np.sort(past) for past in turns[:, :-1]]


def _read_in_turn(
    offsets: Integers, sizes: Integers, read_from: Integers, counts: Integers
) -> tuple[Integers, Integers]:
    """Read stretches of consecutive rows in turn, starting over at their ends.

    5 rows of a stretch with the offsets 10, 11 and 12, read from its row 2 on, have the offsets
    12, 10, 11, 12 and 10, in three runs.

    Args:
        offsets: Offset of the first row of each stretch.
        sizes: Rows of each stretch.
        read_from: The row of each stretch to start with.
        counts: The rows to read of each stretch.

    Returns:
        The first offset and the length of each run.
    """
    stops = read_from + counts
    num_rounds = np.where(counts > 0, ceil_div(stops, sizes), 0)
    stretch = group_of(num_rounds)
    round_starts = index_in_group(num_rounds) * sizes[stretch]
    starts = np.maximum(read_from[stretch], round_starts)
    lengths = np.minimum(stops[stretch], round_starts + sizes[stretch]) - starts
    return offsets[stretch] + starts - round_starts, lengths


@dataclass(frozen=True, kw_only=True)
class ByBatchSampler(MixtureSampler):
    """A mixture in which all rows of a global batch are of one set."""

    @cached_per_epoch
    def _batch_sets(self, epoch: int) -> Integers:
        """Return the set of each batch."""
        start_shards = self.sets.batch_start_shards(self.num_shards)
        order = order_within(start_shards, bit_generator(self.seed, epoch, 1))
        return self.sets.sets_of_batches(order)

    @override
    def arrange(self, epoch: int, shard: int, offsets: Integers) -> Integers:
        sections, _ = self._sections_and_phases_of(np.array([shard]))
        row_sets = sections.set_index[np.searchsorted(sections.offset, offsets, side="right") - 1]
        positions = np.arange(len(offsets), dtype=np.int64) * self.num_shards + shard
        position_sets = self._batch_sets(epoch)[positions // self.sets.global_batch]
        # The permuted rows of a set go to the positions of its batches.
        arranged = np.empty_like(offsets)
        arranged[position_sets.argsort(kind="stable")] = offsets[row_sets.argsort(kind="stable")]
        return arranged
