"""Orders: which row each position of an epoch holds.

An epoch has the positions ``0 .. N-1``. In every order, position ``p`` is served by shard
``p % C``. Rows therefore stay where they are stored, and a global batch holds the same rows under
every strategy and on any number of devices that divides C. An order only decides which row of the
shard it is::

    7 rows in 3 shards: shard 0 holds the rows 0, 3, 6, shard 1 the rows 1, 4, shard 2 the rows 2, 5

    position         0  1  2  3  4  5  6
    shard            0  1  2  0  1  2  0
    dataset order    0  1  2  3  4  5  6
    a shuffle        3  4  2  6  1  5  0     each shard permutes its own rows

Data device ``d`` of ``D`` holds the shards ``d, d + D, d + 2D ..``: here, one device holds all 3
shards, or 3 devices hold one each.

Orders whose permutations are computed for any position derive from `ComputedSampler`, and orders
that need a table of an epoch from `TableSampler` (see table_sampler.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, wraps
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self, override

from lightning_memmap.errors import check_integer
from lightning_memmap.integers import Integers
from lightning_memmap.sampling.identity import identity_of
from lightning_memmap.sampling.permutations import (
    Alike,
    BlockPermutation,
    Permutation,
    Tables,
    bit_generator,
    permuted,
)
from lightning_memmap.sampling.pool import Pool
from lightning_memmap.sampling.rows import shard_rows

MAX_SEED = 2**63 - 1
T = TypeVar("T")
S = TypeVar("S", bound="Sampler")


def derive_seed(seed: int, *words: int) -> int:
    """Derive a 63-bit seed from integers. Trailing zeros may not change it."""
    # No two generators share their numbers: a loader always passes the same number of words for a
    # step, and the seed of blocks, which has fewer, is the key of another kind of generator.
    state = np.random.SeedSequence([seed, *words]).generate_state(1, np.uint64)
    return int(state[0]) & MAX_SEED


def cached_per_epoch(make: Callable[[S, int], T]) -> Callable[[S, int], T]:
    """Cache what a method of an order returns for the last few epochs."""

    @wraps(make)
    def get(order: S, epoch: int) -> T:
        return order._tables.get(make.__name__, epoch, lambda: make(order, epoch))

    return get


def cached_once(make: Callable[[S], T]) -> Callable[[S], T]:
    """Cache what a method of an order returns. One thread computes it, and copies start empty."""

    @wraps(make)
    def get(order: S) -> T:
        return order._tables.get(make.__name__, 0, lambda: make(order))

    return get


# Each subclass is a dataclass itself: jsonargparse would not accept a user's class otherwise.
@dataclass(frozen=True)
class Sampler(ABC):
    """The order of an epoch: a frozen value, equal on every process.

    Its fields are its identity, which checkpoints store and ranks compare: ints, strings, bools
    and None, and objects whose ``identity`` consists of such values.

    Args:
        pool: The rows of each shard.
        seed: Seed of the order, ``0 <= seed < 2**63``.
        shuffle_block: Positions of a shard that form a block: they are permuted together, and read
            together when rows are streamed. None for a single block.

    Raises:
        TypeError: The pool isn't a `Pool`, or the seed or ``shuffle_block`` isn't an integer.
        ValueError: The seed is out of range, or ``shuffle_block`` is below 1.
    """

    pool: Pool
    seed: int = 0
    shuffle_block: int | None = field(default=None, kw_only=True)
    _tables: Tables = field(
        default_factory=Tables, init=False, repr=False, compare=False, kw_only=True
    )

    #: Whether the epoch has the rows in dataset order, each once.
    is_sequential: ClassVar[bool] = False
    #: Whether no row comes twice in an epoch.
    draws_each_row_once: ClassVar[bool] = False
    #: Incremented when the same fields stand for another order.
    version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not isinstance(self.pool, Pool):
            raise TypeError(
                f"{type(self).__name__}: pool={self.pool!r}: pass the pool that the function of"
                " sampler= receives"
            )
        object.__setattr__(self, "seed", check_seed(self.seed))
        if (block := self.shuffle_block) is not None:
            block = check_integer("shuffle_block", block, 1, "at least 1 row of a shard")
            object.__setattr__(self, "shuffle_block", block)

    @property
    def num_positions(self) -> int:
        """Positions of an epoch, ``N``."""
        return self.pool.num_rows

    @property
    def num_shards(self) -> int:
        """Shards, ``C``."""
        return self.pool.num_shards

    @cached_property
    def positions_per_shard(self) -> Integers:
        """Positions of each shard in an epoch, int64 of shape (C,)."""
        return shard_rows(self.num_positions, self.num_shards)

    @abstractmethod
    def grid(
        self, epoch: int, start: int, stop: int, shards: Integers, shard_starts: Integers
    ) -> Integers:
        """Look up the rows of a grid of positions, with one column per shard.

        Args:
            epoch: Epoch, counted from 0.
            start: First row of the grid. Row ``j`` holds the positions ``j * C .. j * C + C - 1``.
            stop: One past the last row of the grid.
            shards: The columns to look up, int64 of shape (S,).
            shard_starts: Added to the offsets within each of these shards, int64 of shape (S,).

        Returns:
            The offset of each row within its shard, plus the start of the shard: int64 of shape
            ((stop - start) * S,), row by row. Undefined past the last position.
        """

    def in_blocks(self, block: int) -> Self:
        """Return this order with ``block`` positions of each shard permuted together.

        Raises:
            ValueError: The order can't be divided into blocks.
        """
        return replace(self, shuffle_block=block)

    def block_runs(self, epoch: int, block_index: int) -> list[range] | None:
        """Return the offsets that a block holds of each shard, as runs of consecutive offsets.

        In the last block, a shard that is one row shorter than others lacks the last offset.

        Args:
            epoch: Epoch, counted from 0.
            block_index: Block of the epoch, counted from 0.

        Returns:
            Ranges of offsets, equal for all shards. None, for every block, if shards differ in
            them or a row is drawn twice.
        """
        if not self.is_sequential:
            return None
        assert self.shuffle_block is not None
        start = block_index * self.shuffle_block
        return [range(start, min(start + self.shuffle_block, self.pool.longest))]

    def rows_at(self, epoch: int, start: int, stop: int, shards: Integers) -> Integers:
        """Return the rows at the positions of a grid, as indices in the pool; see `grid`."""
        grid = self.grid(epoch, start, stop, shards, self.pool.starts[shards])
        positions = np.arange(start, stop, dtype=np.int64)[:, None] * self.num_shards + shards
        rows: Integers = grid[(positions < self.num_positions).ravel()]
        return rows

    def most_in_block(self, shard: int, values: Integers) -> int | None:
        """Return the most that the rows of a shard in any block have together.

        Args:
            shard: The shard.
            values: A number of each row of the shard, such as its items: int64 of shape (rows,).

        Returns:
            The sum. None if a block has one row per position, which may be any rows.
        """
        return None

    def clear(self) -> None:
        """Free all tables. They are computed again when they are needed."""
        self._tables.clear()

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The values that determine the order, as JSON values, the most telling ones first."""
        values = {item.name: identity_of(getattr(self, item.name)) for item in identifying(self)}
        identity: dict[str, Any] = {"sampler": type(self).__name__}
        if self.version > 1:
            identity["version"] = self.version
        identity |= {"shards": values.pop("pool"), **values}
        if self.num_positions != self.pool.rows.num_rows:
            identity["num_positions"] = self.num_positions
        return identity

    @property
    def epoch_columns(self) -> Sequence[Any]:
        """The columns that are read before each epoch; see `Column`."""
        return ()

    def results_in(self, epoch: int) -> dict[str, Any]:
        """Return which results of earlier epochs an epoch depends on, as JSON values."""
        return {}

    def locate(
        self, epoch: int, positions: range, shard_starts: Integers | None = None
    ) -> Integers:
        """Look up which rows of the pool are at these positions.

        Args:
            epoch: Epoch, counted from 0.
            positions: Ascending positions in ``[0, num_positions)``; the step of the range must
                be 1 or divide the number of shards.
            shard_starts: The index of each shard's first row, int64 of shape (C,); by default as
                in the pool, shard after shard.

        Returns:
            The offset of each row within its shard, plus the start of the shard: int64 of shape
            (len(positions),).

        Raises:
            ValueError: The step does not divide the number of shards.
        """
        num_shards = self.num_shards
        step = positions.step
        if step != 1 and num_shards % step:
            raise ValueError(f"positions={positions}: step {step} must divide {num_shards} shards")
        if not positions:
            return np.empty(0, np.int64)
        # The smallest grid around the positions: no division per element.
        shards = np.arange(positions[0] % step, num_shards, step, dtype=np.int64)
        shard_starts = self.pool.starts if shard_starts is None else shard_starts
        start = positions[0] // num_shards
        stop = positions[-1] // num_shards + 1
        skip = (positions[0] - start * num_shards) // step
        grid = self.grid(epoch, start, stop, shards, shard_starts[shards])
        return grid[skip : skip + len(positions)]

    def num_rows_at(self, epoch: int, positions: Integers) -> Integers:
        """Count the rows of each position, int64 of the shape of ``positions``: 1 unless packed."""
        return np.ones_like(positions)

    def sums_at(self, values: NDArray[Any], epoch: int, positions: range) -> NDArray[Any]:
        """Add up a value of the rows at each position; only a pack has several rows.

        Args:
            values: The value of each row of the pool, of shape (pool.num_rows,).
            epoch: Epoch, counted from 0.
            positions: As for `locate`.

        Returns:
            Sums of shape (len(positions),).
        """
        sums: NDArray[Any] = values[self.locate(epoch, positions)]
        return sums

    def padded_dataset_rows(self, epoch: int, positions: range) -> Integers:
        """Return `dataset_rows` in one row per position, as the row numbers of batches.

        Returns:
            int64 of shape (len(positions),). If positions hold several rows, of shape
            (len(positions), most rows of a position), padded with -1.
        """
        return self.dataset_rows(epoch, positions)

    def dataset_rows(self, epoch: int, positions: range) -> Integers:
        """Look up which dataset rows are at these positions.

        Args:
            epoch: Epoch, counted from 0.
            positions: As for `locate`.

        Returns:
            Rows of the dataset, int64 of shape (len(positions),). If positions hold several rows,
            all of them, position after position; see `num_rows_at`.

        Raises:
            ValueError: As for `locate`.
        """
        pool = self.pool
        if pool.chosen is not None or not pool.is_striped:
            return pool.dataset_rows(self.locate(epoch, positions))
        # Row i belongs to shard i % C, so the shard need not be searched for.
        offsets = self.locate(epoch, positions, np.zeros_like(pool.starts))
        shards = np.arange(positions.start, positions.stop, positions.step) % pool.num_shards
        return pool.rows.dataset_rows(offsets * pool.num_shards + shards)


@dataclass(frozen=True)
class ComputedSampler(Sampler):
    """An order with each row of the pool once, computed for any position without a table.

    Raises:
        ValueError: The sizes of shards differ by more than one row.
    """

    draws_each_row_once: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not np.array_equal(self.pool.sizes, self.positions_per_shard):
            raise ValueError(
                f"{type(self).__name__}: its pool has {self.pool.num_rows} rows in shards of"
                f" {self.pool.sizes.min()} to {self.pool.sizes.max()} rows, so a shard's positions"
                " would not hold its rows: use a TableSampler, or a pool of Pool.of(rows, shards)"
            )

    @abstractmethod
    def permutation(self, epoch: int) -> Permutation:
        """Return the permutations of all shards in an epoch."""

    @cached_per_epoch
    def _permutation(self, epoch: int) -> Permutation:
        """Return the cached permutations of all shards in an epoch."""
        return self.permutation(epoch)

    @override
    def grid(
        self, epoch: int, start: int, stop: int, shards: Integers, shard_starts: Integers
    ) -> Integers:
        return self._permutation(epoch).grid(start, stop, shards, shard_starts)


@dataclass(frozen=True)
class SequentialSampler(ComputedSampler):
    """Keeps the rows in dataset order.

    Args:
        pool: The rows of each shard.
        seed: Not used: the order is the same for all seeds.
        shuffle_block: Rows of a shard that are read together when rows are streamed.

    Raises:
        ValueError: ``shuffle_block`` is below 1.
    """

    is_sequential: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.pool.is_striped:
            # Dataset order needs row i in shard i % C.
            object.__setattr__(self, "pool", Pool.of(self.pool.rows, self.num_shards, True))
        super().__post_init__()

    @override
    def permutation(self, epoch: int) -> Permutation:
        return Alike()


@dataclass(frozen=True)
class ShuffledSampler(ComputedSampler):
    """Permutes the rows of each shard, differently in each epoch. Permutations are computed.

    With a ``shuffle_block``, position ``p`` is in block ``p // C // shuffle_block`` of the epoch,
    and a block is ``shuffle_block`` consecutive rows of each shard, permuted shard by shard. The
    order of blocks and the row that the first block starts at differ from epoch to epoch. The rows
    of each shard that do not fill a block, and the one row by which shards differ, come last.

    Args:
        pool: The rows of each shard.
        seed: Seed of the permutations, ``0 <= seed < 2**63``.
        shuffle_block: Rows of a shard in a block; None for a single block.

    Raises:
        ValueError: The seed is out of range, or ``shuffle_block`` is below 1.
    """

    shuffle_block: int | None = None

    @override
    def permutation(self, epoch: int) -> Permutation:
        if self.shuffle_block is None:
            return permuted(self.positions_per_shard, bit_generator(self.seed, epoch))
        return BlockPermutation(self.positions_per_shard, self.shuffle_block, self.seed, epoch)

    @override
    def block_runs(self, epoch: int, block_index: int) -> list[range] | None:
        permutation = self._permutation(epoch)
        return permutation.runs(block_index) if isinstance(permutation, BlockPermutation) else None


def identifying(sampler: Sampler) -> list[Any]:
    """Return the dataclass fields that determine the order."""
    if sampler.is_sequential:
        return [fields(sampler)[0]]
    # num_samples shows as num_positions, however it was chosen.
    return [item for item in fields(sampler) if item.init and item.name != "num_samples"]


def check_seed(seed: int) -> int:
    """Check the seed of an order."""
    if not 0 <= check_integer("seed", seed) <= MAX_SEED:
        raise ValueError(f"seed={seed}: choose a seed from 0 to 2**63 - 1")
    return int(seed)
