"""Windows: the parts of a stream that are read from disk at once.

A window is the positions of some consecutive rows of every shard. The rows of one shard in it are
a lane: long runs of a file, which a disk reads fast. Integers only: no file, no tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_memmap.order import Integers, Stream

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

    @property
    def lane_rows(self) -> int:
        """Rows of the longest lane."""
        return min(self.rows, self._longest)

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

    def places(self, epoch: int, positions: range, lanes: Integers) -> Integers:
        """Where the rows lie that supply positions, if all windows of an epoch lay one after the
        other, and in each of them one lane after the other.

        Args:
            epoch: Epoch, counted from 0.
            positions: As for `Stream.at`.
            lanes: By shard, the number of its lane, int64 of shape (C,). What shards have none
                must have no position.

        Returns:
            int64 of shape (len(positions),). A window has ``num_lanes * lane_rows`` places.
        """
        shards, offsets = self.stream.at(epoch, positions)
        num_lanes = int(lanes.max()) + 1
        places = lanes[shards] * self.lane_rows
        if not positions:
            return places
        size = self.rows * self.stream.num_shards
        for number in range(self.number_of(positions[0]), self.number_of(positions[-1]) + 1):
            first, last = (
                max(0, -(-(edge - positions.start) // positions.step))
                for edge in (number * size, (number + 1) * size)
            )
            here = slice(first, last)
            places[here] += number * num_lanes * self.lane_rows
            places[here] += _places_in(offsets[here], self.runs(epoch, number))
        return places

    @property
    def _longest(self) -> int:
        return -(-self.stream.num_rows // self.stream.num_shards)


def _places_in(values: Integers, runs: Sequence[range]) -> Integers:
    """Where values stand in runs, one after the other: the inverse of `spread`."""
    places = values - runs[0].start
    begin = len(runs[0])
    for run in runs[1:]:
        here = np.flatnonzero((values >= run.start) & (values < run.stop))
        places[here] = values[here] - run.start + begin
        begin += len(run)
    return places
