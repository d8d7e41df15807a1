"""Samplers: which rows an epoch has, and in what order.

An epoch has the positions ``p = 0 .. N-1``. Position ``p`` is supplied by shard ``c = p % C``,
whatever the order: that keeps rows where they are, and global batches the same under every
strategy and device count. A sampler says which row of the shard it is.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from lightning_memmap.sampling.identity import Identified, identity_of
from lightning_memmap.sampling.shards import Integers, Shards

MAX_SEED = 2**63 - 1


def derive_seed(seed: int, *words: int) -> int:
    """A 63-bit seed that depends on every one of the given integers.

    Args:
        seed: The user's seed, not negative.
        words: What the derived seed is for, such as epoch, step and data device; not negative.

    Returns:
        A seed in ``[0, 2**63)``.
    """
    state = np.random.SeedSequence([seed, *words]).generate_state(1, np.uint64)
    return int(state[0]) & MAX_SEED


@dataclass(frozen=True)
class Sampler(ABC):
    """Decides which rows an epoch has and in what order: a frozen value, the same on every process.

    A subclass is a frozen dataclass of what decides the order, and defines `grid`. Its fields are
    its identity, which checkpoints hold and ranks compare: ints, strings, bools and None, and
    whatever has an ``identity`` of such values.

    Args:
        shards: The rows, and the shards that they are divided into.
    """

    shards: Shards

    #: Whether the epoch has the rows in dataset order, each once.
    is_sequential: ClassVar[bool] = False

    @abstractmethod
    def grid(
        self, epoch: int, first: int, last: int, shards: Integers, starts: Integers
    ) -> Integers:
        """Which rows supply a grid of positions.

        Positions fill a grid with one column per shard: row ``j`` has the positions
        ``j * C`` to ``j * C + C - 1``.

        Args:
            epoch: Epoch, counted from 0.
            first: First row of the grid.
            last: Last row of the grid.
            shards: The columns that are wanted, int64 of shape (S,).
            starts: Added to the offsets of each of these shards, int64 of shape (S,).

        Returns:
            Offset within its shard, plus the shard's start, of the row at each place of the grid:
            int64 of shape ((last + 1 - first) * S,), row by row. Undefined behind the last
            position.
        """

    @property
    def num_positions(self) -> int:
        """Positions of an epoch, ``N``."""
        return self.shards.num_rows

    @property
    def num_shards(self) -> int:
        """Shards, ``C``."""
        return self.shards.num_shards

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the order, as JSON values."""
        values = {field.name: identity_of(getattr(self, field.name)) for field in fields(self)}
        return {"sampler": type(self).__name__, **values}

    def at(self, epoch: int, positions: range) -> tuple[Integers, Integers]:
        """Which rows supply these positions.

        Args:
            epoch: Epoch, counted from 0.
            positions: Ascending positions in ``[0, num_positions)``; the step of the range must
                be 1 or divide the number of shards.

        Returns:
            The shard and the offset within the shard of each position, both int64 of shape
            (len(positions),).

        Raises:
            ValueError: The step does not divide the number of shards.
        """
        shards, kept, grid = self._grid_of(epoch, positions, None)
        return np.tile(shards, len(grid) // len(shards))[kept], grid[kept]

    def row_offsets(self, epoch: int, positions: range, starts: Integers) -> Integers:
        """Where the rows lie that supply these positions.

        The same as ``starts[shards] + offsets`` with what `at` returns, in less time.

        Args:
            epoch: Epoch, counted from 0.
            positions: As for `at`.
            starts: Where each shard starts, int64 of shape (C,).

        Returns:
            int64 of shape (len(positions),).

        Raises:
            ValueError: As for `at`.
        """
        _, kept, grid = self._grid_of(epoch, positions, starts)
        return grid[kept]

    def dataset_rows(self, epoch: int, positions: range) -> Integers:
        """The dataset rows that supply these positions.

        Args:
            epoch: Epoch, counted from 0.
            positions: As for `at`.

        Returns:
            Rows of the dataset, int64 of shape (len(positions),).

        Raises:
            ValueError: As for `at`.
        """
        return self.shards.dataset_rows(*self.at(epoch, positions))

    def _grid_of(
        self, epoch: int, positions: range, starts: Integers | None
    ) -> tuple[Integers, slice, Integers]:
        """The smallest grid around positions, so that no element is ever divided.

        Returns:
            The shards of the columns; the slice of the grid that the positions are; the grid.
        """
        num, step = self.num_shards, positions.step
        if step != 1 and num % step:
            raise ValueError(f"positions={positions}: a step of {step} does not divide {num}")
        if not positions:
            return np.zeros(1, np.int64), slice(0, 0), np.empty(0, np.int64)
        shards = np.arange(positions[0] % step, num, step, dtype=np.int64)
        starts = np.zeros_like(shards) if starts is None else starts[shards]
        first, last = positions[0] // num, positions[-1] // num
        skip = (positions[0] - first * num) // step
        kept = slice(skip, skip + len(positions))
        return shards, kept, self.grid(epoch, first, last, shards, starts)


class WindowedSampler(Sampler):
    """A sampler that reads the store window by window: rows that come together also lie together.

    Position ``p`` is in window ``p // C // window_rows`` of the epoch. Rows that are read window by
    window, under ``residency="stream"``, need such a sampler or dataset order.
    """

    @property
    @abstractmethod
    def window_rows(self) -> int:
        """Rows of a shard in every window but the last."""

    def window_runs(self, epoch: int, number: int) -> list[range] | None:
        """The offsets of each shard that a window has, in runs of consecutive ones.

        In the last window, a shard that is one row shorter than others lacks the last offset.

        Args:
            epoch: Epoch, counted from 0.
            number: Window of the epoch, counted from 0.

        Returns:
            Ranges of offsets in the order in which they lie in the window, the same for each shard.
            None, in every window, where shards differ in them or a row comes twice: the rows of a
            window are then looked up position by position.
        """
        return None


def check_seed(seed: int) -> None:
    """Check a seed of an order.

    Args:
        seed: The seed.

    Raises:
        ValueError: It is negative or has more than 63 bits.
    """
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed={seed}: choose a seed from 0 to 2**63 - 1")


def check_sampler(sampler: object, shards: Shards) -> Sampler:
    """Check a sampler that the package does not know.

    Args:
        sampler: What a user's function or `SamplerFactory` has returned.
        shards: The shards that it was given.

    Returns:
        The sampler.

    Raises:
        TypeError: It is no frozen dataclass of values that checkpoints can hold.
        ValueError: It is over other shards, or its first rows are not rows of their shards.
    """
    name = type(sampler).__name__
    if not isinstance(sampler, Sampler) or sampler.shards.base != shards:
        raise ValueError(
            f"sampler: it returned {sampler!r}; return a lightning_memmap.sampling.Sampler over the"
            f" shards that it is given, {shards}"
        )
    if "__dataclass_fields__" not in vars(type(sampler)):
        raise TypeError(
            f"sampler: {name} is no dataclass, so that its order has no identity for checkpoints:"
            " write @dataclass(frozen=True) above the class"
        )
    for field in fields(sampler):
        value = getattr(sampler, field.name)
        if not isinstance(value, (int, str, type(None), Identified)):
            raise TypeError(
                f"sampler: {name}.{field.name}={value!r}; fields are ints, strings, bools or None,"
                " which checkpoints hold, or have an identity of these"
            )
    try:
        first = range(min(sampler.num_positions, 2 * sampler.num_shards))
        homes, offsets = sampler.at(0, first)
        is_right = len(offsets) == len(first) and offsets.dtype == np.int64
        sizes = sampler.shards.sizes[homes]
        is_right = is_right and bool(((offsets >= 0) & (offsets < sizes)).all())
    except (IndexError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"sampler: {name} does not work over the shards that it is given ({error}): where it"
            " needs others, a SamplerFactory makes it, such as Weighted(...)"
        ) from error
    if not is_right:
        raise ValueError(
            f"sampler: {name}.grid returned {offsets!r} for the first {len(first)} positions;"
            " return int64 offsets within each shard, plus its start, row by row"
        )
    return sampler
