"""Permutations of shards, from random bits: computed, and stored for short shards only.

Set-up time and memory do not grow with the number of rows, or grow with its square root, and any
position can be looked up at any time. Integers only.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from threading import RLock
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_memmap.sampling.rows import Integers, Runs, firsts_of

Digits = NDArray[np.uint32]

#: Shorter shards are permuted by sorting random numbers, so that every order is equally likely.
_LONG_SHARD = 1024
#: Shorter shards share two sorted tables. Longer ones are permuted by a cipher.
_VERY_LONG_SHARD = 65536
#: Rounds of the cipher that all shards share. Each shard has three more of its own.
_COMMON_ROUNDS = 5
#: Offsets that are computed at a time, which stay in the processor's cache.
_CACHED = 16384
#: Epochs whose tables are kept: a stream reads the next one ahead.
_KEPT_EPOCHS = 2
#: Blocks of an epoch whose order is kept: a step may reach from one into the next. More where
#: their tables are small: those who draw rows come back to each block for other shards.
_KEPT_BLOCKS, _KEPT_BYTES = 4, 2**25
T = TypeVar("T")


class Tables:
    """What was made for the last epochs, or blocks, by kind. Copies begin empty."""

    def __init__(self, num_kept: int = _KEPT_EPOCHS) -> None:
        self._num_kept = num_kept
        self.lock = RLock()
        self._kept: dict[str, OrderedDict[int, Any]] = {}

    def get(self, kind: str, epoch: int, make: Callable[[], T]) -> T:
        """What was made before, or is made now, by one thread at a time."""
        with self.lock:
            kept = self._kept.setdefault(kind, OrderedDict())
            if epoch not in kept:
                kept[epoch] = make()
                if len(kept) > self._num_kept:
                    kept.popitem(last=False)
            kept.move_to_end(epoch)
            found: T = kept[epoch]
            return found

    def clear(self) -> None:
        """Free everything."""
        with self.lock:
            self._kept.clear()

    def __reduce__(self) -> tuple[type["Tables"], tuple[()]]:
        return Tables, ()


class Permutation(Protocol):
    """The permutations of all shards in one epoch."""

    def grid(self, first: int, last: int, columns: Integers, begins: Integers) -> Integers:
        """Permuted offsets for a grid of offsets and shards."""


def random_bits(seed: int, epoch: int, part: int = 0) -> np.random.Philox:
    """Random bits of an epoch and a use of them, of the counter-based generator Philox (2011)."""
    key, counter = np.array([seed, epoch], np.uint64), np.array([0, 0, 0, part], np.uint64)
    return np.random.Philox(key=key, counter=counter)


def permuted(sizes: Integers, bits: np.random.Philox) -> Permutation:
    """The permutations of sets of rows."""
    if sizes[0] < _LONG_SHARD:
        return _Sorted(sizes, bits)
    return _Rotated(sizes, bits) if sizes[0] < _VERY_LONG_SHARD else _Cipher(sizes, bits)


def order_within(groups: NDArray[Any], bits: np.random.Philox) -> Integers:
    """An order of things that is random within groups, which ascend."""
    # In one number with the random bits: several times as fast as two keys.
    width = int(groups.max(initial=0)).bit_length()
    keys = bits.random_raw(len(groups)) >> np.uint64(width)
    if width:
        keys |= groups.astype(np.uint64) << np.uint64(64 - width)
    order: Integers = keys.argsort()
    return order


def every(columns: Integers) -> Integers | slice:
    """Columns as a slice, which is several times as fast, where they are every so many."""
    if len(columns) == 1:
        return slice(int(columns[0]), int(columns[0]) + 1)
    first, last, step = int(columns[0]), int(columns[-1]), int(columns[1] - columns[0])
    is_slice = step > 0 and np.array_equal(columns, np.arange(first, last + 1, step))
    return slice(first, last + 1, step) if is_slice else columns


class Alike(NamedTuple):
    """The same order of all shards; by default that of the files."""

    order: Integers | None = None

    def grid(self, first: int, last: int, columns: Integers, begins: Integers) -> Integers:
        """Permuted offsets; see `Permutation`."""
        rows = np.arange(first, last + 1) if self.order is None else self.order[first : last + 1]
        return np.add.outer(rows, begins).ravel()


class _Sorted:
    """Permutations of short shards, independent of each other."""

    def __init__(self, sizes: Integers, bits: np.random.Philox) -> None:
        num_shards, largest = len(sizes), int(sizes[0])
        keys = _random_keys(bits, num_shards, largest)
        # Offsets that a shard lacks sort last.
        keys[sizes < largest, -1] = np.iinfo(np.uint64).max
        self._offsets = np.ascontiguousarray(_sorted_offsets(keys).T)

    def grid(self, first: int, last: int, columns: Integers, begins: Integers) -> Integers:
        """Permuted offsets; see `Permutation`."""
        rows = self._offsets[first : last + 1]
        offsets: Integers = np.add(rows[:, every(columns)], begins).ravel()
        return offsets


class _Rotated:
    """Permutations by two tables that all shards share, and a rotation of each shard in between."""

    # With random permutations X and T of the largest shard's n offsets, the offset j of shard c
    # becomes T[(X[j] + r[c]) % n]. Every shard's order is as random as a shuffle, and so is which
    # rows of two shards share a place in their orders, except rows of the same offset: these never
    # do, since no two rotations are the same.

    def __init__(self, sizes: Integers, bits: np.random.Philox) -> None:
        num_shards, largest = len(sizes), int(sizes[0])
        self._first, last = _sorted_offsets(_random_keys(bits, 2, largest)).astype(np.uint32)
        # Twice, so that nothing wraps around.
        self._last = np.concatenate([last, last])
        # One rotation from each of ``num_shards`` equal ranges, assigned at random.
        ranges = _sorted_offsets(_random_keys(bits, 1, num_shards))[0]
        bounds = np.arange(num_shards + 1) * largest // num_shards
        inside = _random_table(bits, 1, num_shards, 2**31)[0] % np.maximum(1, np.diff(bounds))
        self._rotations = (bounds[:-1] + inside)[ranges].astype(np.uint32)
        # A shard that is one row shorter has no last offset. In its place comes what the last
        # offset would become.
        short = np.flatnonzero(sizes < largest)
        self._short = np.full(num_shards, -1, np.int64)
        if len(short):
            turned = (np.flatnonzero(last == largest - 1) - self._rotations[short]) % largest
            place = np.empty(largest, np.int64)
            place[self._first] = np.arange(largest)
            self._short[short] = place[turned]
        self._instead = self._last[self._first[-1] + self._rotations].astype(np.int64)

    def grid(self, first: int, last: int, columns: Integers, begins: Integers) -> Integers:
        """Permuted offsets; see `Permutation`."""
        turned, rotations = self._first[first : last + 1, None], self._rotations[columns]
        offsets, step = np.empty((len(turned), len(columns)), np.int64), _CACHED // len(columns) + 1
        for start in range(0, len(turned), step):
            rows = slice(start, start + step)
            places = self._last.take(turned[rows] + rotations, mode="wrap")
            np.add(places, begins, out=offsets[rows])
        at = self._short[columns]
        short = np.flatnonzero((at >= first) & (at <= last))
        offsets[at[short] - first, short] = (self._instead[columns] + begins)[short]
        return offsets.ravel()


class _Cipher:
    """Permutations of long shards, computed for any offset from tables of random integers."""

    # A number is two digits, and each round adds to one of them, modulo its radix, a random
    # function of the other: the generalised Feistel cipher of Black and Rogaway, "Ciphers with
    # Arbitrary Finite Domains", 2002. The radix of the lower digit is a power of two, and addition
    # there is exclusive or. The first rounds are common to all shards: an offset, which all shards
    # need at about the same time, goes through them only once. Tables grow with the square root of
    # the rows.

    def __init__(self, sizes: Integers, bits: np.random.Philox) -> None:
        num_shards, largest = len(sizes), int(sizes[0])
        self._bits = ((largest - 1).bit_length() + 1) // 2
        low = 2**self._bits
        self._high = -(-largest // low)
        self._common = [
            _random_table(bits, 1, *((self._high, low) if index % 2 else (low, self._high)))[0]
            for index in range(_COMMON_ROUNDS)
        ]
        # In the second of its three rounds, a shard's lower digit has the number of the shard in
        # the bits above it, and so is an index into a table: the first table puts that number in,
        # and the last one removes it.
        number = np.arange(num_shards, dtype=np.uint32)[:, None] << np.uint32(self._bits)
        self._own = [
            _random_table(bits, num_shards, self._high, low),
            _random_table(bits, num_shards, low, self._high).ravel(),
            _random_table(bits, num_shards, self._high, low),
        ]
        for index in (0, 2):
            self._own[index] |= number
            self._own[index] = self._own[index].ravel()
        self._sizes = sizes

    def grid(self, first: int, last: int, columns: Integers, begins: Integers) -> Integers:
        """Permuted offsets; see `Permutation`."""
        upper, lower = self._begin(np.arange(first, last + 1, dtype=np.int64))
        num = len(columns)
        offsets = np.empty(len(upper) * num, np.int64)
        step = max(1, _CACHED // num)
        tables = np.tile((columns * self._high).astype(np.uint32), min(step, len(upper)))
        for start in range(0, len(upper), step):
            rows = slice(start, start + step)
            out = offsets[start * num : (start + step) * num]
            self._finish(np.repeat(upper[rows], num), np.repeat(lower[rows], num), tables, out)
        # Outside of their shards: "cycle walking" until they are inside, or where they began, as
        # only what is behind the last position does.
        left = np.flatnonzero(offsets >= self._sizes[-1])
        while len(left):
            shards, found = columns[left % num], offsets[left]
            is_left = (found >= self._sizes[shards]) & (found != first + left // num)
            left, tables = left[is_left], (shards[is_left] * self._high).astype(np.uint32)
            again = np.empty_like(left)
            self._finish(*self._begin(found[is_left]), tables, again)
            offsets[left] = again
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
        """Offsets after the rounds of their own shards; the digits are overwritten."""
        tables = tables[: len(upper)]
        places, found = np.empty_like(upper), np.empty_like(upper)
        # No index is outside a table: "wrap" is the fastest mode.
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
        """Add to upper digits; ``other`` is overwritten."""
        upper += other
        # Unsigned: where nothing wrapped around, subtracting the radix gives a huge number.
        np.subtract(upper, np.uint32(self._high), out=other)
        np.minimum(upper, other, out=upper)


def _random_keys(bits: np.random.Philox, num_rows: int, length: int) -> NDArray[np.uint64]:
    """Random numbers of shape (num_rows, length), with their index in the row in the last bits."""
    width = length.bit_length()
    keys = bits.random_raw(num_rows * length).reshape(num_rows, length)
    keys &= ~np.uint64(2**width - 1)
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
    table: Digits = raw.astype(np.uint32).reshape(num_rows, length)
    return table


class BlockPermutation:
    """Permutations of shards block by block: rows that come together also lie together."""

    # The offsets that all shards have form a circle, which is divided into blocks from a random
    # offset on: in another epoch, other rows share a block. What longer shards have more comes
    # last.

    def __init__(self, sizes: Integers, window: int, seed: int, epoch: int) -> None:
        self._sizes, self._window, self._words = sizes, window, (seed, epoch)
        # Rows that all shards have, and rows of the longest of them.
        self._round, self._longest = int(sizes[-1]), int(sizes[0])
        self._num_full = self._round // window
        bits = random_bits(seed, epoch, 1)
        self._start = int(bits.random_raw(1)[0]) % max(1, self._round)
        self._order = permuted(np.array([max(1, self._num_full)]), bits)
        table_bytes = 8 * window * (len(sizes) if window < _LONG_SHARD else 2)
        self._tables = Tables(max(_KEPT_BLOCKS, _KEPT_BYTES // table_bytes))

    def runs(self, number: int) -> list[range]:
        """The offsets of a block, one to three ranges, the same for each shard."""
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
        """Permuted offsets; see `Permutation`."""
        nothing = np.zeros_like(begins)
        pieces = []
        for number in range(first // self._window, last // self._window + 1):
            begin = number * self._window
            stop = min(last + 1, begin + self._window)
            within = self._tables.get("block", number, partial(self._within, number))
            grid = within.grid(max(first, begin) - begin, stop - 1 - begin, columns, nothing)
            if len(runs := self.runs(number)) == 1:
                pieces.append(grid + runs[0].start)
                continue
            at = firsts_of(np.array([len(run) for run in runs]))
            pieces.append(Runs(at, np.array([run.start for run in runs]) - at).at(grid))
        offsets = np.concatenate(pieces).reshape(-1, len(columns))
        offsets += begins
        return offsets.ravel()

    def _within(self, number: int) -> Permutation:
        """The permutation of each shard's rows in one block."""
        sizes = np.clip(self._sizes - number * self._window, 0, self._window)
        return permuted(sizes, random_bits(*self._words, 2 + number))
