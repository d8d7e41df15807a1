"""The data order: one stream of rows that every strategy and device count reads alike.

Integers only: no file, no tensor, no device. An epoch is a stream of positions
``p = 0 .. N-1``. Position ``p`` is supplied by shard ``c = p % C``: the row at offset
``perm(seed, epoch, c)[p // C]`` of that shard, or at offset ``p // C`` when not shuffled.
Row ``i`` of the dataset is the row at offset ``i // C`` of shard ``i % C``.

The permutation of a shard is computed, never stored, but for short shards: set-up time and memory
do not grow with the number of rows, and any position can be asked for at any time.

With a shuffle window, rows that come together also lie together: see `Stream`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Digits = NDArray[np.uint32]

#: Shards of fewer rows are each permuted by sorting: as evenly as a shuffle can be.
_LONG_SHARD = 1024
#: Shards of fewer rows have two sorted tables in common. Those of more have a cipher.
_VERY_LONG_SHARD = 65536
#: Rounds of the cipher that all shards share. Three more are each shard's own.
_COMMON_ROUNDS = 5
#: Offsets that are worked on at a time, which stay in the processor's cache.
_CACHED = 16384
_MAX_SEED = 2**63 - 1
#: Windows of an epoch whose order is kept: a step may reach from one into the next.
_KEPT_WINDOWS = 4


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
class RowSubset:
    """Every ``count``-th row of a dataset from ``index`` on, or all rows but those.

    The rows of a subset are numbered in dataset order, and make a dataset of their own: it is
    dealt to shards, permuted and cut into steps as if its rows alone had been stored.

    Args:
        index: The rows ``i`` with ``i % count == index`` are meant.
        count: Parts that the dataset is divided into so.
        excluded: The subset is all the other rows.

    Raises:
        ValueError: ``count`` is below 1, or below 2 where its rows are excluded, or ``index`` is
            outside ``[0, count)``.
    """

    index: int
    count: int
    excluded: bool = False

    def __post_init__(self) -> None:
        if self.count < 1 + self.excluded:
            raise ValueError(f"count={self.count}: at least {1 + self.excluded} parts are needed")
        if not 0 <= self.index < self.count:
            raise ValueError(f"index={self.index}: the parts are 0 to {self.count - 1}")

    def num_rows(self, num_rows: int) -> int:
        """Rows of the subset of a dataset with this many."""
        part = -(-(num_rows - self.index) // self.count)
        return num_rows - part if self.excluded else part

    def rows(self, numbers: Integers) -> Integers:
        """The dataset rows that the rows of the subset are.

        Args:
            numbers: Rows of the subset, int64 of shape (B,).

        Returns:
            Rows of the dataset, int64 of shape (B,).
        """
        if not self.excluded:
            return numbers * self.count + self.index
        rounds, left = np.divmod(numbers, self.count - 1)
        return rounds * self.count + left + (left >= self.index)


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
        assert self.shuffle_window is not None
        return _windows(*self._windowed(epoch)).runs(number)

    def _windowed(self, epoch: int) -> tuple[int, int, int, int, int]:
        assert self.shuffle_window is not None
        return self.seed, epoch, self.num_rows, self.num_shards, self.shuffle_window

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
        if self.shuffle_window is not None:
            windows = _windows(*self._windowed(epoch))
            return columns, keep, windows.grid(first, last, columns, begins)
        if self.shuffle:
            permutation = _permutation(self.seed, epoch, self.num_rows, num)
            return columns, keep, permutation.grid(first, last, columns, begins)
        offsets = np.arange(first, last + 1, dtype=np.int64)
        return columns, keep, np.add.outer(offsets, begins).ravel()


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, num_rows: int, num_shards: int) -> "_Permutation":
    """The permutation of each shard in one epoch."""
    bits = np.random.Philox(key=np.array([seed, epoch], np.uint64))
    return _permuted(shard_rows(num_rows, num_shards), bits)


class _Permutation(Protocol):
    """The permutations of all shards in one epoch."""

    def grid(self, first: int, last: int, columns: Integers, begins: Integers) -> Integers:
        """Permuted offsets for a grid of offsets and shards.

        Args:
            first: The first offset.
            last: The last offset.
            columns: Shards, int64 of shape (S,).
            begins: What is added to the offsets of each of these shards, int64 of shape (S,).

        Returns:
            int64 of shape ((last + 1 - first) * S,). What a short shard has not is undefined.
        """


@lru_cache(maxsize=4)
def _windows(seed: int, epoch: int, num_rows: int, num_shards: int, window: int) -> "_Windows":
    """The windows of one epoch, and their order."""
    return _Windows(seed, epoch, num_rows, num_shards, window)


class _Windows:
    """Permutations of shards window by window; see `Stream`.

    The rows that all shards have make a circle of offsets, and the windows are cut off it from
    somewhere on: in another epoch, other rows share a window. The row that some shards have more
    is in the last window.

    Args:
        seed: Seed of the stream.
        epoch: Epoch.
        num_rows: Rows of the stream.
        num_shards: Shards of the stream.
        window: Rows of a shard in a window.
    """

    def __init__(self, seed: int, epoch: int, num_rows: int, num_shards: int, window: int) -> None:
        self._words = seed, epoch, num_rows, num_shards, window
        self._window = window
        self._longest, self._round = -(-num_rows // num_shards), num_rows // num_shards
        self._num_full = self._round // window
        bits = _window_bits(seed, epoch, 1)
        self._start = int(bits.random_raw(1)[0]) % max(1, self._round)
        self._order = _permuted(np.array([max(1, self._num_full)]), bits)

    def runs(self, number: int) -> list[range]:
        """The offsets of a window, in runs of consecutive ones."""
        if number < self._num_full:
            zero = np.zeros(1, np.int64)
            block = int(self._order.grid(number, number, zero, zero)[0])
            size, more = self._window, 0
        else:
            block, size = number, self._round - number * self._window
            more = self._longest - self._round
        first = (self._start + block * self._window) % max(1, self._round)
        last = first + size
        runs = [range(first, min(last, self._round)), range(last - self._round)]
        runs.append(range(self._round, self._round + more))
        return [run for run in runs if run]

    def grid(self, first: int, last: int, columns: Integers, begins: Integers) -> Integers:
        """Permuted offsets; see `_Permutation`."""
        nothing = np.zeros_like(begins)
        pieces = []
        for number in range(first // self._window, last // self._window + 1):
            begin = number * self._window
            stop = min(last + 1, begin + self._window)
            within = _permutation_within(*self._words, number)
            grid = within.grid(max(first, begin) - begin, stop - 1 - begin, columns, nothing)
            pieces.append(spread(grid, self.runs(number)))
        offsets = np.concatenate(pieces).reshape(-1, len(columns))
        offsets += begins
        return offsets.ravel()


def spread(numbers: Integers, runs: Sequence[range]) -> Integers:
    """What stands at these places of the runs, one after the other.

    Args:
        numbers: Places, int64 of shape (B,).
        runs: Runs of integers, at least one. What lies behind the last one is undefined.

    Returns:
        int64 of shape (B,).
    """
    offsets = numbers + runs[0].start
    begin = len(runs[0])
    for run in runs[1:]:
        here = numbers >= begin
        offsets[here] = numbers[here] + (run.start - begin)
        begin += len(run)
    return offsets


@lru_cache(maxsize=_KEPT_WINDOWS)
def _permutation_within(
    seed: int, epoch: int, num_rows: int, num_shards: int, window: int, number: int
) -> "_Permutation":
    """The permutation of each shard's rows in one window."""
    sizes = np.clip(shard_rows(num_rows, num_shards) - number * window, 0, window)
    return _permuted(sizes, _window_bits(seed, epoch, 2 + number))


def _window_bits(seed: int, epoch: int, part: int) -> np.random.Philox:
    """Random bits of an epoch, in parts of the sequence of its key that `_permutation` does not
    reach."""
    key, counter = np.array([seed, epoch], np.uint64), np.array([0, 0, 0, part], np.uint64)
    return np.random.Philox(key=key, counter=counter)


def _permuted(sizes: Integers, bits: np.random.Philox) -> "_Permutation":
    """The permutations of sets of these sizes, which differ by one at most."""
    if sizes[0] < _LONG_SHARD:
        return _Sorted(sizes, bits)
    return _Rotated(sizes, bits) if sizes[0] < _VERY_LONG_SHARD else _Cipher(sizes, bits)


class _Sorted:
    """Permutations of short shards, each of its own.

    Args:
        sizes: Rows of each shard, int64 of shape (C,), which differ by one at most.
        bits: Random bits.
    """

    def __init__(self, sizes: Integers, bits: np.random.Philox) -> None:
        num_shards, largest = len(sizes), int(sizes[0])
        keys = _random_keys(bits, num_shards, largest)
        # What a shard has not sorts last.
        keys[sizes < largest, -1] = np.iinfo(np.uint64).max
        self._offsets = np.ascontiguousarray(_sorted_offsets(keys).T)

    def grid(self, first: int, last: int, columns: Integers, begins: Integers) -> Integers:
        """Permuted offsets; see `_Permutation`."""
        rows = self._offsets[first : last + 1]
        step = max(1, rows.shape[1] // len(columns))
        return np.add(rows[:, columns[0] :: step], begins).ravel()


class _Rotated:
    """Permutations of shards that two tables have in common, and a rotation of each shard between.

    With random permutations ``X`` and ``T`` of the largest shard's ``n`` offsets, the offset ``j``
    of shard ``c`` becomes ``T[(X[j] + r[c]) % n]``. Every shard's order is as random as a shuffle,
    and so is which rows of two shards come at the same place of their orders, but for those of
    the same offset: these never do, since no two rotations are the same.

    Args:
        sizes: Rows of each shard, int64 of shape (C,), which differ by one at most.
        bits: Random bits.
    """

    def __init__(self, sizes: Integers, bits: np.random.Philox) -> None:
        num_shards, largest = len(sizes), int(sizes[0])
        self._first, last = _sorted_offsets(_random_keys(bits, 2, largest)).astype(np.uint32)
        # Twice, so that nothing wraps around.
        self._last = np.concatenate([last, last])
        # One rotation from each of as many equal ranges, dealt at random.
        ranges = _sorted_offsets(_random_keys(bits, 1, num_shards))[0]
        bounds = np.arange(num_shards + 1) * largest // num_shards
        inside = _random_table(bits, 1, num_shards, 2**31)[0] % np.maximum(1, np.diff(bounds))
        self._rotations = (bounds[:-1] + inside)[ranges].astype(np.uint32)
        # A shard that is one row shorter has no last offset. Where that would come, there comes
        # what the last offset would become.
        short = np.flatnonzero(sizes < largest)
        turned = (np.flatnonzero(last == largest - 1) - self._rotations[short]) % largest
        self._short = np.full(num_shards, -1, np.int64)
        place = np.empty(largest, np.int64)
        place[self._first] = np.arange(largest)
        self._short[short] = place[turned]
        self._instead = self._last[self._first[-1] + self._rotations].astype(np.int64)

    def grid(self, first: int, last: int, columns: Integers, begins: Integers) -> Integers:
        """Permuted offsets; see `_Permutation`."""
        turned, num = self._first[first : last + 1], len(columns)
        step = min(max(1, _CACHED // num), len(turned))
        rotations, shifts = np.tile(self._rotations[columns], step), np.tile(begins, step)
        offsets = np.empty(len(turned) * num, np.int64)
        for start in range(0, len(offsets), step * num):
            places = np.repeat(turned[start // num : start // num + step], num)
            places += rotations[: len(places)]
            out = offsets[start : start + len(places)]
            np.add(self._last.take(places, mode="wrap"), shifts[: len(places)], out=out)
        at = self._short[columns]
        short = np.flatnonzero((at >= first) & (at <= last))
        offsets[(at[short] - first) * num + short] = (self._instead[columns] + begins)[short]
        return offsets


class _Cipher:
    """Permutations of long shards: computed for any offset, with tables of random integers that
    grow with the square root of the rows.

    A number is two digits, and each round adds to one of them, modulo its radix, a random function
    of the other: the generalised Feistel cipher of Black and Rogaway, "Ciphers with Arbitrary
    Finite Domains", 2002. The radix of the lower digit is a power of two, and what is added there
    is added bit by bit.

    The first rounds are common to all shards: an offset, which all shards have at about the same
    time, goes through those only once.

    Args:
        sizes: Rows of each shard, int64 of shape (C,), which differ by one at most.
        bits: Random bits.
    """

    def __init__(self, sizes: Integers, bits: np.random.Philox) -> None:
        num_shards, largest = len(sizes), int(sizes[0])
        self._bits = ((largest - 1).bit_length() + 1) // 2
        low = 2**self._bits
        self._high = -(-largest // low)
        self._common = [
            _random_table(bits, 1, *((self._high, low) if index % 2 else (low, self._high)))[0]
            for index in range(_COMMON_ROUNDS)
        ]
        # In the second of its three rounds, a shard's lower digit comes with the number of the
        # shard above it, and so is a place in a table: the first table brings that number in,
        # and the last one takes it out.
        number = np.arange(num_shards, dtype=np.uint32)[:, None] << np.uint32(self._bits)
        self._own = [
            (_random_table(bits, num_shards, self._high, low) | number).ravel(),
            _random_table(bits, num_shards, low, self._high).ravel(),
            (_random_table(bits, num_shards, self._high, low) | number).ravel(),
        ]
        self._smallest = int(sizes[-1])
        self._inside = self._walk(sizes)

    def grid(self, first: int, last: int, columns: Integers, begins: Integers) -> Integers:
        """Permuted offsets; see `_Permutation`."""
        upper, lower = self._begin(np.arange(first, last + 1, dtype=np.int64))
        num = len(columns)
        offsets = np.empty(len(upper) * num, np.int64)
        step = max(1, _CACHED // num)
        tables = np.tile((columns * self._high).astype(np.uint32), min(step, len(upper)))
        for start in range(0, len(upper), step):
            rows = slice(start, start + step)
            out = offsets[start * num : (start + step) * num]
            self._finish(np.repeat(upper[rows], num), np.repeat(lower[rows], num), tables, out)
        outside = np.flatnonzero(offsets >= self._smallest)
        found = offsets[outside] - self._smallest
        offsets[outside] = self._inside[found, columns[outside % num]]
        offsets += np.tile(begins, len(upper))
        return offsets

    def _begin(self, offsets: Integers) -> tuple[Digits, Digits]:
        """The upper and the lower digit of offsets after the common rounds."""
        upper = (offsets >> self._bits).astype(np.uint32)
        lower = (offsets & (2**self._bits - 1)).astype(np.uint32)
        for index, table in enumerate(self._common):
            if index % 2:
                lower ^= table[upper]
            else:
                self._add(upper, table[lower])
        return upper, lower

    def _finish(self, upper: Digits, lower: Digits, tables: Digits, out: Integers) -> None:
        """Offsets after the rounds of their shards; the digits are overwritten.

        Args:
            upper: Upper digits.
            lower: Lower digits.
            tables: Where the tables begin that are of an upper digit and of the digits' shard.
            out: For the offsets.
        """
        tables = tables[: len(upper)]
        places, found = np.empty_like(upper), np.empty_like(upper)
        # No place is outside a table: "wrap" is the fastest mode.
        np.add(upper, tables, out=places)
        lower ^= self._own[0].take(places, out=found, mode="wrap")
        self._add(upper, self._own[1].take(lower, out=found, mode="wrap"))
        np.add(upper, tables, out=places)
        lower ^= self._own[2].take(places, out=found, mode="wrap")
        if self._high << self._bits <= 2**32:
            upper <<= np.uint32(self._bits)
            upper |= lower
            out[:] = upper
        else:
            out[:] = upper
            out <<= self._bits
            out |= lower

    def _add(self, upper: Digits, other: Digits) -> None:
        """Add to upper digits; what is added is overwritten."""
        upper += other
        # Unsigned: where nothing wrapped around, subtracting the radix gives a huge number.
        np.subtract(upper, np.uint32(self._high), out=other)
        np.minimum(upper, other, out=upper)

    def _walk(self, sizes: Integers) -> Integers:
        """What to take instead of an offset outside its shard.

        That is the cipher applied again until it falls inside ("cycle walking"), which makes a
        bijection of the shard.

        Returns:
            int64 of shape (numbers of two digits from the smallest size on, C).
        """
        numbers = np.arange(self._smallest, self._high << self._bits, dtype=np.int64)
        shards = np.tile(np.arange(len(sizes), dtype=np.int64), len(numbers))
        start = np.repeat(numbers, len(sizes))
        inside = start.copy()
        left = np.flatnonzero(start >= sizes[shards])
        while len(left):
            where = shards[left]
            again = np.empty_like(where)
            tables = (where * self._high).astype(np.uint32)
            self._finish(*self._begin(inside[left]), tables, again)
            inside[left] = again
            # No offset inside leads to what comes back to where it began.
            left = left[(again >= sizes[where]) & (again != start[left])]
        return inside.reshape(len(numbers), len(sizes))


def _random_keys(bits: np.random.Philox, num_rows: int, length: int) -> NDArray[np.uint64]:
    """Random numbers of shape (num_rows, length), with their index in the row in the last bits."""
    width = np.uint64(length.bit_length())
    keys = bits.random_raw(num_rows * length).reshape(num_rows, length)
    keys >>= width
    keys <<= width
    keys |= np.arange(length, dtype=np.uint64)
    return keys


def _sorted_offsets(keys: NDArray[np.uint64]) -> Integers:
    """The indices of random keys in the order of their numbers; the keys are overwritten."""
    width = keys.shape[1].bit_length()
    keys.sort(axis=1)
    keys &= np.uint64(2**width - 1)
    return keys.view(np.int64)


def _random_table(bits: np.random.Philox, num_rows: int, length: int, bound: int) -> Digits:
    """Random integers in ``[0, bound)``, uint32 of shape (num_rows, length)."""
    # The high half of a product maps 32 random bits to the range, as evenly as they can be.
    raw = bits.random_raw(num_rows * length) >> np.uint64(32)
    raw *= np.uint64(bound)
    raw >>= np.uint64(32)
    return raw.astype(np.uint32).reshape(num_rows, length)


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

    @cached_property
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

    @cached_property
    def num_full(self) -> int:
        """Steps of full size, which all come before those of other sizes."""
        full, left = divmod(self.num_rows - self.start, self.global_batch)
        shared = bool(full and left and left < self.num_shards and not self.drop_last)
        return full - shared

    def __len__(self) -> int:
        return self.num_full + len(self._tail)

    def bounds(self, step: int) -> tuple[int, int]:
        """First and one-past-last position of a step, counted from this plan's start.

        Raises:
            IndexError: ``step`` is outside ``[0, len(plan))``.
        """
        if not 0 <= step < len(self):
            raise IndexError(f"step={step}: the plan has {len(self)} steps")
        full = self.num_full
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
