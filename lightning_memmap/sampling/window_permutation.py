"""Permutations of shards window by window: rows that come together also lie together."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from lightning_memmap.sampling.permutations import Permutation, permuted, random_bits
from lightning_memmap.sampling.shards import Integers

#: Windows of an epoch whose order is kept: a step may reach from one into the next.
_KEPT_WINDOWS = 4


class WindowPermutation:
    """Permutations of shards window by window.

    The offsets that all shards have form a circle, which is divided into windows from a random
    offset on: in another epoch, other rows share a window. The extra row of the longer shards is in
    the last window.

    Args:
        sizes: Rows of each shard, int64 of shape (C,), as for `permuted`.
        window: Rows of a shard in a window, at least 1.
        seed: Seed of the order.
        epoch: Epoch, counted from 0.
    """

    def __init__(self, sizes: Integers, window: int, seed: int, epoch: int) -> None:
        self._sizes = sizes
        self._window = window
        self._words = seed, epoch
        # Rows that all shards have, and rows of the longest of them.
        self._round, self._longest = int(sizes[-1]), int(sizes[0])
        self._num_full = self._round // window
        bits = random_bits(seed, epoch, 1)
        self._start = int(bits.random_raw(1)[0]) % max(1, self._round)
        self._order = permuted(np.array([max(1, self._num_full)]), bits)
        self._kept: OrderedDict[int, Permutation] = OrderedDict()

    def runs(self, number: int) -> list[range]:
        """The offsets of a window, in runs of consecutive ones; see `WindowedSampler.window_runs`.

        Args:
            number: Window of the epoch, counted from 0.

        Returns:
            One to three ranges of offsets, the same for each shard.
        """
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
            within = self._permutation_within(number)
            grid = within.grid(max(first, begin) - begin, stop - 1 - begin, columns, nothing)
            pieces.append(spread(grid, self.runs(number)))
        offsets = np.concatenate(pieces).reshape(-1, len(columns))
        offsets += begins
        return offsets.ravel()

    def _permutation_within(self, number: int) -> Permutation:
        """The permutation of each shard's rows in one window."""
        found = self._kept.get(number)
        if found is None:
            sizes = np.clip(self._sizes - number * self._window, 0, self._window)
            found = self._kept[number] = permuted(sizes, random_bits(*self._words, 2 + number))
            if len(self._kept) > _KEPT_WINDOWS:
                # One step, since threads that read windows look rows up too.
                self._kept.popitem(last=False)
        return found


def spread(numbers: Integers, runs: Sequence[range]) -> Integers:
    """The integers at these indices of the runs, one run after the other.

    Args:
        numbers: Indices, int64 of shape (B,).
        runs: Runs of integers, at least one. Undefined behind the last one.

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
