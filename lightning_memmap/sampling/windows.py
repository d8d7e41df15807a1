"""Windows of rows: the parts of an epoch that are read from disk at once.

A window is the positions of some consecutive rounds over the shards. The rows of one shard in it
are long runs of a file, or lie near each other there, which a disk reads fast. Integers only: no
file, no tensor.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lightning_memmap.sampling.sampler import Sampler
from lightning_memmap.sampling.shards import Integers

#: Bytes of a window over all shards if the user gives no number: 21 MiB of each of 24 shards.
DEFAULT_WINDOW_BYTES = 512 * 2**20


def default_window(num_shards: int, row_bytes: float) -> int:
    """Rows of a shard in a window. Depends on the store alone: the same on every machine."""
    return max(1, int(DEFAULT_WINDOW_BYTES // max(1, num_shards * row_bytes)))


@dataclass(frozen=True)
class ReadWindows:
    """The windows of a sampler's epochs."""

    sampler: Sampler
    rows: int

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"rows={self.rows}: at least 1 row of a shard")
        block = self.sampler.block
        if not self.sampler.is_sequential and block != self.rows:
            raise ValueError(
                f"residency='stream' reads windows of {self.rows} rows of a shard (shuffle_window),"
                f" and {type(self.sampler).__name__} takes the rows of a step from"
                f" {'elsewhere too' if block is None else f'windows of {block}'}: use"
                " residency='mmap', or let a sampler of your own draw rows and leave permuting them"
                " to its base class"
            )

    @property
    def has_runs(self) -> bool:
        """Whether a window has the same offsets of each shard, in runs of consecutive ones."""
        return self.sampler.is_sequential or self.sampler.block_runs(0, 0) is not None

    def __len__(self) -> int:
        return -(-self.sampler.num_positions // (self.rows * self.sampler.num_shards))

    @property
    def longest(self) -> int:
        """Positions of a shard in the longest window."""
        return min(self.rows, -(-self.sampler.num_positions // self.sampler.num_shards))

    def number_of(self, position: int) -> int:
        """The window of a position."""
        return position // (self.sampler.num_shards * self.rows)

    def parts(self, positions: range) -> Iterator[tuple[int, slice]]:
        """Divide positions by windows."""
        size = self.rows * self.sampler.num_shards
        edges = (positions[0], positions[-1]) if positions else (0, -1)
        for number in range(edges[0] // size, edges[1] // size + 1):
            first, last = (
                max(0, -(-(edge - positions.start) // positions.step))
                for edge in (number * size, (number + 1) * size)
            )
            yield number, slice(first, last)

    def runs(self, epoch: int, number: int) -> list[range]:
        """The offsets of a window, the same in each shard, in runs of consecutive ones."""
        if not self.sampler.is_sequential:
            runs = self.sampler.block_runs(epoch, number)
            assert runs is not None, f"{self.sampler} has no runs"
            return runs
        return [range(number * self.rows, min((number + 1) * self.rows, self.sampler.pool.longest))]

    def offsets(self, epoch: int, number: int, held: Integers) -> tuple[Integers, Integers]:
        """The rows that a window has of some shards, for any sampler."""
        first = number * self.rows
        last = min(first + self.rows, -(-self.sampler.num_positions // self.sampler.num_shards))
        found = self.sampler.grid(epoch, first, last - 1, held, np.zeros_like(held))
        grid = found.reshape(-1, len(held))
        rounds = np.arange(first, last, dtype=np.int64)[:, None]
        wanted = rounds * self.sampler.num_shards + held < self.sampler.num_positions
        return np.broadcast_to(held, grid.shape)[wanted], grid[wanted]
