"""The data order: one stream of rows that every strategy and device count reads alike.

Integers only: no file, no tensor, no device. An epoch is a stream of positions
``p = 0 .. N-1``. Position ``p`` is supplied by shard ``c = p % C``: the row at offset
``perm(seed, epoch, c)[p // C]`` of that shard, or at offset ``p // C`` when not shuffled.
Row ``i`` of the dataset is the row at offset ``i // C`` of shard ``i % C``.

The permutation is computed, never stored: set-up time and memory do not grow with the
number of rows, and any position can be asked for at any time.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Digits = NDArray[np.uint32]

_ROUNDS = 8
_MAX_SEED = 2**63 - 1


def shard_rows(num_rows: int, num_shards: int) -> Integers:
    """Rows in each shard: row ``i`` is in shard ``i % num_shards``.

    Returns:
        int64 array of shape (num_shards,) that sums to ``num_rows``.
    """
    shards = np.arange(num_shards, dtype=np.int64)
    return (num_rows - shards + num_shards - 1) // num_shards


def shard_starts(num_rows: int, num_shards: int) -> Integers:
    """Where each shard starts in a file that holds shard 0's rows, then shard 1's, and so on.

    Returns:
        int64 array of shape (num_shards,), in rows.
    """
    rows = shard_rows(num_rows, num_shards)
    return np.cumsum(rows) - rows


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

    Raises:
        ValueError: A count below 1, or a seed out of range.
    """

    num_rows: int
    num_shards: int
    seed: int = 0
    shuffle: bool = False

    def __post_init__(self) -> None:
        for name in ("num_rows", "num_shards"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1 is needed")
        if not 0 <= self.seed <= _MAX_SEED:
            raise ValueError(f"seed={self.seed}: choose a seed from 0 to 2**63 - 1")

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
        num, step = self.num_shards, positions.step
        if not positions:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        if step != 1 and num % step:
            raise ValueError(f"positions={positions}: a step of {step} does not divide {num}")
        # The positions fill a grid of one row per shard and one column per offset, read
        # column by column. No element is ever divided.
        first, last = positions[0] // num, positions[-1] // num
        shards = np.arange(positions[0] % step, num, step, dtype=np.int64)
        offsets = np.broadcast_to(
            np.arange(first, last + 1, dtype=np.int64), (len(shards), last + 1 - first)
        )
        if self.shuffle:
            offsets = self._permuted(epoch, shards, offsets)
        skip = (positions[0] - first * num) // step
        keep = slice(skip, skip + len(positions))
        return np.tile(shards, last + 1 - first)[keep], offsets.ravel(order="F")[keep]

    def _permuted(self, epoch: int, shards: Integers, offsets: Integers) -> Integers:
        # A keyed bijection of [0, high * low), applied again to each of the few results outside
        # the shard until it falls inside ("cycle walking"), which makes it one of the shard.
        sizes = shard_rows(self.num_rows, self.num_shards)
        low = math.isqrt(int(sizes[0]) - 1) + 1
        high = -(-int(sizes[0]) // low)
        tables = _round_tables(self.seed, epoch, self.num_shards, high, low)
        sizes = sizes[shards][:, None]
        permuted = _feistel(offsets, shards[:, None], tables, high, low)
        outside = permuted >= sizes
        # The last column may reach beyond the end of the shorter shards: nothing is there.
        outside[:, -1] &= offsets[:, -1] < sizes[:, 0]
        row, column = np.nonzero(outside)
        while len(row):
            again = _feistel(permuted[row, column], shards[row], tables, high, low)
            permuted[row, column] = again
            still = again >= sizes[row, 0]
            row, column = row[still], column[still]
        return permuted


@lru_cache(maxsize=4)
def _round_tables(seed: int, epoch: int, num_shards: int, high: int, low: int) -> list[Digits]:
    """The round functions of `_feistel`: for each round and shard a table of random integers,
    those of even rounds in ``[0, high)`` by low digit, of odd ones in ``[0, low)`` by high."""
    bits = np.random.Philox(key=np.array([seed, epoch], np.uint64))
    tables = []
    for index in range(_ROUNDS):
        length, bound = (low, high) if index % 2 == 0 else (high, low)
        raw = bits.random_raw(num_shards * length) >> np.uint64(32)
        tables.append(((raw * np.uint64(bound)) >> np.uint64(32)).astype(np.uint32))
    return tables


def _feistel(
    values: Integers, shards: Integers, tables: list[Digits], high: int, low: int
) -> Integers:
    """A bijection of ``[0, high * low)`` for each shard: a number is two digits, and each round
    adds to one of them, modulo its radix, a random function of the other (the generalised
    Feistel cipher of Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002)."""
    upper = (values // low).astype(np.uint32)
    lower = (values - upper * np.int64(low)).astype(np.uint32)
    by_low, by_high = (shards * low).astype(np.uint32), (shards * high).astype(np.uint32)
    for index, table in enumerate(tables):
        # Unsigned: where nothing wrapped around, subtracting the radix gives a huge number.
        if index % 2 == 0:
            upper += table[by_low + lower]
            np.minimum(upper, upper - np.uint32(high), out=upper)
        else:
            lower += table[by_high + upper]
            np.minimum(lower, lower - np.uint32(low), out=lower)
    return upper.astype(np.int64) * low + lower


@dataclass(frozen=True)
class StepPlan:
    """How the positions from ``start`` to the end of an epoch are cut into steps.

    Every step but the last two takes ``G`` positions. The last ones follow a rule that
    depends on ``N``, ``G`` and ``C`` alone, so that every process, whatever its rank, takes
    equally many steps with at least one row in each:

    - ``drop_last``: an incomplete last step is dropped;
    - otherwise a last step of ``C`` rows or more is taken as it is, and one of fewer rows
      shares evenly with the step before it;
    - where even the shared steps would be too short for the largest possible number of
      consumers, ``gcd(G, C)``, both become one step of less than ``2 * G`` rows. That happens
      only where ``G`` divides ``C``: one row per consumer and step leaves nothing to share.

    Args:
        num_rows: Rows of the epoch, ``N``.
        global_batch: Rows of a step over all processes, ``G``.
        num_shards: Shards of the stream, ``C``.
        drop_last: Drop the incomplete last step.
        start: Position of the first row that was not yet delivered.
    """

    num_rows: int
    global_batch: int
    num_shards: int
    drop_last: bool = False
    start: int = 0

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise ValueError(f"global_batch={self.global_batch}: at least 1 row is needed")
        if not 0 <= self.start <= self.num_rows:
            raise ValueError(f"start={self.start}: outside the epoch's {self.num_rows} rows")

    @property
    def _tail(self) -> tuple[int, ...]:
        full, left = divmod(self.num_rows - self.start, self.global_batch)
        if not left or self.drop_last:
            return ()
        if not full or left >= self.num_shards:
            return (left,)
        both = self.global_batch + left
        if both // 2 < math.gcd(self.global_batch, self.num_shards):
            return (both,)
        return (both - both // 2, both // 2)

    @property
    def _num_full(self) -> int:
        full, left = divmod(self.num_rows - self.start, self.global_batch)
        shared = bool(full and left and left < self.num_shards and not self.drop_last)
        return full - shared

    def __len__(self) -> int:
        return self._num_full + len(self._tail)

    def bounds(self, step: int) -> tuple[int, int]:
        """First and one-past-last position of a step, counted from this plan's start.

        Raises:
            IndexError: ``step`` is outside ``[0, len(plan))``.
        """
        if not 0 <= step < len(self):
            raise IndexError(f"step={step}: the plan has {len(self)} steps")
        full = self._num_full
        first = self.start + min(step, full) * self.global_batch
        if step < full:
            return first, first + self.global_batch
        tail = self._tail
        first += sum(tail[: step - full])
        return first, first + tail[step - full]


def striping(num_shards: int, num_consumers: int) -> int:
    """The number of shards to stream over so that the consumers divide it.

    Returns:
        ``num_shards`` where ``num_consumers`` divides it, else the next multiple of
        ``num_consumers``: rows are then dealt anew, and the order differs from that of the
        store's own shards.
    """
    return -(-num_shards // num_consumers) * num_consumers
