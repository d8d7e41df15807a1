"""How much memory the windows of an epoch take at most, before any is read."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lightning_memmap.loading.memory import Places
from lightning_memmap.sampling import Integers, ReadWindows, WindowedRows
from lightning_memmap.store.open_columns import ItemRows

#: What is kept for each row of a window beside the row, and taken while it is looked up, in bytes.
LOOKUP_BYTES = 56
#: The largest part of a window is found among those that begin at so many places in its length.
_STEPS = 64
#: Rows whose lengths are looked up at once.
_LOOKUP_ROWS = 2**18
#: Runs of a shard in a window at most: a window may wrap around, and some shards have a row more.
_MAX_RUNS = 3


def largest_window(
    rows: ItemRows, places: Places, shards: Sequence[int], windows: ReadWindows
) -> int:
    """How many items the rows of a window have at most, wherever it begins."""
    window = windows.longest
    if not windows.has_runs:
        return sum(_longest(rows, places, shard, window) for shard in shards)

    def in_one_run(shard: int, edges: Integers) -> Integers:
        size = int(edges[-1])
        if not size:
            return np.zeros_like(edges)
        found = rows.at(places.of(np.full(len(edges), shard), np.minimum(edges, size - 1)))
        return np.where(edges < size, found.starts, found.starts + found.sizes.prod(axis=1))

    def apart(shard: int, edges: Integers) -> Integers:
        lengths = [np.zeros(1, np.int64), *_lengths(rows, places, shard)]
        return np.cumsum(np.concatenate(lengths))[edges]

    sizes, is_one_run = places.pool.sizes, places.starts is not None
    return most_items(sizes, shards, window, in_one_run if is_one_run else apart, not is_one_run)


def _longest(rows: ItemRows, places: Places, shard: int, count: int) -> int:
    """How many items so many rows of a shard have at most, whichever they are."""
    longest = np.zeros(0, np.int64)
    for lengths in _lengths(rows, places, shard):
        longest = np.append(longest, lengths)
        if len(longest) > count:
            longest = np.partition(longest, -count)[-count:]
    return int(longest.sum())


def _lengths(rows: ItemRows, places: Places, shard: int) -> Iterator[Integers]:
    """The items of each row of a shard, some rows at a time."""
    size = int(places.pool.sizes[shard])
    for first in range(0, size, _LOOKUP_ROWS):
        some = np.arange(first, min(first + _LOOKUP_ROWS, size))
        yield rows.at(places.of(np.full(len(some), shard), some)).sizes.prod(axis=1)


def most_items(
    sizes: Integers,
    shards: Sequence[int],
    window: int,
    items_before: Callable[[int, Integers], Integers],
    is_exact: bool = False,
) -> int:
    """How many items windows have at most, by the items before some places in a shard."""
    # The circle has the rows that all shards have. Some have one more.
    circle = int(sizes.min())
    step = 1 if is_exact else max(1, window // _STEPS)
    places = np.append(np.arange(0, circle, step), circle)
    totals, extra = np.zeros(len(places), np.int64), 0
    for shard in shards:
        before = items_before(shard, np.append(places, sizes[shard]))
        totals += before[:-1] - before[0]
        extra += int(before[-1] - before[-2])
    if not circle:
        return extra
    # Two rounds of the circle.
    places = np.append(places, places[1:] + circle)
    totals = np.append(totals, totals[1:] + totals[-1])
    num_begins = len(places) // 2
    # A window that begins before the next place ends before this one.
    ends = np.searchsorted(places, places[1 : num_begins + 1] - 1 + min(window, circle))
    return int((totals[ends] - totals[:num_begins]).max()) + extra


def largest_window_steps(held: Sequence[int], windows: ReadWindows) -> int:
    """How many steps a window of the epoch has at most, each counted once for each shard."""
    window, pool = windows.longest, windows.sampler.pool
    line = pool.rows
    assert isinstance(line, WindowedRows)
    if not windows.has_runs:
        return len(held) * window * line.length
    # A run that begins inside of a series.
    shared = max(0, line.length - line.stride)
    if pool.is_striped:
        size = window * pool.num_shards
        edges = np.append(np.arange(0, line.num_rows, size), line.num_rows)
        return int(np.diff(line.steps_before(edges, True)).max()) + shared

    def steps_before(shard: int, offsets: Integers) -> Integers:
        return line.steps_before(pool.starts[shard] + offsets, False)

    most = most_items(pool.sizes, held, window, steps_before)
    return most + _MAX_RUNS * shared * len(held)
