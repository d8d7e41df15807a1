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
from lightning_memmap.sampling.sampler import Sampler
from lightning_memmap.sampling.shards import Integers, firsts_of, shard_rows, shard_starts

#: Where the points of a set lie is one of so many fractions of their distance.
_FRACTIONS = 2**32


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

    Raises:
        TypeError: ``shares`` is not a dict of numbers, or ``num_samples`` not an integer.
        ValueError: A share is negative or not finite, all are 0, or ``num_samples`` is below 1.
    """

    def __init__(self, shares: dict[str, float], num_samples: int | None = None) -> None:
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
        self.shares, self.num_samples = shares, num_samples
        self.stores = tuple(shares)

    @override
    def __repr__(self) -> str:
        return call_text("Mixture", shares=self.shares, num_samples=self.num_samples)

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
        counts = _rounded(count * (shares / shares.sum()), count)
        sets = Sets(tuple(sizes.tolist()), tuple(counts))
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
    positions: range
    """Those of the set that the shard has."""
    rows: range
    """The rows of the set, in the order of the files, from which they are drawn."""


@dataclass(frozen=True)
class Sets:
    """The sets of a mixture, and how they are divided into shards by the positions of an epoch.

    The positions of an epoch lie on a line, set after set, and are cut into shards. A shard has the
    piece of a set that its piece of the set's positions is drawn from. Nothing is kept for each
    row; a row on a cut is in two shards.

    Args:
        sizes: Rows of each set.
        counts: Positions of each set in an epoch; none for one without rows.
    """

    sizes: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def identity(self) -> dict[str, Any]:
        """What tells these from others, as JSON values."""
        return {"positions of sets": str(self.counts)}

    def pieces(self, num_shards: int) -> list[_Piece]:
        """What shards have, shard after shard, and set after set."""
        total = sum(self.counts)
        cuts = [*shard_starts(total, num_shards).tolist(), total]
        pieces = []
        for shard, (first, last) in enumerate(pairwise(cuts)):
            begin = 0
            for number, (size, count) in enumerate(zip(self.sizes, self.counts, strict=True)):
                positions = range(max(first - begin, 0), min(last - begin, count))
                if positions:
                    # Row r has the positions from r * count / size on.
                    rows = range(
                        positions.start * size // count, -(-positions.stop * size // count)
                    )
                    pieces.append(_Piece(shard, number, positions, rows))
                begin += count
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
class MixtureSampler(Sampler):
    """Several sets in given shares, each of which is read on and on.

    A shard reads its piece of a set round after round. In an epoch it gives as many rows as the
    shard has positions, and the next epoch goes on behind them: rows that come together lie
    together, and all but those on a cut come before one comes again.

    A row on a cut between shards comes in both: as often as points at a distance of one, from a
    random offset on, lie on its part of the line of positions, as of
    `lightning_memmap.sampling.WeightedSampler`. So each row of a set comes as often as the
    positions of the set, divided by its rows, rounded up or down.

    Args:
        pool: The pieces of the sets.
        sets: The sets.
        seed: As for `Sampler`.
        shuffle_window: As there.

    Raises:
        ValueError: An argument is out of range.
    """

    sets: Sets

    def _pieces(self) -> tuple[list[_Piece], list[int]]:
        """The pieces, and a random number for each, which is the same in each epoch."""

        def make() -> tuple[list[_Piece], list[int]]:
            pieces = self.sets.pieces(self.num_shards)
            return pieces, random_bits(self.seed, 0, 1).random_raw(len(pieces)).tolist()

        with self._tables.lock:
            return self._tables.get("pieces", 0, make)

    @override
    def draw(self, epoch: int, shard: int) -> Integers:
        raw = random_bits(self.seed, epoch).random_raw(len(self.sets.counts))
        points = (raw % np.uint64(_FRACTIONS)).tolist()
        found, end = [np.zeros(0, np.int64)], 0
        for piece, begin in zip(*self._pieces(), strict=True):
            if piece.shard != shard:
                continue
            size, count = self.sets.sizes[piece.set], self.sets.counts[piece.set]
            rows, done = piece.rows, piece.positions.start
            # The first and the last row by themselves: they may be in other shards too.
            inner = {min(rows.start + 1, rows.stop), max(rows.stop - 1, rows.start)}
            for row, next_row in pairwise(sorted({rows.start, *inner, rows.stop})):
                num, upto = next_row - row, piece.positions.stop
                if next_row < rows.stop:
                    point = next_row * count * _FRACTIONS - points[piece.set] * size
                    upto = min(max(-(-point // (size * _FRACTIONS)), done), upto)
                # Round after round over the rows; the epochs before had so many.
                start = (begin + epoch * num * count // size) % num
                drawn = (start + np.arange(upto - done, dtype=np.int64)) % num
                found.append(drawn + (end + row - rows.start))
                done = upto
            end += len(rows)
        return np.concatenate(found)
