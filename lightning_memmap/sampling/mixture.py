"""Several training sets in given shares."""

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as short_repr
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lightning_memmap.errors import Described, check_number
from lightning_memmap.sampling.permutations import order_within, random_bits
from lightning_memmap.sampling.pool import Pool
from lightning_memmap.sampling.rows import (
    Integers,
    JoinedRows,
    Runs,
    WindowedRows,
    firsts_of,
    ranges,
    shard_rows,
)
from lightning_memmap.sampling.sampler import (
    Fields,
    Sampler,
    SamplerFactory,
    checked_positions,
    kept,
)

#: The fractions of its multiples are spread evenly, however many of them follow one another; and
#: as a fraction of 2 ** 64.
_GOLDEN = (5**0.5 - 1) / 2
_TURN = np.uint64(_GOLDEN * 2**64)


@dataclass(eq=False, repr=False)
class Mixture(Described, SamplerFactory):
    """Draws from several training sets in given shares, for ``MemmapDataModule(sampler=...)``.

    In each epoch, a set has exactly its share of the positions, and a row of it comes as often as
    ``num_samples * share / rows of the set`` says, rounded up or down so that this is the mean over
    epochs. All steps have about the same shares, since they are those of the shards. Each shard
    reads its piece of a set on and on, and an epoch goes on where the last one ended: over 60
    epochs, the rows of a set come equally often, up to four.

    Args:
        shares: The share of each set by the name that it has in ``train_dataset``, not negative.
            They need not add up to 1.
        num_samples: Positions of an epoch; by default as many as all sets together have rows.
        by_batch: Whether all rows of a global batch are of one set. The batches of an epoch, as
            many as ``num_samples`` fill, are then shared among the sets exactly, but for rounding,
            and come in random order.

    Raises:
        TypeError: ``shares`` is not a dict of numbers, ``num_samples`` not an integer, or
            ``by_batch`` not a bool.
        ValueError: A share is negative or not finite, all are 0, or ``num_samples`` is below 1.
    """

    shares: dict[str, float]
    num_samples: int | None = None
    by_batch: bool = False

    def __post_init__(self) -> None:
        given = self.shares
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise TypeError(
                f"Mixture: shares={short_repr(given)}: give a dict of shares by the name of the"
                " training set, such as {'a': 0.7, 'b': 0.3}"
            )
        self.shares = {
            n: check_number(f"Mixture: shares[{n!r}]", each) for n, each in given.items()
        }
        for name, share in self.shares.items():
            if not 0 <= share < float("inf"):
                raise ValueError(f"Mixture: shares[{name!r}]={share}: shares are 0 or more")
        if not any(self.shares.values()):
            raise ValueError(f"Mixture: shares={self.shares}: no set has a share")
        self.num_samples = checked_positions(self.num_samples)
        if not isinstance(self.by_batch, bool):
            raise TypeError(f"by_batch={self.by_batch!r}: give True or False")
        self.stores = tuple(self.shares)

    @override
    def make(self, pool: Pool, seed: int, fields: Fields) -> "MixtureSampler":
        """Make the sampler; see `SamplerFactory.make`.

        Raises:
            ValueError: There are other sets than those that have a share, or one with a share has
                no row.
        """
        joined = pool.rows.series if isinstance(pool.rows, WindowedRows) else pool.rows
        if not isinstance(joined, JoinedRows) or {*joined.stores} != {*self.shares}:
            found = joined.stores if isinstance(joined, JoinedRows) else "one set without a name"
            raise ValueError(
                f"{self!r}: the training sets are {found}; give each of them a share, such as"
                " train_dataset={'a': ..., 'b': ...} with sampler=Mixture({'a': 0.7, 'b': 0.3})"
            )
        # The sets lie one after the other in the order of the files.
        edges = np.append(0, np.cumsum(joined.chosen_sizes))
        if isinstance(pool.rows, WindowedRows):
            edges = np.append(pool.rows.begins, pool.rows.num_rows)[edges]
        sizes = np.diff(edges)
        shares = np.array([self.shares[name] for name in joined.stores])
        count = pool.num_rows if self.num_samples is None else self.num_samples
        shares /= shares.max()  # The sum of very large numbers would be infinite.
        shares /= shares.sum()
        batch = pool.global_batch or 0 if self.by_batch else 0
        if self.by_batch and not batch:
            raise ValueError(f"{self!r}: give it a pool with the global_batch")
        # Of batches of one set each, a set has whole ones.
        unit = batch or 1
        num_units = max(1, count // unit)
        counts = [each * unit for each in _rounded(num_units * shares, num_units)]
        for name, share, size, each in zip(joined.stores, shares, sizes, counts, strict=True):
            if share and not size:
                raise ValueError(f"{self!r}: the training set {name!r} has no window")
            if batch and share and not each:
                raise ValueError(
                    f"{self!r}: of the {num_units} batches of an epoch, which have {batch} rows"
                    f" each, none would be of {name!r}: give it a larger share, or more and smaller"
                    " batches, by num_samples and batch_size"
                )
        sets = Sets(tuple(sizes.tolist()), tuple(counts), batch)
        kind = ByBatchSampler if batch else MixtureSampler
        return kind(sets.pool_of(pool), seed, sets=sets)


def _rounded(numbers: NDArray[np.float64], total: int) -> list[int]:
    """Whole numbers next to given ones that add up to a total."""
    found = np.floor(numbers).astype(np.int64)
    largest = np.argsort(found - numbers, kind="stable")
    found[largest[: total - int(found.sum())]] += 1
    counts: list[int] = found.tolist()
    return counts


class _Pieces(NamedTuple):
    """What shards have of sets, shard after shard: int64 of shape (pieces,) each."""

    shard: Integers
    set: Integers
    #: The positions of the set that the shard has, and one past the last one.
    begin: Integers
    end: Integers
    #: The rows of the set from which they are drawn, in the order of the files.
    first: Integers
    last: Integers
    #: The offset of the first row in the shard.
    offset: Integers


@dataclass(frozen=True)
class Sets:
    """The sets of a mixture, and how they are divided into shards by the positions of an epoch."""

    # The positions of an epoch lie on a line, set after set, and are cut into shards; those of
    # batches of one set each are divided set by set. A shard has the piece of a set that its piece
    # of the set's positions is drawn from. A row on a cut is in two shards.

    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    #: Of batches of one set each; 0 where their rows are of any.
    global_batch: int = 0

    @property
    def identity(self) -> dict[str, Any]:
        """What tells these from others, as JSON values."""
        # What differs first is what a checkpoint is refused for.
        found = {"global_batch": self.global_batch} if self.global_batch else {}
        return {**found, "positions of sets": str(self.counts)}

    def _on_line(self, num_shards: int) -> tuple[Integers, Integers]:
        """Which positions of each set a shard has: first and one past the last, (C, sets) each."""
        shards, counts = np.arange(num_shards), np.array(self.counts)
        if not self.global_batch:
            shards = (shards * _GOLDEN % 1).argsort()
            edges = np.append(0, np.cumsum(shard_rows(int(counts.sum()), num_shards)[shards]))
            on_line = np.subtract.outer(edges, firsts_of(counts)).clip(0, counts)
            return on_line[:-1][shards.argsort()], on_line[1:][shards.argsort()]
        begins = self.batch_begins(num_shards)
        num_batches = np.zeros((num_shards, len(counts)), np.int64)
        sets = self.sets_of_batches(begins.argsort(kind="stable"))
        np.add.at(num_batches, (begins, sets), 1)
        rounds, more = divmod(self.global_batch, num_shards)
        # A batch has a row more of the shards that follow the one that it begins at.
        has_more = np.subtract.outer(shards, shards) % num_shards < more
        positions = (rounds + has_more) @ num_batches
        return firsts_of(positions), np.cumsum(positions, axis=0)

    def batch_begins(self, num_shards: int) -> Integers:
        """The shard that each batch of an epoch begins at."""
        numbers = np.arange(sum(self.counts) // self.global_batch)
        return numbers * self.global_batch % num_shards

    def sets_of_batches(self, order: Integers) -> Integers:
        """The set of each batch of an epoch, in an order of them by the shards they begin at."""
        counts = np.array(self.counts) // self.global_batch
        numbers = np.repeat(np.arange(len(counts)), counts)
        within = ranges(np.zeros_like(counts), counts)
        evenly = numbers[np.lexsort((numbers, (within + 0.5) / counts[numbers]))]
        found = np.empty_like(evenly)
        found[order] = evenly
        return found

    def pieces(self, num_shards: int) -> _Pieces:
        """What shards have."""
        begins, ends = self._on_line(num_shards)
        shard, number = np.nonzero(ends > begins)
        begin, end = begins[shard, number], ends[shard, number]
        # Of any size, and so exact. Row r has the positions from r * count / size on.
        sizes, totals = (np.array(each, object)[number] for each in (self.sizes, self.counts))
        first = (begin * sizes // totals).astype(np.int64)
        last = (-(-end * sizes // totals)).astype(np.int64)
        before = firsts_of(last - first)
        offset = before - before[np.searchsorted(shard, shard)]
        return _Pieces(shard, number, begin, end, first, last, offset)

    def pool_of(self, pool: Pool) -> Pool:
        """The shards that have these pieces of the rows of a pool."""
        pieces = self.pieces(pool.num_shards)
        lengths = pieces.last - pieces.first
        sizes = np.bincount(pieces.shard, lengths, pool.num_shards).astype(np.int64)
        begins = firsts_of(lengths)
        shifts = firsts_of(np.array(self.sizes))[pieces.set] + pieces.first - begins
        # Pieces that follow one another in the files are one run.
        is_new = np.diff(shifts, prepend=shifts[0] - 1) != 0
        counts = shard_rows(sum(self.counts), pool.num_shards)
        return pool.drawing(sizes, counts, Runs(begins[is_new], shifts[is_new]))


@dataclass(frozen=True, kw_only=True)
class MixtureSampler(Sampler):
    """Several sets in given shares, each of which is read on and on."""

    # A shard reads its piece of a set round after round, and an epoch goes on where the last one
    # ended. The first and the last row of a piece may be in other shards too: they come as often as
    # points at a distance of one, from an offset on, lie on their part of the line of positions
    # (see weighted.py). So each row of a set comes as often as the positions of the set, divided by
    # its rows, rounded up or down. The offset moves on by the golden ratio from epoch to epoch, so
    # that over several, too, no part has many points more than another.

    sets: Sets

    @kept
    def _pieces(self, _: int) -> tuple[_Pieces, NDArray[np.uint64]]:
        """The pieces of all shards, and a random number for each."""
        pieces = self.sets.pieces(self.num_shards)
        return pieces, random_bits(self.seed, 0, 1).random_raw(len(pieces.set))

    def _of_shards(self, shards: Integers) -> tuple[_Pieces, NDArray[np.uint64]]:
        """The same of some shards, shard after shard."""
        pieces, numbers = self._pieces(0)
        begins, ends = (np.searchsorted(pieces.shard, shards, side) for side in ("left", "right"))
        which = ranges(begins, ends - begins)
        return _Pieces(*(each[which] for each in pieces)), numbers[which]

    @override
    def draws(self, epoch: int, shards: Integers) -> NDArray[Any]:
        (_, number, begin, end, first, last, offset), random = self._of_shards(shards)
        sizes, totals = (np.array(e, object)[number] for e in (self.sets.sizes, self.sets.counts))
        # Point k of a set is at (k + turn) * size, on a line where row r begins at r * count.
        turns = random_bits(self.seed, 0).random_raw(len(self.sets.sizes))[:, None]
        turns = turns + _TURN * np.arange(epoch + 1, dtype=np.uint64)
        before = [np.sort(each) for each in turns[:, :-1]]

        def points_before(row: Integers) -> tuple[Integers, Integers]:
            """Those of this epoch, and of all epochs before it."""
            whole, rest = row * totals // sizes, row * totals % sizes
            part = (rest * 2**64 // sizes).astype(np.uint64)
            found, past = whole + (turns[number, -1] < part), epoch * whole
            for which, each in enumerate(before):
                past[number == which] += each.searchsorted(part[number == which])
            return np.clip(found.astype(np.int64), begin, end), past

        (inner, inner_past), (outer, outer_past) = map(points_before, (first + 1, last - 1))
        edges = np.stack([begin, inner, np.maximum(inner, outer), end], axis=1)
        # The first row of each piece, all that are in no other shard, and the last one.
        counts, one = np.diff(edges).ravel(), np.ones_like(first)
        between = np.maximum(1, last - first - 2)
        rows = np.stack([offset, offset + 1, offset + last - first - 1], axis=1).ravel()
        nums = np.stack([one, between, one], axis=1).ravel()
        starts = np.zeros((len(first), 3), np.int64)
        starts[:, 1] = (random + outer_past - inner_past) % between
        dtype = np.min_scalar_type(self.pool.longest)
        return ranges(*_read_on(rows, nums, starts.ravel(), counts), dtype)


def _read_on(
    rows: Integers, nums: Integers, starts: Integers, counts: Integers
) -> tuple[Integers, Integers]:
    """The runs of several stretches, so many rows of each, read on and on from one of its rows on.

    The first row of each run, and how many rows it has.
    """
    ends = starts + counts
    num_rounds = np.where(counts > 0, -(-ends // nums), 0)
    which = np.repeat(np.arange(len(rows)), num_rounds)
    passed = ranges(np.zeros_like(num_rounds), num_rounds) * nums[which]
    begins = np.maximum(starts[which], passed)
    lengths = np.minimum(ends[which], passed + nums[which]) - begins
    return rows[which] + begins - passed, lengths


@dataclass(frozen=True, kw_only=True)
class ByBatchSampler(MixtureSampler):
    """The same with all rows of a global batch of one set."""

    @kept
    def _batches(self, epoch: int) -> Integers:
        """The set of each batch."""
        begins = self.sets.batch_begins(self.num_shards)
        order = order_within(begins, random_bits(self.seed, epoch, 1))
        return self.sets.sets_of_batches(order)

    @override
    def arrange(self, epoch: int, shard: int, offsets: Integers) -> Integers:
        held, _ = self._of_shards(np.array([shard]))
        of_rows = held.set[np.searchsorted(held.offset, offsets, side="right") - 1]
        positions = np.arange(len(offsets), dtype=np.int64) * self.num_shards + shard
        found = np.empty_like(offsets)
        # The rows of a set come to the positions of its batches, as they are permuted.
        of_positions = self._batches(epoch)[positions // self.sets.global_batch].argsort(
            kind="stable"
        )
        found[of_positions] = offsets[of_rows.argsort(kind="stable")]
        return found
