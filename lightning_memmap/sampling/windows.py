"""Windows: the parts of a stream that are read from disk at once.

A window is the positions of some consecutive rows of every shard. The rows of one shard in it are
a lane: long runs of a file, which a disk reads fast. Integers only: no file, no tensor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_memmap.sampling.shards import Integers
from lightning_memmap.sampling.stream import Stream

#: What a window of all shards takes if nobody says otherwise: with 24 shards, lanes of 21 MiB.
DEFAULT_WINDOW_BYTES = 512 * 2**20


def default_window(num_shards: int, row_bytes: int) -> int:
    """Rows of a shard in a window, from what a store is alone: the same on every machine.

    Args:
        num_shards: Shards of the stream.
        row_bytes: Bytes of one row over all fields.
    """
    return max(1, DEFAULT_WINDOW_BYTES // max(1, num_shards * row_bytes))


@dataclass(frozen=True)
class Windows:
    """A stream that is cut into windows.

    Args:
        stream: The stream.
        rows: Rows of a shard in a window, but for the last one.

    Raises:
        ValueError: The stream is shuffled, and not within windows of that many rows.
    """

    stream: Stream
    rows: int

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"rows={self.rows}: at least 1 row of a shard")
        if self.stream.shuffle and self.stream.shuffle_window != self.rows:
            raise ValueError(
                f"shuffle_window={self.stream.shuffle_window}: the stream is read in windows of"
                f" {self.rows} rows of a shard, and must be shuffled within these"
            )

    def __len__(self) -> int:
        return -(-self._longest // self.rows)

    def number_of(self, position: int) -> int:
        """The window of a position."""
        return position // (self.stream.num_shards * self.rows)

    def runs(self, epoch: int, number: int) -> list[range]:
        """The offsets of a window's lanes, the same in each shard, in runs of consecutive ones.

        In the last window, a shard that is one row shorter than others has not the last offset.
        """
        if self.stream.shuffle:
            return self.stream.window_runs(epoch, number)
        return [range(number * self.rows, min((number + 1) * self.rows, self._longest))]

    def places(
        self,
        epoch: int,
        positions: range,
        num_places: int,
        begins: Callable[[Sequence[range]], Sequence[Integers]],
    ) -> Integers:
        """Where the rows lie that supply positions, if all windows of an epoch lay one after the
        other.

        Args:
            epoch: Epoch, counted from 0.
            positions: As for `Stream.at`.
            num_places: Places in a window.
            begins: What says, for each run of a window and by shard, where in the window the rows
                of the run begin: int64 of shape (C,) for each run. They lie one after the other.

        Returns:
            int64 of shape (len(positions),).
        """
        shards, offsets = self.stream.at(epoch, positions)
        if not positions:
            return offsets
        size = self.rows * self.stream.num_shards
        for number in range(self.number_of(positions[0]), self.number_of(positions[-1]) + 1):
            first, last = (
                max(0, -(-(edge - positions.start) // positions.step))
                for edge in (number * size, (number + 1) * size)
            )
            here = slice(first, last)
            runs = self.runs(epoch, number)
            by_run = [begin + number * num_places for begin in begins(runs)]
            offsets[here] = _places_in(shards[here], offsets[here], runs, by_run)
        return offsets

    @property
    def _longest(self) -> int:
        return -(-self.stream.num_rows // self.stream.num_shards)


def _places_in(
    shards: Integers, offsets: Integers, runs: Sequence[range], begins: Sequence[Integers]
) -> Integers:
    """Where rows lie that are in runs, each of which begins by shard where it is said."""
    places = begins[0][shards] + (offsets - runs[0].start)
    for run, begin in zip(runs[1:], begins[1:], strict=True):
        here = np.flatnonzero((offsets >= run.start) & (offsets < run.stop))
        places[here] = begin[shards[here]] + (offsets[here] - run.start)
    return places
