"""The data order: one stream of rows that every strategy and device count reads alike.

An epoch is a stream of positions ``p = 0 .. N-1``. Position ``p`` is supplied by shard
``c = p % C``: the row at offset ``perm(seed, epoch, c)[p // C]`` of that shard, or at offset
``p // C`` when not shuffled. With a shuffle window, rows that come together also lie together.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lightning_memmap.sampling.permutations import Permutation, permuted, random_bits
from lightning_memmap.sampling.shards import Integers, shard_rows
from lightning_memmap.sampling.windowed import WindowedPermutation

_MAX_SEED = 2**63 - 1


def derive_seed(seed: int, *words: int) -> int:
    """A 63-bit seed that depends on every one of the given integers.

    Args:
        seed: The user's seed, not negative.
        words: What the derived seed is for, such as epoch, step and data device.
    """
    state = np.random.SeedSequence([seed, *words]).generate_state(1, np.uint64)
    return int(state[0]) & _MAX_SEED


@dataclass(frozen=True)
class Stream:
    """The order of rows in each epoch.

    Args:
        num_rows: Rows of the dataset, ``N``.
        num_shards: Shards ``C`` that the rows are dealt to, row ``i`` to shard ``i % C``.
        seed: Seed of the permutations, ``0 <= seed < 2**63``.
        shuffle: Permute the rows within each shard, anew each epoch.
        shuffle_window: Rows of a shard, ``w``, that lie together and come together: position
            ``p`` is in window ``p // C // w`` of the epoch, and a window is ``w`` consecutive rows
            of each shard, in an order of its own. The windows come in an order that is anew each
            epoch, as is where the first one is cut. What is left of each shard, fewer than ``w``
            rows and one, comes last. None permutes each whole shard.

    Raises:
        ValueError: A count below 1, a seed out of range, or a window without shuffling.
    """

    num_rows: int
    num_shards: int
    seed: int = 0
    shuffle: bool = False
    shuffle_window: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_rows", "num_shards"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1 is needed")
        if not 0 <= self.seed <= _MAX_SEED:
            raise ValueError(f"seed={self.seed}: choose a seed from 0 to 2**63 - 1")
        if self.shuffle_window is not None:
            if self.shuffle_window < 1:
                raise ValueError(f"shuffle_window={self.shuffle_window}: at least 1 row of a shard")
            if not self.shuffle:
                raise ValueError(
                    f"shuffle_window={self.shuffle_window} with shuffle=False: leave one out"
                )

    def at(self, epoch: int, positions: range) -> tuple[Integers, Integers]:
        """Which rows supply these positions.

        The rows' dataset indices are ``offsets * num_shards + shards``.

        Args:
            epoch: Epoch, counted from 0.
            positions: Ascending positions in ``[0, num_rows)``; the step of the range must
                be 1 or divide the number of shards.

        Returns:
            The shard and the offset within the shard of each position, both int64 of shape
            (len(positions),).
        """
        columns, keep, grid = self._grid(epoch, positions)
        return np.tile(columns, len(grid) // len(columns))[keep], grid[keep]

    def places(self, epoch: int, positions: range, starts: Integers) -> Integers:
        """Where the rows lie that supply these positions.

        The same as ``starts[shards] + offsets`` of what `at` gives, in less time.

        Args:
            epoch: Epoch, counted from 0.
            positions: As for `at`.
            starts: Where each shard starts, int64 of shape (num_shards,).

        Returns:
            int64 of shape (len(positions),).
        """
        _, keep, grid = self._grid(epoch, positions, starts)
        return grid[keep]

    def window_runs(self, epoch: int, number: int) -> list[range]:
        """Which offsets of each shard are in a window, in runs of consecutive ones.

        In the last window, a shard that is one row shorter than others has not the last offset.

        Args:
            epoch: Epoch, counted from 0.
            number: Which window of the epoch: that of the positions ``p`` with
                ``p // num_shards // shuffle_window == number``.
        """
        permutation = _permutation(self, epoch)
        assert isinstance(permutation, WindowedPermutation)
        return permutation.runs(number)

    def _grid(
        self, epoch: int, positions: range, starts: Integers | None = None
    ) -> tuple[Integers, slice, Integers]:
        """Positions fill a grid of one row per offset and one column per shard, read row by row,
        so that no element is ever divided.

        Returns:
            The shards of the columns; what the positions are of the grid; the grid's permuted
            offsets, each counted from the start of its shard.
        """
        num, step = self.num_shards, positions.step
        if step != 1 and num % step:
            raise ValueError(f"positions={positions}: a step of {step} does not divide {num}")
        if not positions:
            return np.zeros(1, np.int64), slice(0, 0), np.empty(0, np.int64)
        columns = np.arange(positions[0] % step, num, step, dtype=np.int64)
        begins = np.zeros_like(columns) if starts is None else starts[columns]
        first, last = positions[0] // num, positions[-1] // num
        skip = (positions[0] - first * num) // step
        keep = slice(skip, skip + len(positions))
        if self.shuffle:
            return columns, keep, _permutation(self, epoch).grid(first, last, columns, begins)
        offsets = np.arange(first, last + 1, dtype=np.int64)
        return columns, keep, np.add.outer(offsets, begins).ravel()


@lru_cache(maxsize=4)
def _permutation(stream: Stream, epoch: int) -> Permutation:
    """The permutation of each shard in one epoch."""
    sizes = shard_rows(stream.num_rows, stream.num_shards)
    if stream.shuffle_window is not None:
        return WindowedPermutation(sizes, stream.shuffle_window, stream.seed, epoch)
    return permuted(sizes, random_bits(stream.seed, epoch))
