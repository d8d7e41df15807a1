"""Orders that need a table of an epoch, because they draw rows or arrange them.

`TableSampler` leaves everything to one method, ``offsets``. `DrawnSampler` builds the offsets in
three steps. It draws rows of a shard, permutes them, and may arrange them::

    of 3 shards, shard 1 holds the rows 1, 4, 7 and has 4 positions, 1, 4, 7 and 10

    draw        0  1  1  2     offsets within the shard: the row at offset 1 comes twice
    permute     1  2  0  1     computed from the seed and the epoch
    arrange     1  2  0  1     unchanged, unless a subclass sorts or groups them
    row         4  7  1  4     at the positions 1, 4, 7 and 10

Because it permutes the rows itself, a `DrawnSampler` also works in blocks, and can be streamed.
"""

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self, override

from lightning_memmap.integers import Integers, starts_of
from lightning_memmap.sampling.factory import check_num_samples
from lightning_memmap.sampling.permutations import (
    BlockPermutation,
    Permutation,
    as_slice,
    bit_generator,
    permuted,
)
from lightning_memmap.sampling.sampler import Sampler, cached_per_epoch, derive_seed

#: Rows of several short shards that are drawn at once, which takes half of the time.
_ROWS_AT_ONCE = 2**18


@dataclass(frozen=True)
class TableSampler(Sampler):
    """An order whose rows are looked up in a table of the epoch.

    A subclass is a frozen dataclass that implements ``offsets``. For example, an order in which the
    rows of each shard are reversed::

        @dataclass(frozen=True)
        class ReversedSampler(TableSampler):
            def offsets(self, epoch, shard):
                return np.arange(self.pool.sizes[shard])[::-1]


        data = MemmapDataModule(..., sampler=lambda pool, seed: ReversedSampler(pool))

    Args:
        pool: The rows of each shard: ``pool.sizes[shard]`` rows for
            ``positions_per_shard[shard]`` positions.
        seed: Seed of the order, ``0 <= seed < 2**63``.
        shuffle_block: Positions of a shard in a block; None for a single block.
        num_samples: Positions of an epoch; None for as many as the pool has rows.

    Raises:
        ValueError: The seed is out of range, or ``shuffle_block`` or ``num_samples`` is below 1.
    """

    num_samples: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_num_samples(self.num_samples)

    @property
    @override
    def num_positions(self) -> int:
        return self.pool.num_rows if self.num_samples is None else self.num_samples

    @abstractmethod
    def offsets(self, epoch: int, shard: int) -> Integers:
        """Return the row of each position of a shard. Shard ``c`` has the positions ``c + j * C``.

        Args:
            epoch: Epoch, counted from 0.
            shard: The shard.

        Returns:
            Offsets within the shard, integers of shape (positions_per_shard[shard],).
        """

    @override
    def grid(
        self, epoch: int, start: int, stop: int, shards: Integers, shard_starts: Integers
    ) -> Integers:
        rows = self._table(epoch, shards)[start:stop]
        grid: Integers = np.add(rows[:, as_slice(shards)], shard_starts, dtype=np.int64).ravel()
        return grid

    @override
    def in_blocks(self, block: int) -> Self:
        raise ValueError(
            f"shuffle_block={block}: {type(self).__name__} decides the order itself. Derive it"
            " from DrawnSampler, which permutes what it draws in blocks; or leave shuffle_block"
            " out and use residency='mmap' or 'host' instead of 'stream'"
        )

    def _table(self, epoch: int, shards: Integers) -> NDArray[Any]:
        """Return the offsets of an epoch, of shape (positions of the longest shard, C)."""
        table, is_filled = self._epoch_table(epoch)
        missing = shards[~is_filled[shards]]
        step = max(1, _ROWS_AT_ONCE // max(len(table), self.pool.longest))
        for start in range(0, len(missing), step):
            # A thread that reads blocks may fill in the columns that another one fills in, too.
            batch = missing[start : start + step]
            self._fill(table, epoch, batch)
            is_filled[batch] = True
        return table

    def _fill(self, table: NDArray[Any], epoch: int, shards: Integers) -> None:
        """Fill in the columns of some shards."""
        for shard in shards.tolist():
            offsets = self._checked("offsets", shard, self.offsets(epoch, shard))
            table[: len(offsets), shard] = offsets

    @cached_per_epoch
    def _epoch_table(self, epoch: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Allocate a table of an epoch, and flags that tell which of its columns are filled in."""
        shape = int(self.positions_per_shard.max()), self.num_shards
        table = np.empty(shape, np.min_scalar_type(self.pool.longest))
        return table, np.zeros(self.num_shards, np.bool_)

    def _checked(self, method: str, shard: int, result: Any) -> NDArray[Any]:
        """Check that what a method returned are offsets within the shard."""
        offsets = np.asarray(result)
        size = int(self.pool.sizes[shard])
        count = int(self.positions_per_shard[shard])
        is_right = offsets.shape == (count,) and (offsets.dtype.kind in "iu" or not count)
        # As an unsigned integer, a negative number is a huge one.
        if not is_right or (offsets.view(f"u{offsets.itemsize}") >= size).any():
            raise ValueError(
                f"sampler: {type(self).__name__}.{method} returned {offsets!r} for shard {shard}:"
                f" return {count} integers from 0 to {size - 1}, the offset within the shard of"
                " the row at each of its positions"
            )
        return offsets


@dataclass(frozen=True)
class DrawnSampler(TableSampler):
    """An order that draws rows of each shard, permutes them, and may arrange them.

    A subclass is a frozen dataclass that overrides ``draw``, ``arrange``, or both.
    """

    def draw(self, epoch: int, shard: int) -> Integers:
        """Return the rows of a shard that are used in an epoch, roughly in file order.

        Args:
            epoch: Epoch, counted from 0.
            shard: The shard.

        Returns:
            Offsets within the shard, int64 of shape (positions_per_shard[shard],). By default each
            row once, for which the shard must have as many positions as rows.
        """
        return np.arange(self.pool.sizes[shard], dtype=np.int64)

    def arrange(self, epoch: int, shard: int, offsets: Integers) -> Integers:
        """Reorder the rows of a shard after they have been permuted, to sort or group them.

        Args:
            epoch: Epoch, counted from 0.
            shard: The shard.
            offsets: Offsets within the shard, int64 of shape (positions_per_shard[shard],). Not to
                be changed.

        Returns:
            The same offsets in another order. By default they are returned as they are.
        """
        return offsets

    def draw_shards(self, epoch: int, shards: Integers) -> NDArray[Any]:
        """Return `draw` for several shards, concatenated."""
        drawn = [self._checked("draw", shard, self.draw(epoch, shard)) for shard in shards.tolist()]
        return np.concatenate(drawn, dtype=np.int64, casting="unsafe")

    def permutation(self, epoch: int) -> Permutation:
        """Return the permutations of what the shards draw, block by block if there are blocks."""
        if self.shuffle_block is None:
            return permuted(self.positions_per_shard, bit_generator(self.seed, epoch))
        # The drawing uses the random bits of the seed itself.
        seed = derive_seed(self.seed, 1)
        return BlockPermutation(self.positions_per_shard, self.shuffle_block, seed, epoch)

    @override
    def offsets(self, epoch: int, shard: int) -> Integers:
        permuted_rows = self._permuted(epoch, np.array([shard]))[
            : int(self.positions_per_shard[shard]), 0
        ]
        return self.arrange(epoch, shard, permuted_rows.astype(np.int64))

    @override
    def in_blocks(self, block: int) -> Self:
        return replace(self, shuffle_block=block)

    @override
    def _fill(self, table: NDArray[Any], epoch: int, shards: Integers) -> None:
        rows = self._permuted(epoch, shards)
        for column, shard in enumerate(shards.tolist()):
            offsets = rows[: int(self.positions_per_shard[shard]), column]
            arranged = self.arrange(epoch, shard, offsets)
            if arranged is not offsets:
                rows[: len(offsets), column] = self._checked("arrange", shard, arranged)
        # Only in its last state: another thread may have filled these columns in, and read them.
        table[:, as_slice(shards)] = rows

    def _permuted(self, epoch: int, shards: Integers) -> NDArray[Any]:
        """Draw the rows of some shards and permute them, one column per shard."""
        drawn = self.draw_shards(epoch, shards)
        if not len(drawn):  # these shards have no position
            drawn = np.zeros(1, np.int64)
        drawn_starts = starts_of(self.positions_per_shard[shards])
        order = self._permutation(epoch).grid(
            0, int(self.positions_per_shard.max()), shards, drawn_starts
        )
        # Only what is past the last position is out of bounds. "wrap" is the fastest mode.
        return drawn.take(order, mode="wrap").reshape(-1, len(shards))

    @cached_per_epoch
    def _permutation(self, epoch: int) -> Permutation:
        """Return the cached permutations of all shards in an epoch."""
        return self.permutation(epoch)
