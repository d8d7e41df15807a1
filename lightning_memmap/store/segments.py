"""Copies of many pieces of memory, each of its own length, without a Python loop over them."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lightning_memmap.sampling.rows import Integers

Bytes = NDArray[np.uint8]

#: From this length on, one call for each piece costs less than dividing it into blocks.
_LONG_BYTES = 2**11
#: Blocks are copied through a buffer of this size, which stays in the processor's cache.
_PASS_BYTES = 2**17


def copy_segments(
    source: Bytes, starts: Integers, target: Bytes, places: Integers, lengths: Integers
) -> None:
    """Copy pieces of memory."""
    if not len(lengths):
        return
    for memory, firsts in ((source, starts), (target, places)):
        if firsts.min() < 0 or (firsts + lengths).max() > len(memory) or lengths.min() < 0:
            raise IndexError("a piece is outside the memory that it is copied from or to")
    long = np.flatnonzero(lengths >= _LONG_BYTES)
    # Python takes half as long as numpy to cut a piece out of memory.
    taken, put = source.data, target.data
    begins, ends = starts[long], places[long]
    edges = (begins, begins + lengths[long], ends, ends + lengths[long])
    for begin, stop, place, end in zip(*(edge.tolist() for edge in edges), strict=True):
        put[place:end] = taken[begin:stop]
    for block, found in _by_block(lengths, _LONG_BYTES):
        blocks, spots = _windows(source, block), _windows(target, block)
        begins, ends, rests = starts[found], places[found], lengths[found] - block
        step = _PASS_BYTES // block
        for first in range(0, len(found), step):
            begin, end = begins[first : first + step], ends[first : first + step]
            rest = rests[first : first + step]
            spots[end] = blocks[begin]
            spots[end + rest] = blocks[begin + rest]


def _by_block(lengths: Integers, below: int) -> Iterator[tuple[int, Integers]]:
    """Which pieces are covered by two blocks of the same size, of which the second ends where the
    piece does: the size, a power of two, and the pieces."""
    # The exponent of the largest power of two that is not larger; -1 for empty pieces.
    powers = np.frexp(lengths.astype(np.float64))[1] - 1
    powers[lengths >= below] = -1
    for power in np.flatnonzero(np.bincount(powers + 1)[1:]).tolist():
        yield 1 << power, np.flatnonzero(powers == power)


def _windows(memory: Bytes, block: int) -> NDArray[np.void]:
    """Return a view of memory whose element ``i`` is the block that begins at byte ``i``."""
    dtype = np.dtype((np.void, block))
    windows: NDArray[np.void] = np.ndarray((len(memory) - block + 1,), dtype, memory, 0, (1,))
    return windows
