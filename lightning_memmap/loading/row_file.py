"""The files of columns, read in long pieces, without mapping and without the page cache.

What is read are items: rows of one shape, the items of rows that differ in length, or the steps of
series. Items that follow one another in a file are a run, and do so in memory too.

An error of the disk, or a file that was cut short, is a Python error here. With a mapping, both are
a SIGBUS, which ends the process.
"""

import errno
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np
from torch import Tensor

from lightning_memmap.errors import StoreError
from lightning_memmap.sampling.rows import Integers, Runs, ranges
from lightning_memmap.store.files import open_plain, replaced
from lightning_memmap.store.segments import copy_segments
from lightning_memmap.store.store import Store

#: Direct reads are aligned to the smaller one, or to the larger one where a disk requires it.
_MIN_BLOCK_BYTES, _MAX_BLOCK_BYTES = 512, 4096
_HUGE_PAGE_BYTES = 2 * 2**20
#: Bytes of one read: enough for the full rate of a disk, and few compared with any window.
_READ_BYTES = 4 * 2**20
#: Gaps of this size between wanted rows are read too: skipping them takes a disk as long.
_GAP_BYTES = 128 * 2**10
#: Without it, a disk that writes to memory while the process forks may write to the child's copy.
_MADV_WIPEONFORK = 18 if sys.platform == "linux" else None


class RowFile:
    """Rows of one size, or items, in one file or in several, between which bytes are missing.

    They are read without the page cache where that can be.
    """

    def __init__(self, parts: Sequence[tuple[Path, int, int]], row_bytes: int) -> None:
        self.row_bytes = row_bytes
        #: Reads begin at a multiple of this, in the files and in memory.
        self.block_bytes = 1
        #: The files, and which of all bytes each of them has.
        self._parts = [
            (path, self._opened(path), range(first, first + size)) for path, first, size in parts
        ]

    def _opened(self, path: Path) -> int:
        direct = getattr(os, "O_DIRECT", 0)
        try:
            descriptor = open_plain(path, direct)
            if direct:
                self.block_bytes = max(self.block_bytes, self._find_block_bytes(descriptor))
        except FileNotFoundError as error:
            raise replaced(path) from error
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            descriptor = open_plain(path)
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    def _find_block_bytes(self, descriptor: int) -> int:
        memory = aligned_memory(2 * _MIN_BLOCK_BYTES)[_MIN_BLOCK_BYTES:]
        try:
            os.preadv(descriptor, [memory], _MIN_BLOCK_BYTES)
        except OSError:
            return _MAX_BLOCK_BYTES
        return _MIN_BLOCK_BYTES

    def read_rows(self, first: int, num_rows: int, scratch: memoryview) -> memoryview:
        """Read consecutive rows."""
        start, end = first * self.row_bytes, (first + num_rows) * self.row_bytes
        begin = start // self.block_bytes * self.block_bytes
        self.read_bytes(begin, end, scratch[: self.whole_blocks(end) - begin])
        return scratch[start - begin : end - begin]

    def whole_blocks(self, num_bytes: int) -> int:
        """Round a number of bytes up to whole blocks."""
        return -(-num_bytes // self.block_bytes) * self.block_bytes

    def read_bytes(self, begin: int, end: int, memory: memoryview) -> None:
        """Read bytes, counted over all files."""
        for path, descriptor, there in self._parts:
            first, last = max(begin, there.start), min(end, there.stop)
            if first < last:
                here = memory[first - begin : self.whole_blocks(last) - begin]
                self._read_part(path, descriptor, first - there.start, last - there.start, here)

    def _read_part(
        self, path: Path, descriptor: int, begin: int, end: int, memory: memoryview
    ) -> None:
        done = 0
        while done < end - begin:
            try:
                count = os.preadv(descriptor, [memory[done:]], begin + done)
            except OSError as error:
                reason = f"{error.strerror}, reading at byte {begin + done}"
                raise OSError(error.errno, reason, str(path)) from error
            # A direct read can only go on at the start of a block: part of a block is read again.
            went_on = (done + count) // self.block_bytes * self.block_bytes - done
            if done + count < end - begin and not went_on:
                raise StoreError(
                    f"{path} has {os.fstat(descriptor).st_size} bytes, and was read to byte {end}:"
                    " it was cut short while it was in use; build the store again"
                )
            done = done + went_on if done + count < end - begin else end - begin
        if self.block_bytes == 1 and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, begin, len(memory), os.POSIX_FADV_DONTNEED)


def aligned_memory(num_bytes: int) -> memoryview:
    """Allocate memory that `RowFile` can read into, in huge pages where it is large enough."""
    is_huge = num_bytes >= _HUGE_PAGE_BYTES
    alignment = _HUGE_PAGE_BYTES if is_huge else _MAX_BLOCK_BYTES
    memory = mmap.mmap(-1, num_bytes + alignment, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (_MADV_WIPEONFORK, getattr(mmap, "MADV_HUGEPAGE", None) if is_huge else None):
        if advice is not None:
            with suppress(OSError):  # The kernel does not know it.
                memory.madvise(advice)
    skip = -np.frombuffer(memory, np.uint8).ctypes.data % alignment
    return memoryview(memory)[skip : skip + num_bytes]


#: Reads rows to their places.
Read: TypeAlias = Callable[[], None]

#: Scratch memory of each thread.
_OF_THREAD = threading.local()


def _scratch(row_bytes: int) -> memoryview:
    """Scratch memory of this thread for one read, aligned for direct reads."""
    num_bytes = max(_READ_BYTES, row_bytes) + 2 * _MAX_BLOCK_BYTES
    found: memoryview | None = getattr(_OF_THREAD, "memory", None)
    if found is None or len(found) < num_bytes:
        found = _OF_THREAD.memory = aligned_memory(num_bytes)
    return found


def _pieces(
    begins: Integers, ends: Integers, row_bytes: int
) -> tuple[Integers, Integers, Integers, list[int]]:
    """Divide ascending runs of rows into pieces that are read together.

    The first row of each piece, one past its last, its run, and the first piece of each read.
    """
    step = max(1, _READ_BYTES // row_bytes)
    # Runs are cut where a read would be too long.
    counts = np.where(begins < ends, -(-ends // step) - begins // step, 0)
    runs = np.repeat(np.arange(len(begins)), counts)
    cuts = ranges(begins // step, counts) * step
    begins = np.maximum(begins[runs], cuts)
    ends = np.minimum(ends[runs], cuts + step)
    is_far = (begins[1:] - ends[:-1]) * row_bytes > _GAP_BYTES
    is_long = np.diff(begins // step) > 0
    edges = [0, *(np.flatnonzero(is_far | is_long) + 1).tolist(), len(begins)]
    return begins, ends, runs, edges if len(begins) else []


def reads_of(file: RowFile, runs: Runs, ends: Integers, target: Tensor) -> Iterator[Read]:
    """Reads of runs of rows, and of small gaps between them, to their places in memory."""
    begins, ends, sources, edges = _pieces(runs.starts, ends, file.row_bytes)
    places = begins + runs.shifts[sources]
    memory = target.numpy()
    for first, last in pairwise(edges):
        here = slice(first, last)
        yield partial(_read, file, begins[here], ends[here], places[here], memory)


def _read(
    file: RowFile,
    begins: Integers,
    ends: Integers,
    places: Integers,
    memory: np.ndarray,
) -> None:
    first, last, size = int(begins[0]), int(ends[-1]), file.row_bytes
    place, num_bytes = int(places[0]) * size, (last - first) * size
    if len(begins) == 1 and size % file.block_bytes == 0:
        # Whole blocks, straight to their place.
        file.read_bytes(first * size, last * size, memory.data[place : place + num_bytes])
        return
    data = np.frombuffer(file.read_rows(first, last - first, _scratch(size)), np.uint8)
    if len(begins) == 1:
        # numpy lets other threads run meanwhile.
        memory[place : place + num_bytes] = data
        return
    lengths = (ends - begins) * size
    copy_segments(data, (begins - first) * size, memory, places * size, lengths)


def open_row_files(store: Store, in_steps: Collection[str] = ()) -> list[RowFile | None]:
    """Open the files of all fields of a store."""
    files = list[RowFile | None]()
    for column in store.manifest.columns:
        is_series = column.field.name in in_steps
        size = column.field.step_bytes if is_series else column.field.item_bytes
        parts = store.row_files(column)
        files.append(RowFile(parts, size) if parts else None)
    return files
