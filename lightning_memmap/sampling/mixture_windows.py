"""A mixture of several sets, each of which is read on and on."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from lightning_memmap.sampling.permutations import random_bits
from lightning_memmap.sampling.sampler import WindowedSampler, check_seed, derive_seed
from lightning_memmap.sampling.shards import Integers, Shards, shard_starts
from lightning_memmap.sampling.window_permutation import WindowPermutation

#: Where the points of a set lie is one of so many fractions of their distance.
_FRACTIONS = 2**32


class _Piece(NamedTuple):
    """What a shard has of a set."""

    shard: int
    set: int
    positions: range
    """Those of the set that the shard has."""
    rows: range
    """The rows of the set, in the order of a file, from which they are drawn."""


@dataclass(frozen=True, kw_only=True)
class MixtureShards(Shards):
    """The rows of several sets, divided into shards by the positions of an epoch.

    The positions of an epoch lie on a line, set after set, and are cut into shards. A shard has the
    piece of a set's file that its piece of the set's positions is drawn from. Nothing is kept for
    each row.

    Args:
        num_rows: Rows of all shards together: a row at a cut is in two shards.
        num_shards: Shards, ``C``.
        subset: Which rows of the dataset these are; all of them where it is None.
        mixed: The rows of all sets, set after set in the order of a file, and the shards that they
            are divided into by number.
        sizes_of_sets: Rows of each set.
        counts: Positions of each set in an epoch; none for one without rows.
    """

    mixed: Shards
    sizes_of_sets: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, mixed: Shards, sizes: Sequence[int], counts: Sequence[int]) -> "MixtureShards":
        """Divide the rows of several sets into shards.

        Args:
            mixed: As for this class.
            sizes: Rows of each set.
            counts: Positions of each set in an epoch.
        """
        pieces = _pieces(sizes, counts, mixed.num_shards)
        return cls(
            sum(len(piece.rows) for piece in pieces),
            mixed.num_shards,
            mixed.subset,
            mixed=mixed,
            sizes_of_sets=tuple(sizes),
            counts=tuple(counts),
        )

    @property
    @override
    def identity(self) -> dict[str, Any]:
        return {**self.mixed.identity, "positions of sets": str(self.counts)}

    @property
    @override
    def base(self) -> Shards:
        return self.mixed

    @property
    def num_positions(self) -> int:
        """Positions of an epoch."""
        return sum(self.counts)

    @cached_property
    def pieces(self) -> list[_Piece]:
        """What the shards have, shard after shard, and set after set."""
        return _pieces(self.sizes_of_sets, self.counts, self.num_shards)

    @cached_property
    def ends(self) -> Integers:
        """Where the rows of each piece end, if all lay one after the other, int64."""
        return np.cumsum([len(piece.rows) for piece in self.pieces], dtype=np.int64)

    @cached_property
    def _shifts(self) -> Integers:
        """What is added there to find the place of a row in the file, int64."""
        sizes = np.array(self.sizes_of_sets, np.int64)
        firsts = np.cumsum(sizes) - sizes
        stops = [int(firsts[piece.set]) + piece.rows.stop for piece in self.pieces]
        return np.array(stops, np.int64) - self.ends

    @cached_property
    def sizes(self) -> Integers:
        """Rows of each shard, int64 of shape (C,)."""
        sizes = np.zeros(self.num_shards, np.int64)
        for piece in self.pieces:
            sizes[piece.shard] += len(piece.rows)
        return sizes

    @override
    def dataset_rows(self, shards: Integers, offsets: Integers) -> Integers:
        return self.mixed.dataset_rows_at(self._places(shards, offsets))

    @override
    def rows_of(self, shard: int) -> Integers:
        offsets = np.arange(self.sizes[shard], dtype=np.int64)
        return self.dataset_rows(np.full_like(offsets, shard), offsets)

    @override
    def starts_in(self, stored: Shards) -> Integers | None:
        homes = np.array([piece.shard for piece in self.pieces], np.int64)
        are_apart = (np.diff(homes) == 0) & (np.diff(self._shifts) != 0)
        if self.mixed != stored or are_apart.any():
            return None
        starts: Integers = self.starts.copy()
        firsts = np.flatnonzero(np.diff(homes, prepend=-1))
        starts[homes[firsts]] += self._shifts[firsts]
        return starts

    @override
    def locations_in(self, stored: Shards, shards: Integers, offsets: Integers) -> Integers:
        if self.mixed == stored:
            return self._places(shards, offsets)
        return super().locations_in(stored, shards, offsets)

    def _places(self, shards: Integers, offsets: Integers) -> Integers:
        """Where rows are in a file of the rows of all sets."""
        rows = self.starts[shards] + offsets
        places: Integers = rows + self._shifts[np.searchsorted(self.ends, rows, side="right")]
        return places


def _pieces(sizes: Sequence[int], counts: Sequence[int], num_shards: int) -> list[_Piece]:
    cuts = [*shard_starts(sum(counts), num_shards).tolist(), sum(counts)]
    pieces = []
    for shard, (first, last) in enumerate(pairwise(cuts)):
        begin = 0
        for number, (size, count) in enumerate(zip(sizes, counts, strict=True)):
            positions = range(max(first - begin, 0), min(last - begin, count))
            if positions:
                # Row r has the positions from r * count / size on.
                rows = range(positions.start * size // count, -(-positions.stop * size // count))
                pieces.append(_Piece(shard, number, positions, rows))
            begin += count
    return pieces


@dataclass(frozen=True)
class MixtureSampler(WindowedSampler):
    """Several sets in given shares, each of which is read on and on, shuffled within windows.

    A shard reads its piece of a set round after round. In an epoch it gives as many rows as the
    shard has positions, and the next epoch goes on behind them: rows that come together lie
    together, and all but those on a cut come before one comes again. The positions of a shard are
    then permuted as by `lightning_memmap.sampling.BlockShuffledSampler`, which sees positions
    instead of rows.

    A row on a cut between shards comes in both: as often as points at a distance of one, from a
    random offset on, lie on its part of the line of positions, as of
    `lightning_memmap.sampling.WeightedSampler`. So each row of a set comes as often as the
    positions of the set, divided by its rows, rounded up or down.

    Args:
        shards: The rows of the sets.
        seed: Seed of starts and permutations, ``0 <= seed < 2**63``.
        shuffle_window: Positions of a shard in a window.

    Raises:
        ValueError: The seed is out of range.
    """

    shards: MixtureShards
    seed: int
    shuffle_window: int

    def __post_init__(self) -> None:
        check_seed(self.seed)

    @property
    @override
    def num_positions(self) -> int:
        return self.shards.num_positions

    @property
    @override
    def window_rows(self) -> int:
        return self.shuffle_window

    @override
    def grid(
        self, epoch: int, first: int, last: int, shards: Integers, starts: Integers
    ) -> Integers:
        return _rounds(self, epoch).grid(first, last, shards, starts)


class _Rounds:
    """The rows of one epoch, and their order.

    Args:
        sampler: The sampler.
        epoch: The epoch, counted from 0.
    """

    def __init__(self, sampler: MixtureSampler, epoch: int) -> None:
        shards, seed = sampler.shards, sampler.seed
        self._cuts = shard_starts(sampler.num_positions, sampler.num_shards)
        self._starts = shards.starts
        sizes = np.diff(np.append(self._cuts, sampler.num_positions))
        self._order = WindowPermutation(sizes, sampler.shuffle_window, derive_seed(seed, 1), epoch)
        num_sets = len(shards.counts)
        points = (random_bits(seed, epoch).random_raw(num_sets) % np.uint64(_FRACTIONS)).tolist()
        # The same in each epoch, which goes on from there.
        begins = random_bits(seed, 0, 1).random_raw(len(shards.pieces)).tolist()
        rounds: list[tuple[int, int, int, int]] = []
        end = 0
        for piece, begin, stop in zip(shards.pieces, begins, shards.ends.tolist(), strict=True):
            size, count = shards.sizes_of_sets[piece.set], shards.counts[piece.set]
            rows, positions = piece.rows, piece.positions
            # The first and the last row by themselves: they may be in other shards too.
            inner = {min(rows.start + 1, rows.stop), max(rows.stop - 1, rows.start)}
            done = positions.start
            for row, next_row in pairwise(sorted({rows.start, *inner, rows.stop})):
                num, upto = next_row - row, positions.stop
                if next_row < rows.stop:
                    point = next_row * count * _FRACTIONS - points[piece.set] * size
                    upto = min(max(-(-point // (size * _FRACTIONS)), done), upto)
                # Round after round over the rows; the epochs before had so many.
                start = (begin + epoch * num * count // size) % num
                if upto > done:
                    end += upto - done
                    rounds.append((end, stop - rows.stop + row, num, start - end + upto - done))
                done = upto
        #: Of each stretch of rows: where its positions end, its first row if those of all shards
        #: lay one after the other, how many rows it has, and the one at position 0 of the line.
        self._ends, self._firsts, self._nums, self._shifts = np.array(rounds, np.int64).T

    def grid(self, first: int, last: int, columns: Integers, begins: Integers) -> Integers:
        """The rows of positions; see `Sampler.grid`."""
        places = self._order.grid(first, last, columns, self._cuts[columns])
        # Behind the last position, places may be anywhere.
        which = np.searchsorted(self._ends, places, side="right").clip(max=len(self._ends) - 1)
        rows = self._firsts[which] + (places + self._shifts[which]) % self._nums[which]
        rows = rows.reshape(-1, len(columns)) + (begins - self._starts[columns])
        found: Integers = rows.ravel()
        return found


@lru_cache(maxsize=4)
def _rounds(sampler: MixtureSampler, epoch: int) -> _Rounds:
    return _Rounds(sampler, epoch)
