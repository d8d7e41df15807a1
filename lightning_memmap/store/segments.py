"""Copy many segments of memory of different lengths without a Python loop over them."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lightning_memmap.integers import Integers

Bytes = NDArray[np.uint8]

#: From this length on, one call for each segment costs less than dividing it into blocks.
_LONG_BYTES = 2**11
#: Blocks are copied through a buffer of this size, which stays in the processor's cache.
_PASS_BYTES = 2**17


def copy_segments(
    source: Bytes, starts: Integers, target: Bytes, target_starts: Integers, lengths: Integers
) -> None:
    """Copy segments of memory, ``target[t:t + n] = source[s:s + n]`` for each ``s, t, n``."""
    if not len(lengths):
        return
    for memory, begins in ((source, starts), (target, target_starts)):
        if begins.min() < 0 or (begins + lengths).max() > len(memory) or lengths.min() < 0:
            raise IndexError("a segment is outside the memory that it is copied from or to")
    long = np.flatnonzero(lengths >= _LONG_BYTES)
    # Slicing memory takes half as long in Python as in numpy.
    source_data = source.data
    target_data = target.data
    bounds = (
        starts[long],
        starts[long] + lengths[long],
        target_starts[long],
        target_starts[long] + lengths[long],
    )
    for start, stop, target_start, target_stop in zip(*map(np.ndarray.tolist, bounds), strict=True):
        target_data[target_start:target_stop] = source_data[start:stop]
    for block, segments in _by_block(lengths, _LONG_BYTES):
        source_blocks = _windows(source, block)
        target_blocks = _windows(target, block)
        rests = lengths[segments] - block
        step = _PASS_BYTES // block
        for first in range(0, len(segments), step):
            chunk = segments[first : first + step]
            start = starts[chunk]
            target_start = target_starts[chunk]
            rest = rests[first : first + step]
            target_blocks[target_start] = source_blocks[start]
            target_blocks[target_start + rest] = source_blocks[start + rest]


def _by_block(lengths: Integers, below: int) -> Iterator[tuple[int, Integers]]:
    """Yield sizes, powers of two, and the segments that two blocks of this size cover.

    The first block starts with the segment, and the second one ends with it.
    """
    # The exponent of the largest power of two that is not larger; -1 for empty segments.
    powers = np.frexp(lengths.astype(np.float64))[1] - 1
    powers[lengths >= below] = -1
    for power in np.flatnonzero(np.bincount(powers + 1)[1:]).tolist():
        yield 1 << power, np.flatnonzero(powers == power)


def _windows(memory: Bytes, block: int) -> NDArray[np.void]:
    """Return a view of memory whose element ``i`` is the block that begins at byte ``i``."""
    dtype = np.dtype((np.void, block))
    windows: NDArray[np.void] = np.ndarray((len(memory) - block + 1,), dtype, memory, 0, (1,))
    return windows
