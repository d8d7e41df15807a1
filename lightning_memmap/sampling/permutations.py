"""Permutations of the rows of shards, computed from random bits for any position.

Three constructions, by the rows of the longest shard. Times are for 65,536 positions at a time in
24 shards, on one core of an AMD EPYC (tests/programs/benchmarks/order.py)::

                 rows          tables                       ns per row
    _Sorted      < 1,024       8 bytes per row              1.4
    _Rotated     < 65,536      12 bytes per row of a shard  2.5
    _Cipher      from there on square root of the rows      7

A cipher for all shards of 1,024 rows or more would be simpler. It adds 0.3 us to a step of 64 rows,
which takes 5 us if rows are small. Blocks of a shuffle are permuted one by one
(`BlockPermutation`).
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from threading import RLock
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_memmap.integers import Integers, Runs, ceil_div, starts_of

Digits = NDArray[np.uint32]

#: Rows of a shard from which `_Rotated` is used. Below, every order is equally likely.
_LONG_SHARD = 1024
#: Rows of a shard from which `_Cipher` is used.
_VERY_LONG_SHARD = 65536
#: Rounds of the cipher that all shards share. Each shard adds three rounds.
_COMMON_ROUNDS = 5
#: Offsets that are computed at a time, so that they stay in the processor's cache.
_CHUNK = 16384
#: Epochs whose tables are cached: a stream reads the next epoch ahead.
_CACHED_EPOCHS = 2
#: Blocks of an epoch whose permutations are cached, since a step may span two of them. More if
#: their tables are small: an order that draws rows returns to each block for other shards.
_MIN_CACHED_BLOCKS = 4
_CACHED_BLOCK_BYTES = 2**25
T = TypeVar("T")


class Tables:
    """A cache of tables by kind and by epoch or block, the last few of each kind.

    One thread at a time computes a table. Copies and pickles start empty.
    """

    def __init__(self, max_cached: int = _CACHED_EPOCHS) -> None:
        self._max_cached = max_cached
        self.lock = RLock()
        self._caches: dict[str, OrderedDict[int, Any]] = {}

    def get(self, kind: str, key: int, make: Callable[[], T]) -> T:
        """Return the table of an epoch or block, computing it if it isn't cached."""
        with self.lock:
            cache = self._caches.setdefault(kind, OrderedDict())
            if key not in cache:
                cache[key] = make()
                if len(cache) > self._max_cached:
                    cache.popitem(last=False)
            cache.move_to_end(key)
            table: T = cache[key]
            return table

    def clear(self) -> None:
        """Free all tables."""
        with self.lock:
            self._caches.clear()

    def __reduce__(self) -> tuple[type["Tables"], tuple[()]]:
        return Tables, ()


class Permutation(Protocol):
    """The permutations of all shards in one epoch."""

    def grid(self, start: int, stop: int, shards: Integers, shard_starts: Integers) -> Integers:
        """Permute the offsets ``start .. stop - 1`` of each shard, and add the shard's start.

        Args:
            start: First offset.
            stop: One past the last offset.
            shards: The shards, int64 of shape (S,).
            shard_starts: Added to each shard's offsets, int64 of shape (S,).

        Returns:
            int64 of shape ((stop - start) * S,), offset by offset.
        """


def bit_generator(seed: int, epoch: int, stream: int = 0) -> np.random.Philox:
    """Return random bits of an epoch; each ``stream`` of them has one use.

    The counter-based generator is Philox of Salmon et al., "Parallel Random Numbers: As Easy as 1,
    2, 3", 2011.
    """
    key = np.array([seed, epoch], np.uint64)
    counter = np.array([0, 0, 0, stream], np.uint64)
    return np.random.Philox(key=key, counter=counter)


def permuted(sizes: Integers, bits: np.random.Philox) -> Permutation:
    """Return random permutations of shards of these sizes, the first of which is the largest."""
    if sizes[0] < _LONG_SHARD:
        return _Sorted(sizes, bits)
    return _Rotated(sizes, bits) if sizes[0] < _VERY_LONG_SHARD else _Cipher(sizes, bits)


def order_within(groups: NDArray[Any], bits: np.random.Philox) -> Integers:
    """Sort items by group, at random within each group, and return their indices in that order."""
    # A single key of group and random bits is several times as fast as two keys.
    width = int(groups.max(initial=0)).bit_length()
    keys = bits.random_raw(len(groups)) >> np.uint64(width)
    if width:
        keys |= groups.astype(np.uint64) << np.uint64(64 - width)
    order: Integers = keys.argsort()
    return order


def as_slice(columns: Integers) -> Integers | slice:
    """Return evenly spaced columns as a slice, which indexes several times as fast."""
    start = int(columns[0])
    stop = int(columns[-1]) + 1
    if len(columns) == 1:
        return slice(start, stop)
    step = int(columns[1] - columns[0])
    is_even = step > 0 and np.array_equal(columns, np.arange(start, stop, step))
    return slice(start, stop, step) if is_even else columns


class Alike(NamedTuple):
    """One order of offsets for all shards; by default ascending."""

    order: Integers | None = None

    def grid(self, start: int, stop: int, shards: Integers, shard_starts: Integers) -> Integers:
        """Permute offsets; see `Permutation`."""
        offsets = np.arange(start, stop) if self.order is None else self.order[start:stop]
        return np.add.outer(offsets, shard_starts).ravel()


class _Sorted:
    """Independent permutations of short shards, by sorting random numbers."""

    def __init__(self, sizes: Integers, bits: np.random.Philox) -> None:
        num_shards = len(sizes)
        largest = int(sizes[0])
        keys = _random_keys(bits, num_shards, largest)
        # Offsets that a shard lacks sort last.
        keys[sizes < largest, -1] = np.iinfo(np.uint64).max
        self._offsets = np.ascontiguousarray(_sorted_offsets(keys).T)

    def grid(self, start: int, stop: int, shards: Integers, shard_starts: Integers) -> Integers:
        """Permute offsets; see `Permutation`."""
        rows = self._offsets[start:stop]
        offsets: Integers = np.add(rows[:, as_slice(shards)], shard_starts).ravel()
        return offsets


class _Rotated:
    """Permutations by two tables that all shards share, and a rotation per shard in between."""

    # With random permutations X and T of the largest shard's n offsets, the offset j of shard c
    # becomes T[(X[j] + r[c]) % n]. Every shard's order is as random as a shuffle. Which rows of two
    # shards meet at one position is random too, except that rows of equal offset never meet, since
    # no two shards have the same rotation (unless there are more shards than offsets).
    # n = 4, X = 2 0 3 1, T = 1 3 0 2, and shards rotated by 0 and 1:
    #     X[j]              2 0 3 1
    #     shard 0  T[X]     0 1 2 3        shard 1  T[(X + 1) % 4]     2 3 1 0

    def __init__(self, sizes: Integers, bits: np.random.Philox) -> None:
        num_shards = len(sizes)
        largest = int(sizes[0])
        self._first, last = _sorted_offsets(_random_keys(bits, 2, largest)).astype(np.uint32)
        # Repeated once, so that nothing wraps around.
        self._last = np.concatenate([last, last])
        # One rotation from each of ``num_shards`` equal ranges, assigned at random.
        ranges = _sorted_offsets(_random_keys(bits, 1, num_shards))[0]
        bounds = np.arange(num_shards + 1) * largest // num_shards
        inside = _random_table(bits, 1, num_shards, 2**31)[0] % np.maximum(1, np.diff(bounds))
        self._rotations = (bounds[:-1] + inside)[ranges].astype(np.uint32)
        # A shard that is one row shorter lacks the last offset, so the image of the last offset
        # replaces it.
        is_short = np.flatnonzero(sizes < largest)
        self._replaced = np.full(num_shards, -1, np.int64)
        if len(is_short):
            rotated = (np.flatnonzero(last == largest - 1) - self._rotations[is_short]) % largest
            inverse = np.empty(largest, np.int64)
            inverse[self._first] = np.arange(largest)
            self._replaced[is_short] = inverse[rotated]
        self._replacement = self._last[self._first[-1] + self._rotations].astype(np.int64)

    def grid(self, start: int, stop: int, shards: Integers, shard_starts: Integers) -> Integers:
        """Permute offsets; see `Permutation`."""
        first = self._first[start:stop, None]
        rotations = self._rotations[shards]
        offsets = np.empty((len(first), len(shards)), np.int64)
        step = _CHUNK // len(shards) + 1
        for chunk_start in range(0, len(first), step):
            chunk = slice(chunk_start, chunk_start + step)
            permuted_offsets = self._last.take(first[chunk] + rotations, mode="wrap")
            np.add(permuted_offsets, shard_starts, out=offsets[chunk])
        replaced = self._replaced[shards]
        short = np.flatnonzero((replaced >= start) & (replaced < stop))
        replacement = (self._replacement[shards] + shard_starts)[short]
        offsets[replaced[short] - start, short] = replacement
        return offsets.ravel()


class _Cipher:
    """Permutations of long shards, computed for any offset from tables of random integers."""

    # The generalised Feistel cipher of Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
    # 2002. An offset is split into two digits, and each round adds to one digit, modulo its radix,
    # a random function of the other digit. The radix of the lower digit is a power of two, where
    # addition is exclusive or. All shards share the first rounds, so an offset, which all shards
    # need at about the same time, passes through them once. Tables grow with the square root of
    # the rows.
    # 100 offsets are split into a high digit 0..6 and a low digit 0..15: 57 = (3, 9). Results from
    # 100 to 111 are permuted again until they are below 100 ("cycle walking").

    def __init__(self, sizes: Integers, bits: np.random.Philox) -> None:
        num_shards = len(sizes)
        largest = int(sizes[0])
        self._low_bits = ((largest - 1).bit_length() + 1) // 2
        low_radix = 2**self._low_bits
        self._high_radix = ceil_div(largest, low_radix)
        radices = low_radix, self._high_radix
        self._common = [
            _random_table(bits, 1, radices[index % 2], radices[1 - index % 2])[0]
            for index in range(_COMMON_ROUNDS)
        ]
        # In the second of a shard's three rounds, the bits above the lower digit hold the index of
        # the shard, so that together they index one table for all shards. The first table puts the
        # index in, and the last one removes it.
        shard_bits = np.arange(num_shards, dtype=np.uint32)[:, None] << np.uint32(self._low_bits)
        self._by_shard = [
            _random_table(bits, num_shards, self._high_radix, low_radix),
            _random_table(bits, num_shards, low_radix, self._high_radix).ravel(),
            _random_table(bits, num_shards, self._high_radix, low_radix),
        ]
        for index in (0, 2):
            self._by_shard[index] |= shard_bits
            self._by_shard[index] = self._by_shard[index].ravel()
        self._sizes = sizes

    def grid(self, start: int, stop: int, shards: Integers, shard_starts: Integers) -> Integers:
        """Permute offsets; see `Permutation`."""
        upper, lower = self._common_rounds(np.arange(start, stop, dtype=np.int64))
        # Offset by offset, with a column for each of the shards.
        num_columns = len(shards)
        results = np.empty(len(upper) * num_columns, np.int64)
        step = max(1, _CHUNK // num_columns)
        table_starts = (shards * self._high_radix).astype(np.uint32)
        chunk_table_starts = np.tile(table_starts, min(step, len(upper)))
        for chunk_start in range(0, len(upper), step):
            chunk = slice(chunk_start, chunk_start + step)
            out = results[chunk_start * num_columns : (chunk_start + step) * num_columns]
            chunk_upper = np.repeat(upper[chunk], num_columns)
            chunk_lower = np.repeat(lower[chunk], num_columns)
            self._shard_rounds(chunk_upper, chunk_lower, chunk_table_starts, out)
        # Results outside of their shard are permuted again until they are inside ("cycle walking"),
        # or back at their offset, which only happens behind the last position.
        outside = np.flatnonzero(results >= self._sizes[-1])
        while len(outside):
            columns = outside % num_columns
            offsets = results[outside]
            is_outside = offsets >= self._sizes[shards[columns]]
            is_outside &= offsets != start + outside // num_columns
            outside = outside[is_outside]
            digits = self._common_rounds(offsets[is_outside])
            again = np.empty_like(outside)
            self._shard_rounds(*digits, table_starts[columns[is_outside]], again)
            results[outside] = again
        results += np.tile(shard_starts, len(upper))
        return results

    def _common_rounds(self, offsets: Integers) -> tuple[Digits, Digits]:
        """Split offsets into digits, and apply the rounds that all shards share."""
        upper = (offsets >> self._low_bits).astype(np.uint32)
        lower = (offsets & (2**self._low_bits - 1)).astype(np.uint32)
        for index, table in enumerate(self._common):
            if index % 2:
                lower ^= table[upper]
            else:
                self._add(upper, table[lower])
        return upper, lower

    def _shard_rounds(
        self, upper: Digits, lower: Digits, table_starts: Digits, out: Integers
    ) -> None:
        """Apply the rounds of each shard, and write the offsets to ``out``. Overwrites digits.

        ``table_starts`` is where the table of each offset's shard starts in the first and the last
        of the shards' tables.
        """
        table_starts = table_starts[: len(upper)]
        index = np.empty_like(upper)
        values = np.empty_like(upper)
        # All indices are valid: "wrap" is the fastest mode.
        np.add(upper, table_starts, out=index)
        lower ^= self._by_shard[0].take(index, out=values, mode="wrap")
        self._add(upper, self._by_shard[1].take(lower, out=values, mode="wrap"))
        np.add(upper, table_starts, out=index)
        lower ^= self._by_shard[2].take(index, out=values, mode="wrap")
        if self._high_radix << self._low_bits <= 2**32:
            upper <<= np.uint32(self._low_bits)
            upper |= lower
            out[:] = upper
        else:
            out[:] = upper
            out <<= self._low_bits
            out |= lower

    def _add(self, upper: Digits, other: Digits) -> None:
        """Add to upper digits modulo their radix. Overwrites ``other``."""
        upper += other
        # Unsigned: below the radix, subtracting it results in a huge number.
        np.subtract(upper, np.uint32(self._high_radix), out=other)
        np.minimum(upper, other, out=upper)


def _random_keys(bits: np.random.Philox, num_rows: int, length: int) -> NDArray[np.uint64]:
    """Return random keys of shape (num_rows, length), whose last bits hold their column."""
    width = length.bit_length()
    keys = bits.random_raw(num_rows * length).reshape(num_rows, length)
    keys &= ~np.uint64(2**width - 1)
    keys |= np.arange(length, dtype=np.uint64)
    return keys


def _sorted_offsets(keys: NDArray[np.uint64]) -> Integers:
    """Sort keys row by row, and return their columns. Overwrites the keys."""
    width = keys.shape[1].bit_length()
    keys.sort(axis=1)
    keys &= np.uint64(2**width - 1)
    return keys.view(np.int64)


def _random_table(bits: np.random.Philox, num_rows: int, length: int, bound: int) -> Digits:
    """Return random integers in ``[0, bound)``, uint32 of shape (num_rows, length)."""
    # The high half of a product maps 32 random bits to the range as evenly as possible.
    raw = bits.random_raw(num_rows * length) >> np.uint64(32)
    raw *= np.uint64(bound)
    raw >>= np.uint64(32)
    table: Digits = raw.astype(np.uint32).reshape(num_rows, length)
    return table


class BlockPermutation:
    """Permutations of shards in blocks of consecutive rows, which can be read together."""

    # The offsets that all shards have form a circle, which is cut into blocks from a random offset
    # on, so that other rows share a block in each epoch. Blocks are permuted, and so are the rows
    # of each shard within a block. The rest of the circle, and the row by which some shards are
    # longer, form the last block.
    # Shards of 8, 7 and 7 rows, blocks of 3, cut at offset 5, blocks in the order 1, 0:
    #     block 0         block 1         last block
    #     1 2 3           5 6 0           4, and 7 in shard 0

    def __init__(self, sizes: Integers, block: int, seed: int, epoch: int) -> None:
        self._sizes = sizes
        self._block = block
        self._words = seed, epoch
        self._shared = int(sizes[-1])  # rows that all shards have
        self._longest = int(sizes[0])
        self._num_full = self._shared // block
        bits = bit_generator(seed, epoch, 1)
        self._start = int(bits.random_raw(1)[0]) % max(1, self._shared)
        self._order = permuted(np.array([max(1, self._num_full)]), bits)
        table_bytes = 8 * block * (len(sizes) if block < _LONG_SHARD else 2)
        self._tables = Tables(max(_MIN_CACHED_BLOCKS, _CACHED_BLOCK_BYTES // table_bytes))

    def runs(self, block_index: int) -> list[range]:
        """Return the offsets of a block, one to three ranges, equal for all shards."""
        num_extra = 0
        size = self._block
        if block_index < self._num_full:
            zero = np.zeros(1, np.int64)
            index = int(self._order.grid(block_index, block_index + 1, zero, zero)[0])
        else:
            index = block_index
            size = self._shared - block_index * self._block
            num_extra = self._longest - self._shared
        start = (self._start + index * self._block) % max(1, self._shared)
        stop = start + size
        runs = [
            range(start, min(stop, self._shared)),
            range(stop - self._shared),  # after wrapping around
            range(self._shared, self._shared + num_extra),
        ]
        return [run for run in runs if run]

    def grid(self, start: int, stop: int, shards: Integers, shard_starts: Integers) -> Integers:
        """Permute offsets; see `Permutation`."""
        zeros = np.zeros_like(shard_starts)
        grids = []
        for block_index in range(start // self._block, (stop - 1) // self._block + 1):
            block_start = block_index * self._block
            block_stop = block_start + self._block
            within = self._tables.get("block", block_index, partial(self._within, block_index))
            first = max(start, block_start) - block_start
            grid = within.grid(first, min(stop, block_stop) - block_start, shards, zeros)
            runs = self.runs(block_index)
            run_starts = starts_of(np.array([len(run) for run in runs]))
            shifts = np.array([run.start for run in runs]) - run_starts
            grids.append(Runs(run_starts, shifts).at(grid))
        offsets = np.concatenate(grids).reshape(-1, len(shards))
        offsets += shard_starts
        return offsets.ravel()

    def _within(self, block_index: int) -> Permutation:
        """Return the permutations of each shard's rows within one block."""
        sizes = np.clip(self._sizes - block_index * self._block, 0, self._block)
        return permuted(sizes, bit_generator(*self._words, 2 + block_index))
