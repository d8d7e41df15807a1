"""Shards that are equal in weight, and not in the number of their rows."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lightning_memmap.sampling.identity import Numbers
from lightning_memmap.sampling.shards import Integers, Shards, shard_rows, shard_starts

#: The line of an epoch is shorter than 2 to the power of this, in units.
_LINE_BITS = 62
_MAX_POSITIONS = 2**40


@dataclass(frozen=True, kw_only=True)
class WeightedShards(Shards):
    """Rows that are divided into shards by their weights.

    The rows lie on a line, in the order of a file, shard after shard. Each is as long as the number
    of times that it is expected to come in an epoch, so that the line is as long as an epoch has
    positions. It is cut into shards, each as long as the number of its positions: a shard has the
    rows that overlap its piece. A row on a cut is in both shards, and one that is longer than a
    piece in several. A row without weight is in none.

    Lengths are whole numbers of a small unit, so that nothing is lost to rounding.

    Args:
        num_rows: Rows of all shards together.
        num_shards: Shards, ``C``.
        subset: Which rows of the dataset the weighted ones are; all of them where it is None.
        weighed: The rows, and the shards that they are divided into by number.
        lengths: The length of each row in units, in the order of a file, int64 of shape
            (weighed.num_rows,).
        num_positions: Positions of an epoch.
    """

    weighed: Shards
    lengths: Numbers
    num_positions: int

    @classmethod
    def of(cls, weighed: Shards, expected: NDArray[np.float64], most: float) -> "WeightedShards":
        """Divide rows by how often they are expected to come.

        Args:
            weighed: The rows, and the shards that they are divided into by number.
            expected: How often each is expected to come in an epoch, in the order of a file,
                float64 of shape (weighed.num_rows,). They add up to the positions of an epoch, a
                whole number, as well as float64 can.
            most: No row comes more often than this.

        Returns:
            The shards.

        Raises:
            ValueError: An epoch would have more positions than the line can be divided into.
        """
        num_positions = round(float(expected.sum()))
        if num_positions > _MAX_POSITIONS:
            raise ValueError(f"num_samples={num_positions}: an epoch has 2**40 positions at most")
        lengths = _in_units(expected, num_positions, _unit_bits(num_positions), most)
        sizes = _Line(lengths, num_positions, weighed.num_shards).sizes
        return cls(
            int(sizes.sum()),
            weighed.num_shards,
            weighed.subset,
            weighed=weighed,
            lengths=Numbers(lengths),
            num_positions=num_positions,
        )

    @property
    @override
    def identity(self) -> dict[str, Any]:
        weights = {"lengths": self.lengths.identity, "num_positions": self.num_positions}
        return {**self.weighed.identity, "weights": weights}

    @property
    @override
    def base(self) -> Shards:
        return self.weighed

    @cached_property
    def line(self) -> "_Line":
        """The line, and where it is cut."""
        return _Line(self.lengths.array, self.num_positions, self.num_shards)

    @cached_property
    def sizes(self) -> Integers:
        """Rows of each shard, int64 of shape (C,)."""
        return self.line.sizes

    @override
    def dataset_rows(self, shards: Integers, offsets: Integers) -> Integers:
        return self.weighed.dataset_rows_at(self._places(shards, offsets))

    @override
    def rows_of(self, shard: int) -> range | Integers:
        offsets = np.arange(self.sizes[shard], dtype=np.int64)
        return self.dataset_rows(np.full_like(offsets, shard), offsets)

    @override
    def starts_in(self, stored: Shards) -> Integers | None:
        are_all = self.line.kept is None and self.weighed == stored
        return self.line.firsts if are_all else None

    @override
    def locations_in(self, stored: Shards, shards: Integers, offsets: Integers) -> Integers:
        if self.weighed == stored:
            return self._places(shards, offsets)
        return super().locations_in(stored, shards, offsets)

    def _places(self, shards: Integers, offsets: Integers) -> Integers:
        """Where rows are in a file of the weighed rows."""
        places = self.line.firsts[shards] + offsets
        return places if self.line.kept is None else self.line.kept[places]


class _Line:
    """The rows of an epoch, one after the other, and the pieces that are shards.

    Args:
        lengths: Of each row, in units.
        num_positions: The length of the line, not in units.
        num_shards: Pieces, ``C``.

    Attributes:
        unit_bits: A length of one is ``2**unit_bits`` units.
        kept: The places in the file of the rows that have a length, int64; None for all.
        ends: Where each of these rows ends, in units, int64.
        cuts: Where pieces begin, and where the last ends, not in units: int64 of shape (C + 1,).
        firsts: The first row of each piece, an index into ``kept``, int64 of shape (C,).
        sizes: Rows of each piece, int64 of shape (C,).
    """

    def __init__(self, lengths: Integers, num_positions: int, num_shards: int) -> None:
        self.unit_bits = _unit_bits(num_positions)
        has_length = lengths > 0
        self.kept = None if has_length.all() else np.flatnonzero(has_length)
        self.ends = np.cumsum(lengths if self.kept is None else lengths[self.kept])
        starts = shard_starts(num_positions, num_shards)
        self.cuts = np.append(starts, num_positions)
        edges = self.cuts << self.unit_bits
        self.firsts = np.searchsorted(self.ends, edges[:-1], side="right")
        lasts = np.searchsorted(self.ends, edges[1:], side="left")
        # A piece of no length has no row.
        self.sizes = np.where(shard_rows(num_positions, num_shards) > 0, lasts + 1 - self.firsts, 0)

    @cached_property
    def pieces(self) -> Integers:
        """How much of each row is in each shard, shard after shard; 0 for the last row of each.

        Units, int64 of shape (sizes.sum(),). The last row has what is left of a shard.
        """
        firsts = np.cumsum(self.sizes) - self.sizes
        homes = np.repeat(np.arange(len(self.sizes)), self.sizes)
        rows = self.firsts[homes] + np.arange(len(homes)) - firsts[homes]
        ends = np.minimum(self.ends[rows], (self.cuts << self.unit_bits)[homes + 1])
        pieces: Integers = np.diff(ends, prepend=0)
        pieces[(firsts + self.sizes)[self.sizes > 0] - 1] = 0
        return pieces


def _unit_bits(num_positions: int) -> int:
    return _LINE_BITS - num_positions.bit_length()


def _in_units(
    expected: NDArray[np.float64], num_positions: int, unit_bits: int, most: float
) -> Integers:
    """Lengths in units that add up to the line exactly."""
    units = np.floor(expected * 2.0**unit_bits).astype(np.int64)
    units[(units == 0) & (expected > 0)] = 1
    missing = (num_positions << unit_bits) - int(units.sum())
    limit = min(2**_LINE_BITS, int(most * 2**unit_bits)) if missing > 0 else 1
    # Rounding is made good where there is room: by far less than 2**-20 of a position.
    rows = np.flatnonzero((units > 0) & (units != int(most * 2**unit_bits)))
    room = np.minimum(np.abs(limit - units[rows]), abs(missing))
    units[rows] += np.sign(missing) * np.clip(abs(missing) - (np.cumsum(room) - room), 0, room)
    return units
