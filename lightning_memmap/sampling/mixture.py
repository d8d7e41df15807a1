"""Several training sets in given shares."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from reprlib import repr as short_repr
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lightning_memmap.errors import call_text, check_integer, check_number
from lightning_memmap.sampling.factory import Fields, SamplerFactory
from lightning_memmap.sampling.permutations import random_bits
from lightning_memmap.sampling.pool import Pool, Runs
from lightning_memmap.sampling.rows import JoinedRows, WindowedRows
from lightning_memmap.sampling.sampler import DrawnSampler
from lightning_memmap.sampling.shards import Integers, firsts_of, shard_rows

#: Where the points of a set lie is one of so many fractions of their distance.
_FRACTIONS = 2**32
#: The fractions of its multiples are spread evenly, however many of them follow one another.
_GOLDEN = (5**0.5 - 1) / 2


class Mixture(SamplerFactory):
    """Draws from several training sets in given shares, for ``MemmapDataModule(sampler=...)``.

    In each epoch, a set has exactly its share of the positions, and a row of it comes as often as
    ``num_samples * share / rows of the set`` says, rounded up or down so that this is the mean over
    epochs. All steps have about the same shares, since they are those of the shards. Each shard
    reads its piece of a set on and on, and an epoch goes on where the last one ended.

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

    def __init__(
        self, shares: dict[str, float], num_samples: int | None = None, by_batch: bool = False
    ) -> None:
        if not isinstance(shares, Mapping) or not all(isinstance(name, str) for name in shares):
            raise TypeError(
                f"Mixture: shares={short_repr(shares)}: give a dict of shares by the name of the"
                " training set, such as {'a': 0.7, 'b': 0.3}"
            )
        shares = {
            name: check_number(f"Mixture: shares[{name!r}]", share)
            for name, share in shares.items()
        }
        for name, share in shares.items():
            if not 0 <= share < float("inf"):
                raise ValueError(f"Mixture: shares[{name!r}]={share}: shares are 0 or more")
        if not any(shares.values()):
            raise ValueError(f"Mixture: shares={shares}: no set has a share")
        if num_samples is not None:
            reason = "at least 1 position of an epoch"
            num_samples = check_integer("num_samples", num_samples, 1, reason)
        if not isinstance(by_batch, bool):
            raise TypeError(f"by_batch={by_batch!r}: give True or False")
        self.shares, self.num_samples, self.by_batch = shares, num_samples, by_batch
        self.stores = tuple(shares)

    @override
    def __repr__(self) -> str:
        counts = {"shares": self.shares, "num_samples": self.num_samples}
        return call_text("Mixture", **counts, by_batch=self.by_batch or None)

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
            edges = np.append(0, pool.rows.ends)[edges]
        sizes = np.diff(edges)
        shares = np.array([self.shares[name] for name in joined.stores])
        if empty := [
            name
            for name, size, share in zip(joined.stores, sizes, shares, strict=True)
            if share and not size
        ]:
            raise ValueError(f"{self!r}: the training set {empty[0]!r} has no window")
        count = pool.num_rows if self.num_samples is None else self.num_samples
        shares /= shares.max()  # The sum of very large numbers would be infinite.
        shares /= shares.sum()
        batch = pool.global_batch if self.by_batch else None
        if batch is None and self.by_batch:
            raise ValueError(f"{self!r}: give it a pool with the global_batch")
        # Of batches of one set each, a set has whole ones.
        unit = batch or 1
        num_units = max(1, count // unit)
        counts = [each * unit for each in _rounded(num_units * shares, num_units)]
        for name, share, each in zip(joined.stores, shares, counts, strict=True):
            if batch is not None and share and not each:
                raise ValueError(
                    f"{self!r}: of the {num_units} batches of an epoch, which have {batch} rows"
                    f" each, none would be of {name!r}: give it a larger share, or more and smaller"
                    " batches, by num_samples and batch_size"
                )
        sets = Sets(tuple(sizes.tolist()), tuple(counts), batch)
        return MixtureSampler(sets.pool_of(pool), seed, sets=sets)


def _rounded(numbers: NDArray[np.float64], total: int) -> list[int]:
    """Whole numbers next to given ones that add up to a total."""
    found = np.floor(numbers).astype(np.int64)
    largest = np.argsort(found - numbers, kind="stable")
    found[largest[: total - int(found.sum())]] += 1
    counts: list[int] = found.tolist()
    return counts


class _Piece(NamedTuple):
    """What a shard has of a set."""

    shard: int
    set: int
    #: Those of the set that the shard has.
    positions: range
    #: The rows of the set, in the order of the files, from which they are drawn.
    rows: range


class _Stretches(NamedTuple):
    """Rows of a set that follow one another in a shard, which are read round after round."""

    shard: Integers
    set: Integers
    #: The offset of the first row in the shard, how many rows there are, and where epoch 0 begins.
    first: Integers
    num: Integers
    start: Integers
    #: How far an epoch reads on: a whole number, and a part of the size of the set.
    whole: Integers
    part: Integers
    #: The first position of the set in the shard, and one past its last one.
    begin: Integers
    end: Integers
    #: The positions before the end of the stretch, where points lie not further than this one.
    upto: Integers
    point: Integers


@dataclass(frozen=True)
class Sets:
    """The sets of a mixture, and how they are divided into shards by the positions of an epoch."""

    # The positions of an epoch lie on a line, set after set, and are cut into shards; those of
    # batches of one set each are divided set by set. A shard has the piece of a set that its piece
    # of the set's positions is drawn from. A row on a cut is in two shards.

    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    global_batch: int | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """What tells these from others, as JSON values."""
        # What differs first is what a checkpoint is refused for.
        found = {} if self.global_batch is None else {"global_batch": self.global_batch}
        return {**found, "positions of sets": str(self.counts)}

    def shard_counts(self, num_shards: int) -> Integers:
        """The positions that each shard has of each set, int64 of shape (C, sets)."""
        total, ends = sum(self.counts), np.cumsum(self.counts)
        if self.global_batch is None:
            order = self.shards_on_line(num_shards)
            lengths = shard_rows(total, num_shards)[order]
            lasts = np.cumsum(lengths)[:, None]
            firsts = lasts - lengths[:, None]
            overlaps: Integers = np.minimum(lasts, ends) - np.maximum(firsts, ends - self.counts)
            return np.maximum(overlaps, 0)[order.argsort()]
        found = np.zeros((num_shards, len(self.counts)), np.int64)
        begins = self.batch_begins(num_shards)
        sets = self.sets_of_batches(begins)
        rounds, more = divmod(self.global_batch, num_shards)
        for begin in np.unique(begins):
            # A batch has a row more of the shards that follow the one that it begins at.
            of_sets = np.bincount(sets[begins == begin], minlength=len(ends))
            has_more = (np.arange(num_shards) - begin) % num_shards < more
            found += (rounds + has_more)[:, None] * of_sets
        return found

    def shards_on_line(self, num_shards: int) -> Integers:
        """The shards in the order of their pieces of the line."""
        shards = np.arange(num_shards)
        return shards if self.global_batch is not None else (shards * _GOLDEN % 1).argsort()

    def batch_begins(self, num_shards: int) -> Integers:
        """The shard that each batch of an epoch begins at."""
        assert self.global_batch is not None
        numbers = np.arange(sum(self.counts) // self.global_batch)
        return numbers * self.global_batch % num_shards

    def sets_of_batches(self, begins: Integers, keys: NDArray[Any] | None = None) -> Integers:
        """The set of each batch of an epoch."""
        assert self.global_batch is not None
        counts = np.array(self.counts) // self.global_batch
        numbers = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(numbers)) - np.repeat(np.cumsum(counts) - counts, counts)
        evenly = numbers[np.lexsort((numbers, (within + 0.5) / counts[numbers]))]
        found = np.empty_like(evenly)
        found[np.lexsort((begins,) if keys is None else (keys, begins))] = evenly
        return found

    def pieces(self, num_shards: int) -> list[_Piece]:
        """What shards have, shard after shard, and set after set."""
        shard_counts = self.shard_counts(num_shards)
        order = self.shards_on_line(num_shards)
        firsts = np.cumsum(shard_counts[order], axis=0)[order.argsort()] - shard_counts
        pieces = []
        for shard, number in np.argwhere(shard_counts).tolist():
            size, count = self.sizes[number], self.counts[number]
            first = int(firsts[shard, number])
            positions = range(first, first + int(shard_counts[shard, number]))
            # Row r has the positions from r * count / size on.
            rows = range(positions.start * size // count, -(-positions.stop * size // count))
            pieces.append(_Piece(shard, number, positions, rows))
        return pieces

    def pool_of(self, pool: Pool) -> Pool:
        """The shards that have these pieces of the rows of a pool."""
        pieces, firsts = self.pieces(pool.num_shards), firsts_of(np.array(self.sizes, np.int64))
        lengths = np.array([len(piece.rows) for piece in pieces], np.int64)
        homes = [piece.shard for piece in pieces]
        sizes = np.bincount(homes, lengths, pool.num_shards).astype(np.int64)
        begins = firsts_of(lengths)
        shifts = np.array([firsts[p.set] + p.rows.start for p in pieces], np.int64) - begins
        # Pieces that follow one another in the files are one run.
        is_new = np.diff(shifts, prepend=shifts[0] - 1) != 0
        counts = shard_rows(sum(self.counts), pool.num_shards)
        return pool.drawing(sizes, counts, Runs(begins[is_new], shifts[is_new]))


@dataclass(frozen=True, kw_only=True)
class MixtureSampler(DrawnSampler):
    """Several sets in given shares, each of which is read on and on."""

    # A shard reads its piece of a set round after round, and an epoch goes on where the last one
    # ended. A row on a cut comes in both shards: as often as points at a distance of one, from a
    # random offset on, lie on its part of the line of positions (see weighted.py). So each row of a
    # set comes as often as the positions of the set, divided by its rows, rounded up or down.

    sets: Sets

    def _stretches(self) -> Integers:
        """The stretches of all shards, as `_Stretches`: int64 of shape (columns, stretches)."""
        pieces, found = self.sets.pieces(self.num_shards), list[tuple[int, ...]]()
        ends = [0] * self.num_shards
        # Where a piece begins is random, and the same in each epoch.
        begins = random_bits(self.seed, 0, 1).random_raw(len(pieces)).tolist()
        for (shard, number, positions, rows), begin in zip(pieces, begins, strict=True):
            size, count = self.sets.sizes[number], self.sets.counts[number]
            # The first and the last row by themselves: they may be in other shards too.
            inner = {min(rows.start + 1, rows.stop), max(rows.stop - 1, rows.start)}
            for row, end in pairwise(sorted({rows.start, *inner, rows.stop})):
                num, first = end - row, ends[shard] + row - rows.start
                # Point p of the set is before the end of row r at p < r * count / size.
                upto, part = divmod(end * count, size)
                point = (part * _FRACTIONS - 1) // size
                if end == rows.stop:
                    upto, point = positions.stop, -1
                edges = positions.start, positions.stop, upto, point
                each = divmod(num * count, size)
                found.append((shard, number, first, num, begin % num, *each, *edges))
            ends[shard] += len(rows)
        stretches: Integers = np.array(found, np.int64).T
        return stretches

    def _of_shards(self, shards: Integers) -> "_Stretches":
        """The stretches of some shards, shard after shard."""
        with self._tables.lock:
            found = self._tables.get("stretches", 0, self._stretches)
        begins, ends = (np.searchsorted(found[0], shards, side) for side in ("left", "right"))
        which = [np.arange(*edges) for edges in zip(begins, ends, strict=True)]
        return _Stretches(*found[:, np.concatenate(which)])

    def _points(self, epoch: int) -> Integers:
        """Where the points of each set lie."""
        raw = random_bits(self.seed, epoch).random_raw(len(self.sets.counts))
        points: Integers = (raw % np.uint64(_FRACTIONS)).astype(np.int64)
        return points

    @override
    def draws(self, epoch: int, shards: Integers) -> Integers:
        found, points = self._of_shards(shards), self._points(epoch)
        ends = found.upto + (points[found.set] <= found.point)
        ends = np.clip(ends, found.begin, found.end)
        is_first = (np.diff(found.set, prepend=-1) != 0) | (np.diff(found.shard, prepend=-1) != 0)
        counts = ends - np.where(is_first, found.begin, np.roll(ends, 1))
        # Round after round over the rows; the epochs before had so many.
        sizes = np.array(self.sets.sizes)[found.set]
        before = epoch * found.whole + epoch * found.part // sizes
        starts = (found.start + before) % found.num
        rounds = np.where(counts > 0, -(-(starts + counts) // found.num), 0)
        which = np.repeat(np.arange(len(rounds)), rounds)
        number = np.arange(len(which)) - np.repeat(np.cumsum(rounds) - rounds, rounds)
        skipped = np.where(number == 0, starts[which], 0)
        lengths = np.minimum(found.num[which], (starts + counts)[which] - number * found.num[which])
        lengths -= skipped
        shifts = found.first[which] + skipped - (np.cumsum(lengths) - lengths)
        rows: Integers = np.repeat(shifts, lengths)
        rows += np.arange(len(rows))
        return rows.reshape(len(shards), len(rows) // len(shards))

    @override
    def _offsets_of(self, epoch: int, shards: Integers) -> Integers:
        found = super()._offsets_of(epoch, shards)
        if self.sets.global_batch is None:
            return found
        pairs = zip(shards.tolist(), found, strict=True)
        return np.stack([self.arrange(epoch, shard, each) for shard, each in pairs])

    @override
    def arrange(self, epoch: int, shard: int, offsets: Integers) -> Integers:
        if (global_batch := self.sets.global_batch) is None:
            return offsets

        def make() -> Integers:
            begins = self.sets.batch_begins(self.num_shards)
            keys = random_bits(self.seed, epoch, 1).random_raw(len(begins))
            return self.sets.sets_of_batches(begins, keys)

        with self._tables.lock:
            sets = self._tables.get("batches", epoch, make)
        held = self._of_shards(np.array([shard]))
        of_rows = held.set[np.searchsorted(held.first, offsets, side="right") - 1]
        positions = np.arange(len(offsets), dtype=np.int64) * self.num_shards + shard
        found = np.empty_like(offsets)
        # The rows of a set come to the positions of its batches, as they are permuted.
        of_positions = sets[positions // global_batch].argsort(kind="stable")
        found[of_positions] = offsets[of_rows.argsort(kind="stable")]
        return found
