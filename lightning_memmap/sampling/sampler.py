"""Orders: which rows an epoch has, and in what order.

An epoch has the positions ``p = 0 .. N-1``. Position ``p`` is supplied by shard ``c = p % C``,
whatever the order: that keeps rows where they are, and global batches the same under every
strategy and device count. An order says which row of the shard it is, in three steps: it draws
rows of the shard, permutes them, and arranges them. All tables are the order's own. Permutations
are computed where positions are looked up; what an order draws or arranges is a table of the epoch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial, wraps
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self, override

from lightning_memmap.errors import check_integer, is_refused_call
from lightning_memmap.sampling.identity import identity_of
from lightning_memmap.sampling.permutations import (
    Alike,
    BlockPermutation,
    Permutation,
    Tables,
    every,
    permuted,
    random_bits,
)
from lightning_memmap.sampling.pool import Pool
from lightning_memmap.sampling.rows import Integers, firsts_of

MAX_SEED = 2**63 - 1
#: Rows of shards that are drawn together: for short shards, that takes half of the time.
_TOGETHER = 2**18
T = TypeVar("T")
S = TypeVar("S", bound="Sampler")


def derive_seed(seed: int, *words: int) -> int:
    """A 63-bit seed that depends on the given integers; zeros behind the others do not count."""
    # No two generators share their numbers: for its steps, a loader gives as many words each time,
    # and the seed of blocks, which has fewer, is the key of another kind of generator.
    state = np.random.SeedSequence([seed, *words]).generate_state(1, np.uint64)
    return int(state[0]) & MAX_SEED


def kept(make: Callable[[S, int], T]) -> Callable[[S, int], T]:
    """A method of an order that makes a table of an epoch, which is kept for some epochs."""

    @wraps(make)
    def get(order: S, epoch: int) -> T:
        return order._tables.get(make.__name__, epoch, lambda: make(order, epoch))

    return get


# Not of dataclasses alone: jsonargparse would not take the class of a user's own for one.
@dataclass(frozen=True)
class Sampler(ABC):
    """Decides which rows an epoch has and in what order: a frozen value, the same on every process.

    As it stands, the rows of each shard come once, permuted. A subclass is a frozen dataclass that
    says otherwise: `draw` which rows of a shard an epoch has, `arrange` how they come once they
    are permuted, or `offsets` both. Where it leaves permuting to this class, the order comes in
    blocks too, and can be streamed. Its fields are its identity, which checkpoints hold and ranks
    compare: ints, strings, bools and None, and whatever has an ``identity`` of such values.

    Args:
        pool: The rows of each shard: ``pool.sizes[shard]`` rows for ``pool.counts[shard]``
            positions of an epoch.
        seed: Seed of the order, ``0 <= seed < 2**63``.
        shuffle_window: Positions of a shard that are permuted together, and read together where
            rows are streamed: a block. None for all.

    Raises:
        ValueError: The seed is out of range, or ``shuffle_window`` is below 1.
    """

    pool: Pool
    seed: int = 0
    shuffle_window: int | None = field(default=None, kw_only=True)
    _tables: Tables = field(
        default_factory=Tables, init=False, repr=False, compare=False, kw_only=True
    )

    #: Whether the epoch has the rows in dataset order, each once.
    is_sequential: ClassVar[bool] = False
    #: Counts up when the same fields stand for another order.
    version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if self.shuffle_window is not None and self.shuffle_window < 1:
            raise ValueError(f"shuffle_window={self.shuffle_window}: at least 1 row of a shard")

    def draw(self, epoch: int, shard: int) -> Integers:
        """The rows of a shard that an epoch has, in the order of the files or near it.

        Args:
            epoch: Epoch, counted from 0.
            shard: The shard.

        Returns:
            Offsets within the shard, int64 of shape (pool.counts[shard],).
        """
        return np.arange(self.pool.sizes[shard], dtype=np.int64)

    def draws(self, epoch: int, shards: Integers) -> NDArray[Any]:
        """The same of several shards, one after the other."""
        return self._checked("draw", epoch, shards)

    def permutation(self, epoch: int) -> Permutation:
        """How what is drawn is permuted: at random, block by block where there are blocks."""
        if self.shuffle_window is None:
            return permuted(self.pool.counts, random_bits(self.seed, epoch))
        # Other bits than those of draws.
        seed = self.seed if self._is_plain else derive_seed(self.seed, 1)
        return BlockPermutation(self.pool.counts, self.shuffle_window, seed, epoch)

    def arrange(self, epoch: int, shard: int, offsets: Integers) -> Integers:
        """The same as they come, once they are permuted."""
        return offsets

    def offsets(self, epoch: int, shard: int) -> Integers:
        """The row of each position of a shard: those of shard ``c`` are ``c``, ``c + C`` and so on.

        Args:
            epoch: Epoch, counted from 0.
            shard: The shard.

        Returns:
            Offsets within the shard, int64 of shape (pool.counts[shard],).
        """
        drawn = self._permuted(epoch, np.array([shard]))[: int(self.pool.counts[shard]), 0]
        return self.arrange(epoch, shard, drawn.astype(np.int64))

    def _permuted(self, epoch: int, shards: Integers) -> NDArray[Any]:
        """What shards draw, permuted, in columns."""
        drawn, counts = self.draws(epoch, shards), self.pool.counts
        if not len(drawn):  # No shard of these has a position.
            drawn = np.zeros(1, np.int64)
        firsts = firsts_of(counts[shards])
        order = self._permutation(epoch).grid(0, int(counts.max()) - 1, shards, firsts)
        # Only what is behind the last position is outside: "wrap" is the fastest mode.
        return drawn.take(order, mode="wrap").reshape(-1, len(shards))

    def grid(
        self, epoch: int, first: int, last: int, shards: Integers, starts: Integers
    ) -> Integers:
        """Which rows supply a grid of positions, with one column per shard.

        Args:
            epoch: Epoch, counted from 0.
            first: First row of the grid: row ``j`` has the positions from ``j * C`` on.
            last: Last row of the grid.
            shards: The columns that are wanted, int64 of shape (S,).
            starts: Added to the offsets of each of these shards, int64 of shape (S,).

        Returns:
            Offset within its shard, plus the shard's start, of the row at each place of the grid:
            int64 of shape ((last + 1 - first) * S,), row by row. Undefined behind the last
            position.
        """
        if self._is_plain:
            return self._permutation(epoch).grid(first, last, shards, starts)
        rows = self._table(epoch, shards)[first : last + 1]
        grid: Integers = np.add(rows[:, every(shards)], starts, dtype=np.int64).ravel()
        return grid

    def _overrides(self, *names: str) -> bool:
        """Whether a subclass has one of these methods itself."""
        return any(getattr(type(self), name) is not getattr(Sampler, name) for name in names)

    @property
    def _is_plain(self) -> bool:
        """Whether the epoch has all rows once, as they are permuted."""
        return not self._overrides("draw", "draws", "arrange", "offsets")

    def _table(self, epoch: int, shards: Integers) -> NDArray[Any]:
        """The offsets of shards in an epoch, of shape (positions of the longest, C)."""
        table, is_there = self._offsets(epoch)
        missing, is_arranged = shards[~is_there[shards]], self._overrides("arrange", "offsets")
        # One after the other, short shards would take several times as long.
        step = max(1, _TOGETHER // max(len(table), self.pool.longest))
        for begin in range(0, len(missing), step):
            some = missing[begin : begin + step]
            # At once: a thread that reads blocks may look up what another one makes again.
            if is_arranged:
                found, ends = self._checked("offsets", epoch, some), self.pool.counts[some].cumsum()
                for shard, each in zip(some, np.split(found, ends[:-1]), strict=True):
                    table[: len(each), shard] = each
            else:
                table[:, every(some)] = self._permuted(epoch, some)
            is_there[some] = True
        return table

    @kept
    def _offsets(self, epoch: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Room for the offsets that shards have, and which of these are there: none yet."""
        shape = int(self.pool.counts.max()), self.num_shards
        table = np.empty(shape, np.min_scalar_type(self.pool.longest))
        return table, np.zeros(self.num_shards, np.bool_)

    def _checked(self, name: str, epoch: int, shards: Integers) -> Integers:
        """What a method returns for some shards, once it is seen to be offsets within these."""
        found = list[NDArray[Any]]()
        for shard in shards.tolist():
            given = np.asarray(getattr(self, name)(epoch, shard))
            size, count = int(self.pool.sizes[shard]), int(self.pool.counts[shard])
            is_right = given.shape == (count,) and (given.dtype.kind in "iu" or not count)
            # A negative number is a huge one without a sign.
            if not is_right or (given.view(f"u{given.itemsize}") >= size).any():
                raise ValueError(
                    f"sampler: {type(self).__name__}.{name}(epoch={epoch}, shard={shard}) returned"
                    f" {given!r}: return {count} integers from 0 to {size - 1}, the offset"
                    " within the shard of the row at each of its positions"
                )
            found.append(given)
        return np.concatenate(found, dtype=np.int64, casting="unsafe")

    @kept
    def _permutation(self, epoch: int) -> Permutation:
        """The permutations of all shards."""
        return self.permutation(epoch)

    def in_blocks(self, block: int) -> Self:
        """The same order, permuted in blocks.

        Raises:
            ValueError: The sampler decides itself how rows come.
        """
        if self._overrides("offsets", "grid"):
            raise ValueError(
                f"shuffle_window={block}, and {type(self).__name__} decides itself how rows come:"
                " let it draw rows, and leave permuting them to its base class; or leave"
                " shuffle_window out, and use residency='mmap' or 'host' rather than 'stream'"
            )
        return replace(self, shuffle_window=block)

    def block_runs(self, epoch: int, number: int) -> list[range] | None:
        """The offsets that a block has of each shard, in runs of consecutive ones.

        In the last block, a shard that is one row shorter than others lacks the last offset.

        Args:
            epoch: Epoch, counted from 0.
            number: Block of the epoch, counted from 0.

        Returns:
            Ranges of offsets, the same for each shard. None, for every block, where shards differ
            in them or a row comes twice.
        """
        found = self._permutation(epoch) if self._is_plain else None
        return found.runs(number) if isinstance(found, BlockPermutation) else None

    def clear(self) -> None:
        """Free the tables; they are made again when they are needed."""
        self._tables.clear()

    @property
    def num_positions(self) -> int:
        """Positions of an epoch, ``N``."""
        return self.pool.num_positions

    @property
    def num_shards(self) -> int:
        """Shards, ``C``."""
        return self.pool.num_shards

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What decides the order, as JSON values: what says most of it first."""
        values = {each.name: identity_of(getattr(self, each.name)) for each in _identifying(self)}
        found: dict[str, Any] = {"sampler": type(self).__name__}
        if self.version > 1:
            found["version"] = self.version
        found |= {"shards": values.pop("pool"), **values}
        if self.num_positions != self.pool.rows.num_rows:
            found["num_positions"] = self.num_positions
        return found

    def index(self, epoch: int, positions: range, starts: Integers | None = None) -> Integers:
        """Which rows of the pool supply these positions.

        Args:
            epoch: Epoch, counted from 0.
            positions: Ascending positions in ``[0, num_positions)``; the step of the range must
                be 1 or divide the number of shards.
            starts: Where the rows of each shard begin, int64 of shape (C,); by default as in the
                pool, which counts rows shard after shard.

        Returns:
            The offset of each row within its shard, plus the start of the shard: int64 of shape
            (len(positions),).

        Raises:
            ValueError: The step does not divide the number of shards.
        """
        num, step = self.num_shards, positions.step
        if step != 1 and num % step:
            raise ValueError(f"positions={positions}: a step of {step} does not divide {num}")
        if not positions:
            return np.empty(0, np.int64)
        # The smallest grid around the positions, so that no element is ever divided.
        shards = np.arange(positions[0] % step, num, step, dtype=np.int64)
        starts = self.pool.starts if starts is None else starts
        first, last = positions[0] // num, positions[-1] // num
        skip = (positions[0] - first * num) // step
        return self.grid(epoch, first, last, shards, starts[shards])[skip : skip + len(positions)]

    def dataset_rows(self, epoch: int, positions: range) -> Integers:
        """The dataset rows that supply these positions.

        Args:
            epoch: Epoch, counted from 0.
            positions: As for `index`.

        Returns:
            Rows of the dataset, int64 of shape (len(positions),).

        Raises:
            ValueError: As for `index`.
        """
        pool = self.pool
        if pool.chosen is not None or not pool.is_striped:
            return pool.dataset_rows(self.index(epoch, positions))
        # Row i is in shard i % C: no shard is searched for.
        offsets = self.index(epoch, positions, np.zeros_like(pool.starts))
        shards = np.arange(positions.start, positions.stop, positions.step) % pool.num_shards
        return pool.rows.dataset_rows(offsets * pool.num_shards + shards)


@dataclass(frozen=True)
class SequentialSampler(Sampler):
    """Keeps the rows in dataset order.

    Args:
        pool: The rows of each shard.
        shuffle_window: Rows of a shard that are read together where rows are streamed.
    """

    is_sequential: ClassVar[bool] = True

    def __post_init__(self) -> None:
        pool = self.pool if self.pool.is_striped else Pool.of(self.pool.rows, self.num_shards, True)
        object.__setattr__(self, "pool", pool)

    @override
    def permutation(self, epoch: int) -> Permutation:
        return Alike()

    @override
    def block_runs(self, epoch: int, number: int) -> list[range] | None:
        assert self.shuffle_window is not None
        first = number * self.shuffle_window
        return [range(first, min(first + self.shuffle_window, self.pool.longest))]


@dataclass(frozen=True)
class ShuffledSampler(Sampler):
    """Permutes the rows of each shard, again in each epoch; the permutations are computed.

    With a ``shuffle_window``, position ``p`` is in block ``p // C // shuffle_window`` of the epoch,
    and a block is ``shuffle_window`` consecutive rows of each shard, permuted shard by shard. The
    blocks come in another order in each epoch, and the first of them starts at another row. The
    rows of each shard that do not fill a block, and the one row by which shards differ, come last.

    Args:
        pool: The rows of each shard.
        seed: Seed of the permutations, ``0 <= seed < 2**63``.
        shuffle_window: Rows of a shard in a block; None for all.

    Raises:
        ValueError: The seed is out of range, or ``shuffle_window`` is below 1.
    """

    shuffle_window: int | None = None


def _identifying(sampler: Sampler) -> list[Any]:
    """The fields that decide the order, which has no seed in dataset order."""
    return [each for each in fields(sampler) if each.init][: 1 if sampler.is_sequential else None]


def check_seed(seed: int) -> int:
    """Check a seed of an order."""
    if not 0 <= check_integer("seed", seed) <= MAX_SEED:
        raise ValueError(f"seed={seed}: choose a seed from 0 to 2**63 - 1")
    return int(seed)


def checked_positions(num_samples: int | None) -> int | None:
    """The positions of an epoch that a user asks for; None for as many as there are rows."""
    if num_samples is None:
        return None
    return check_integer("num_samples", num_samples, 1, "at least 1 position of an epoch")


class Fields(Protocol):
    """The fields of a dataset, which a sampler or a selection may look up. A store is one."""

    @property
    def num_rows(self) -> int:
        """Rows of the dataset."""

    def values(self, field: str, rows: Integers | None = None) -> NDArray[Any]:
        """The value of a field of each row.

        Args:
            field: Name of a field with one value in each row.
            rows: The rows, int64 of shape (N,); by default all, in dataset order.

        Returns:
            An array of shape (N,), of texts as objects.

        Raises:
            ValueError: There is no such field, its rows have more than one value, or the field is
                None in one of the rows; see `given`.
        """

    def given(self, field: str) -> NDArray[np.bool_]:
        """In which rows a field has a value.

        Args:
            field: Name of a field.

        Returns:
            Of shape (num_rows,), in dataset order: False where it is None.

        Raises:
            ValueError: There is no such field.
        """

    def lengths(self, field: str) -> Integers:
        """The length of each row of a field whose rows differ in length. No value is read.

        Args:
            field: Name of such a field.

        Returns:
            The items of each row, for text its bytes: int64 of shape (num_rows,), in dataset order.

        Raises:
            ValueError: There is no such field, or its rows have one length.
        """


class SamplerFactory(ABC):
    """Makes a sampler that needs fields of the dataset, for ``MemmapDataModule(sampler=...)``.

    If it needs none, a function of the pool and the seed will do.
    """

    #: The names of the training stores that it mixes; empty for one store without a name.
    stores: tuple[str, ...] = ()
    #: Whether the order depends on the rows of a global batch; see `Pool`.
    by_batch: bool = False

    @abstractmethod
    def make(self, pool: Pool, seed: int, fields: Fields) -> Sampler:
        """Make the sampler. It must not depend on anything else, such as the process.

        Args:
            pool: The training rows, and the shards that they are divided into.
            seed: Seed of the order.
            fields: The fields of the dataset.

        Returns:
            A sampler over this pool, or over a pool of other shards of its rows.
        """


def check_by_row(name: str, given: Any) -> None:
    """Check an argument that names a field, or has something for each row."""
    if not isinstance(given, str) and not np.ndim(given):
        raise TypeError(f"{name}={given!r}: give one for each row, or the name of a field")


def one_by_row(name: str, given: Any, num_rows: int) -> NDArray[Any]:
    """What is given for each row of a dataset, of shape (num_rows,)."""
    found = np.asarray(given)
    if found.shape != (num_rows,):
        raise ValueError(
            f"{name} of shape {found.shape}, and the dataset has {num_rows} rows: give one for"
            " each, or the name of a field"
        )
    return found


def made_sampler(
    maker: SamplerFactory | Callable[[Pool, int], Sampler],
    pool: Pool,
    seed: int,
    fields: Fields,
    block: int | None = None,
) -> Sampler:
    """Have a sampler made, and check it."""
    make = partial(maker.make, fields=fields) if isinstance(maker, SamplerFactory) else maker
    try:
        sampler = make(pool, seed)
    except TypeError as error:
        if not is_refused_call(error):
            raise
        raise TypeError(
            f"sampler={maker!r}: it cannot be called with the pool of rows and the seed"
            f" ({error}): give a function of these two that returns a sampler, or Weighted(...)"
        ) from error
    _check_sampler(sampler, pool)
    return sampler if block is None else sampler.in_blocks(block)


def _check_sampler(sampler: object, pool: Pool) -> None:
    """Check a sampler that the package does not know. One shard of it is drawn."""
    name = type(sampler).__name__
    is_over = isinstance(sampler, Sampler) and sampler.pool.identity == pool.identity
    if not isinstance(sampler, Sampler) or not is_over:
        raise ValueError(
            f"sampler: it returned {sampler!r}; return a lightning_memmap.sampling.Sampler over the"
            f" pool of rows that it is given, {pool}"
        )
    if "__dataclass_fields__" not in vars(type(sampler)):
        raise TypeError(
            f"sampler: {name} is no dataclass, so that its order has no identity for checkpoints:"
            " write @dataclass(frozen=True) above the class"
        )
    for each in _identifying(sampler):
        value = getattr(sampler, each.name)
        if not isinstance(identity_of(value), (int, str, Mapping, type(None))):
            raise TypeError(
                f"sampler: {name}.{each.name}={value!r}; fields are ints, strings, bools or None,"
                " which checkpoints hold, or have an identity of these"
            )
    try:
        zero = np.zeros(1, np.int64)
        offsets = sampler.grid(0, 0, 0, zero, zero)
    except (IndexError, TypeError, AttributeError) as error:
        raise ValueError(
            f"sampler: {name} does not work over the pool of rows that it is given ({error}): where"
            " it needs another one, a SamplerFactory makes it, such as Weighted(...)"
        ) from error
    if not (offsets.shape == (1,) and 0 <= offsets[0] < sampler.pool.sizes[0]):
        raise ValueError(f"sampler: {name}.grid returned {offsets!r}, which are not in shard 0")
