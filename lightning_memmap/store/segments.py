"""Copy many segments of memory of different lengths without a Python loop over them."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lightning_memmap.sampling.rows import Integers

Bytes = NDArray[np.uint8]

#: From this length on, one call for each segment costs less than dividing it into blocks.
_LONG_BYTES = 2**11
#: Blocks are copied through a buffer of this size, which stays in the processor's cache.
_PASS_BYTES = 2**17


def copy_segments(
    source: Bytes, starts: Integers, target: Bytes, places: Integers, lengths: Integers
) -> None:
    """Copy segments of memory."""
    if not len(lengths):
        return
    for memory, firsts in ((source, starts), (target, places)):
        if firsts.min() < 0 or (firsts + lengths).max() > len(memory) or lengths.min() < 0:
            raise IndexError("a segment is outside the memory that it is copied from or to")
    long = np.flatnonzero(lengths >= _LONG_BYTES)
    # Slicing memory takes half as long in Python as in numpy.
    taken = source.data
    put = target.data
    begins = starts[long]
    ends = places[long]
    edges = (begins, begins + lengths[long], ends, ends + lengths[long])
    for begin, stop, place, end in zip(*(edge.tolist() for edge in edges), strict=True):
        put[place:end] = taken[begin:stop]
    for block, segments in _by_block(lengths, _LONG_BYTES):
        blocks = _windows(source, block)
        spots = _windows(target, block)
        begins = starts[segments]
        ends = places[segments]
        rests = lengths[segments] - block
        step = _PASS_BYTES // block
        for first in range(0, len(segments), step):
            begin = begins[first : first + step]
            end = ends[first : first + step]
            rest = rests[first : first + step]
            spots[end] = blocks[begin]
            spots[end + rest] = blocks[begin + rest]


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
