"""Reads from a file to the memory of a window, each of which a thread does by itself.

A file has rows of one size: those of a field, or the items of rows that differ in length.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
from torch import Tensor

from lightning_memmap.loading.row_file import MAX_BLOCK_BYTES, RowFile, aligned_memory
from lightning_memmap.sampling import Integers
from lightning_memmap.store.segments import copy_segments

#: Bytes of one read: enough for the full rate of a disk, and few compared with any window.
_READ_BYTES = 4 * 2**20
#: Gaps of this size between wanted rows are read too: skipping them takes a disk as long.
_GAP_BYTES = 128 * 2**10

#: Reads rows to their places; the argument is scratch memory.
Read: TypeAlias = Callable[[memoryview], None]


def scratch_memory(row_bytes: int) -> memoryview:
    """Scratch memory for the reads of one thread, aligned for direct reads."""
    return aligned_memory(max(_READ_BYTES, row_bytes) + 2 * MAX_BLOCK_BYTES)


def block_rows(file: RowFile) -> int:
    """The least number of rows that are whole blocks: a power of two."""
    return file.block_bytes // math.gcd(file.block_bytes, file.row_bytes)


def reads_in_place(file: RowFile, rows: range, place: int, target: Tensor) -> Iterator[Read]:
    """Reads of whole blocks straight to the places of rows."""
    begin, end = rows.start * file.row_bytes, rows.stop * file.row_bytes
    skip = begin % file.block_bytes
    memory = target.view(-1).numpy().data[place * file.row_bytes - skip :]
    begin -= skip
    for first in range(begin, end, _READ_BYTES):
        last = min(first + _READ_BYTES, end)
        block = memory[first - begin : file.whole_blocks(last) - begin]
        yield partial(_read_in_place, file, first, last, block)


class Pieces(NamedTuple):
    """Runs of rows of a file, in ascending order, divided into those that are read together."""

    begins: Integers
    """The first row of each, int64 of shape (n,)."""
    ends: Integers
    """One past its last row."""
    sources: Integers
    """Which of the runs that were given it is of."""
    edges: list[int]
    """The first piece of each read, and the number of all pieces."""

    @classmethod
    def of(cls, begins: Integers, ends: Integers, row_bytes: int) -> "Pieces":
        """Divide runs of rows."""
        step = max(1, _READ_BYTES // row_bytes)
        # Runs are cut where a read would be too long.
        counts = np.where(begins < ends, -(-ends // step) - begins // step, 0)
        sources = np.repeat(np.arange(len(begins)), counts)
        cuts = np.arange(len(sources)) - np.repeat(np.cumsum(counts) - counts, counts)
        cuts = (cuts + (begins // step)[sources]) * step
        begins = np.maximum(begins[sources], cuts)
        ends = np.minimum(ends[sources], cuts + step)
        is_far = (begins[1:] - ends[:-1]) * row_bytes > _GAP_BYTES
        is_long = np.diff(begins // step) > 0
        edges = [0, *(np.flatnonzero(is_far | is_long) + 1).tolist(), len(begins)]
        return cls(begins, ends, sources, edges if len(begins) else [])

    @property
    def num_used(self) -> int:
        """Rows that are wanted."""
        return int((self.ends - self.begins).sum())

    @property
    def num_read(self) -> int:
        """Rows that are read: those that are wanted, and small gaps between them."""
        spans = pairwise(self.edges)
        return sum(int(self.ends[last - 1] - self.begins[first]) for first, last in spans)


def reads_of_pieces(
    file: RowFile, begins: Integers, ends: Integers, places: Integers, target: Tensor
) -> Iterator[Read]:
    """Reads of runs of rows, and of small gaps between them, to scratch memory."""
    pieces = Pieces.of(begins, ends, file.row_bytes)
    places = places[pieces.sources] + pieces.begins - begins[pieces.sources]
    memory = target.view(-1).numpy()
    for first, last in pairwise(pieces.edges):
        here = slice(first, last)
        yield partial(
            _read_pieces, file, pieces.begins[here], pieces.ends[here], places[here], memory
        )


def _read_in_place(
    file: RowFile, begin: int, end: int, memory: memoryview, _scratch: memoryview
) -> None:
    file.read_bytes(begin, end, memory)


def _read_pieces(
    file: RowFile,
    begins: Integers,
    ends: Integers,
    places: Integers,
    memory: np.ndarray,
    scratch: memoryview,
) -> None:
    first, size = int(begins[0]), file.row_bytes
    data = np.frombuffer(file.read_rows(first, int(ends[-1]) - first, scratch), np.uint8)
    lengths = (ends - begins) * size
    if len(lengths) == 1:
        # numpy lets other threads run meanwhile.
        place = int(places[0]) * size
        memory[place : place + len(data)] = data
        return
    copy_segments(data, (begins - first) * size, memory, places * size, lengths)
