"""Copies of many pieces of memory, each of its own length, without a Python loop over them."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lightning_memmap.sampling import Integers

Bytes = NDArray[np.uint8]

#: From this length on, one call for each piece costs less than dividing it into blocks.
_LONG_BYTES = 2**14
#: Pieces are copied in blocks of the largest of these sizes that fits into them. The last block of
#: a piece ends where the piece does, and so overlaps the one before.
_BLOCK_BYTES = (_LONG_BYTES, 2048, 256, 32, 4, 1)
#: Blocks are copied through a buffer of this size, which stays in the processor's cache.
_PASS_BYTES = 2**17


def copy_segments(
    source: Bytes, starts: Integers, target: Bytes, places: Integers, lengths: Integers
) -> None:
    """Copy pieces of memory.

    Args:
        source: Memory to copy from, of shape (bytes,).
        starts: The first byte of each piece in it, int64 of shape (n,).
        target: Memory to copy to, of shape (bytes,), which does not overlap with the source.
        places: The first byte of each piece there, int64 of shape (n,).
        lengths: Bytes of each piece, int64 of shape (n,).

    Raises:
        IndexError: A piece is outside one of the two.
    """
    if not len(lengths):
        return
    for memory, firsts in ((source, starts), (target, places)):
        if firsts.min() < 0 or (firsts + lengths).max() > len(memory) or lengths.min() < 0:
            raise IndexError("a piece is outside the memory that it is copied from or to")
    long = np.flatnonzero(lengths >= _LONG_BYTES)
    for start, place, length in zip(
        starts[long].tolist(), places[long].tolist(), lengths[long].tolist(), strict=True
    ):
        target[place : place + length] = source[start : start + length]
    for above, block in pairwise(_BLOCK_BYTES):
        found = np.flatnonzero((lengths >= block) & (lengths < above))
        if not len(found):
            continue
        pieces, offsets = _blocks(lengths[found], block)
        taken, put = _windows(source, block), _windows(target, block)
        begins, ends = starts[found][pieces] + offsets, places[found][pieces] + offsets
        step = _PASS_BYTES // block
        for first in range(0, len(begins), step):
            put[ends[first : first + step]] = taken[begins[first : first + step]]


def fill_segments(target: Bytes, places: Integers, lengths: Integers, item: Bytes) -> None:
    """Fill pieces of memory with one item, over and over.

    Args:
        target: The memory, of shape (bytes,).
        places: The first byte of each piece, int64 of shape (n,).
        lengths: Bytes of each piece, multiples of those of the item, int64 of shape (n,).
        item: The bytes of the item: 1, 2, 4, 8 or 16.
    """
    for above, block in pairwise((2**62, 2048, 128, len(item))):
        found = np.flatnonzero((lengths >= block) & (lengths < above))
        if len(found):
            pieces, offsets = _blocks(lengths[found], block)
            filled = np.tile(item, block // len(item)).view(np.dtype((np.void, block)))
            _windows(target, block)[places[found][pieces] + offsets] = filled[0]


def _blocks(lengths: Integers, block: int) -> tuple[Integers, Integers]:
    """Divide pieces into blocks: of which piece each block is, and where it begins in it."""
    counts = -(-lengths // block)
    pieces = np.repeat(np.arange(len(lengths)), counts)
    numbers = np.arange(len(pieces)) - np.repeat(np.cumsum(counts) - counts, counts)
    return pieces, np.minimum(numbers * block, (lengths - block)[pieces])


def _windows(memory: Bytes, block: int) -> NDArray[np.void]:
    """A view of memory whose element ``i`` is the block that begins at byte ``i``."""
    dtype = np.dtype((np.void, block))
    return np.ndarray((len(memory) - block + 1,), dtype, memory, 0, (1,))
