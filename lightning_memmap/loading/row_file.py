"""Read the files of columns in long reads, without mapping them and without the page cache.

A file consists of items: rows of one shape, the items of rows that differ in length, or the steps
of series. Consecutive items are a run, and stay consecutive in memory.

A disk error or a truncated file raises a Python error here. With a mapping, both are a SIGBUS,
which ends the process.
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
from lightning_memmap.integers import Integers, Runs, ceil_div, group_of, ranges
from lightning_memmap.store.files import copy_segments, make_replaced_error, open_plain
from lightning_memmap.store.store import Store

#: Alignment of direct reads on most disks.
_MIN_BLOCK_BYTES = 512
#: Alignment of direct reads on other disks.
_MAX_BLOCK_BYTES = 4096
_HUGE_PAGE_BYTES = 2 * 2**20
#: Bytes of one read: enough for the full rate of a disk, and few compared with any block.
_READ_BYTES = 4 * 2**20
#: Gaps up to this size between runs are read too: a disk takes as long to skip them.
_GAP_BYTES = 128 * 2**10
#: Without it, a disk that writes to memory while the process forks may write to the child's copy.
_MADV_WIPEONFORK = 18 if sys.platform == "linux" else None


class RowFile:
    """Items of one size, in one file or in several, read without the page cache if possible.

    Args:
        files: Each file, its first byte in the range of all files, and its size. Between files,
            there may be gaps.
        item_bytes: Bytes of an item.
    """

    def __init__(self, files: Sequence[tuple[Path, int, int]], item_bytes: int) -> None:
        self.item_bytes = item_bytes
        #: Reads start at a multiple of this, in the files and in memory.
        self.block_bytes = 1
        #: Path, descriptor and bytes of each file.
        self._files = [
            (path, self._open(path), range(start, start + size)) for path, start, size in files
        ]

    def _open(self, path: Path) -> int:
        direct = getattr(os, "O_DIRECT", 0)
        try:
            descriptor = open_plain(path, direct)
            if direct:
                self.block_bytes = max(self.block_bytes, self._find_block_bytes(descriptor))
        except FileNotFoundError as error:
            raise make_replaced_error(path) from error
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

    def read_items(self, start_item: int, num_items: int, scratch: memoryview) -> memoryview:
        """Read consecutive items into scratch memory, and return the bytes of the items."""
        start = start_item * self.item_bytes
        stop = start + num_items * self.item_bytes
        aligned_start = start // self.block_bytes * self.block_bytes
        self.read_bytes(aligned_start, stop, scratch[: self.round_up(stop) - aligned_start])
        return scratch[start - aligned_start : stop - aligned_start]

    def round_up(self, num_bytes: int) -> int:
        """Round a number of bytes up to a multiple of `block_bytes`."""
        return ceil_div(num_bytes, self.block_bytes) * self.block_bytes

    def read_bytes(self, start: int, stop: int, memory: memoryview) -> None:
        """Read a range of bytes, counted over all files."""
        for path, descriptor, file_bytes in self._files:
            start_here = max(start, file_bytes.start)
            stop_here = min(stop, file_bytes.stop)
            if start_here < stop_here:
                target = memory[start_here - start : self.round_up(stop_here) - start]
                offset = file_bytes.start
                self._read_file(path, descriptor, start_here - offset, stop_here - offset, target)

    def _read_file(
        self, path: Path, descriptor: int, start: int, stop: int, memory: memoryview
    ) -> None:
        num_bytes = stop - start
        done = 0
        while done < num_bytes:
            try:
                count = os.preadv(descriptor, [memory[done:]], start + done)
            except OSError as error:
                reason = f"{error.strerror}, reading at byte {start + done}"
                raise OSError(error.errno, reason, str(path)) from error
            if done + count >= num_bytes:
                break
            # A direct read can only resume at the start of a block, so read part of it again.
            resumed = (done + count) // self.block_bytes * self.block_bytes
            if resumed == done:
                raise StoreError(
                    f"{path} has {os.fstat(descriptor).st_size} bytes, but {stop} are needed: it"
                    " was truncated while it was in use. Build the store again."
                )
            done = resumed
        if self.block_bytes == 1 and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, start, len(memory), os.POSIX_FADV_DONTNEED)


def aligned_memory(num_bytes: int) -> memoryview:
    """Allocate memory that `RowFile` can read into, in huge pages if it is large enough."""
    is_huge = num_bytes >= _HUGE_PAGE_BYTES
    alignment = _HUGE_PAGE_BYTES if is_huge else _MAX_BLOCK_BYTES
    memory = mmap.mmap(-1, num_bytes + alignment, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (_MADV_WIPEONFORK, getattr(mmap, "MADV_HUGEPAGE", None) if is_huge else None):
        if advice is not None:
            with suppress(OSError):  # The kernel does not support it.
                memory.madvise(advice)
    skip = -np.frombuffer(memory, np.uint8).ctypes.data % alignment
    return memoryview(memory)[skip : skip + num_bytes]


#: Reads items from a file into memory.
Read: TypeAlias = Callable[[], None]

#: Scratch memory of each thread.
_OF_THREAD = threading.local()


def _scratch(item_bytes: int) -> memoryview:
    """Return scratch memory of this thread for one read, aligned for direct reads."""
    num_bytes = max(_READ_BYTES, item_bytes) + 2 * _MAX_BLOCK_BYTES
    memory: memoryview | None = getattr(_OF_THREAD, "memory", None)
    if memory is None or len(memory) < num_bytes:
        memory = _OF_THREAD.memory = aligned_memory(num_bytes)
    return memory


def reads_of(file: RowFile, runs: Runs, stops: Integers, target: Tensor) -> Iterator[Read]:
    """Yield the reads of runs of items, and of small gaps between them.

    Args:
        file: The file.
        runs: Maps items of the file to indices in memory.
        stops: One past the last item of each run, int64 of shape (runs,).
        target: The memory, uint8.
    """
    item_bytes = file.item_bytes
    max_items = max(1, _READ_BYTES // item_bytes)
    # Cut runs into segments at multiples of `max_items`.
    start_cuts = runs.starts // max_items
    counts = np.where(runs.starts < stops, ceil_div(stops, max_items) - start_cuts, 0)
    run_of = group_of(counts)
    cuts = ranges(start_cuts, counts) * max_items
    starts = np.maximum(runs.starts[run_of], cuts)
    stops = np.minimum(stops[run_of], cuts + max_items)
    targets = starts + runs.shifts[run_of]
    # Group segments into reads.
    is_far = (starts[1:] - stops[:-1]) * item_bytes > _GAP_BYTES
    is_long = np.diff(starts // max_items) > 0
    bounds = [0, *(np.flatnonzero(is_far | is_long) + 1).tolist(), len(starts)]
    memory = target.numpy()
    for start, stop in pairwise(bounds if len(starts) else []):
        here = slice(start, stop)
        yield partial(_read, file, starts[here], stops[here], targets[here], memory)


def _read(
    file: RowFile, starts: Integers, stops: Integers, targets: Integers, memory: np.ndarray
) -> None:
    """Read segments of items in one read, and copy them to their indices in memory."""
    item_bytes = file.item_bytes
    start_item = int(starts[0])
    num_items = int(stops[-1]) - start_item
    target = slice(int(targets[0]) * item_bytes, (int(targets[0]) + num_items) * item_bytes)
    if len(starts) == 1 and item_bytes % file.block_bytes == 0:
        # Blocks are complete, so read them without scratch memory.
        offset = start_item * item_bytes
        file.read_bytes(offset, offset + num_items * item_bytes, memory.data[target])
        return
    data = np.frombuffer(file.read_items(start_item, num_items, _scratch(item_bytes)), np.uint8)
    if len(starts) == 1:
        # By numpy, which releases the GIL.
        memory[target] = data
        return
    segments = starts - start_item, targets, stops - starts
    starts, target_starts, lengths = (items * item_bytes for items in segments)
    copy_segments(data, starts, memory, target_starts, lengths)


def open_row_files(store: Store, in_steps: Collection[str] = ()) -> list[RowFile | None]:
    """Open the files of all fields of a store; None for fields without bytes.

    Args:
        store: The store.
        in_steps: Fields that are read step by step.
    """
    row_files: list[RowFile | None] = []
    for column in store.manifest.columns:
        is_series = column.field.name in in_steps
        item_bytes = column.field.step_bytes if is_series else column.field.item_bytes
        files = store.row_files(column)
        row_files.append(RowFile(files, item_bytes) if files else None)
    return row_files
