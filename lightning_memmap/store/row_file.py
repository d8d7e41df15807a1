"""The files of a store as files: rows read in long pieces, past the mapping and the page cache.

An error of the disk, or a file that was cut short, is a Python error here. In a mapping both are a
SIGBUS, which ends the process.
"""

import errno
import mmap
import os
import sys
import weakref
from contextlib import suppress

import numpy as np

from lightning_memmap.errors import StoreError
from lightning_memmap.schema import Field
from lightning_memmap.store.manifest import Manifest, field_path
from lightning_memmap.store.reader import Store

#: What direct reads are aligned to: a multiple of the block size of nearly all disks.
_BLOCK_BYTES = 4096
_HUGE_PAGE_BYTES = 2 * 2**20
#: Without it, a disk that writes to memory while the process forks may write to the copy of it.
_MADV_WIPEONFORK = 18 if sys.platform == "linux" else None


class RowFile:
    """The file of one field. It is closed when nobody has this any more.

    It is read without the page cache where the file system can do that: making pages, and letting
    go of them, costs several times what the copy out of them costs. Where it cannot, the page cache
    is let go of what was read.

    Args:
        store: The open store.
        field: A field of it with at least one byte in a row.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(self, store: Store, field: Field) -> None:
        self.path = field_path(store.path, field)
        self.row_bytes = field.row_bytes
        self._is_direct = hasattr(os, "O_DIRECT")
        try:
            self._descriptor = self._open()
        except OSError as error:
            if not self._is_direct or error.errno != errno.EINVAL:
                raise
            self._is_direct = False
            self._descriptor = self._open()
        weakref.finalize(self, os.close, self._descriptor)

    def _open(self) -> int:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self.path, flags | (os.O_DIRECT if self._is_direct else 0))

    def read(self, first: int, num_rows: int, scratch: memoryview) -> memoryview:
        """Read rows.

        Args:
            first: The first row, counted in the file.
            num_rows: Rows.
            scratch: Memory to read into, of `make_scratch`.

        Returns:
            The bytes of the rows, in ``scratch``.

        Raises:
            OSError: The disk cannot be read. It names the file.
            StoreError: The file is shorter than the store.
        """
        start, end = first * self.row_bytes, (first + num_rows) * self.row_bytes
        begin = start // _BLOCK_BYTES * _BLOCK_BYTES
        memory = scratch[: -(-end // _BLOCK_BYTES) * _BLOCK_BYTES - begin]
        done = 0
        while done < end - begin:
            count = self._read(begin + done, memory[done:])
            # A direct read can only go on at a block: what a part of one gave is read again.
            went_on = (done + count) // _BLOCK_BYTES * _BLOCK_BYTES - done
            if done + count < end - begin and not went_on:
                raise StoreError(
                    f"{self.path} has {os.fstat(self._descriptor).st_size} bytes, and was read to"
                    f" byte {end}: it was cut short while it was in use; build the store again"
                )
            done = done + went_on if done + count < end - begin else end - begin
        if not self._is_direct:
            self._let_go(begin, len(memory))
        return memory[start - begin : end - begin]

    def _read(self, place: int, memory: memoryview) -> int:
        try:
            return os.preadv(self._descriptor, [memory], place)
        except OSError as error:
            raise OSError(
                error.errno, f"{error.strerror}, reading at byte {place}", str(self.path)
            ) from error

    def _let_go(self, begin: int, num_bytes: int) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, begin, num_bytes, os.POSIX_FADV_DONTNEED)


def make_scratch(num_bytes: int) -> memoryview:
    """Memory for `RowFile.read`, as direct reads need it: in huge pages where there are some.

    Pages that lie apart are many segments of a transfer, and a disk takes so many at once only:
    the same read is then many small ones.

    Args:
        num_bytes: Bytes of the rows of one read.
    """
    needed = num_bytes + 2 * _BLOCK_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, needed + _HUGE_PAGE_BYTES, flags)
    for advice in (_MADV_WIPEONFORK, getattr(mmap, "MADV_HUGEPAGE", None)):
        if advice is not None:
            with suppress(OSError):  # A kernel that does not know it.
                memory.madvise(advice)
    skip = -np.frombuffer(memory, np.uint8).ctypes.data % _HUGE_PAGE_BYTES
    return memoryview(memory)[skip : skip + needed]


def open_row_files(store: Store) -> list[RowFile | None]:
    """Open the file of each field; None for fields without a byte.

    Raises:
        OSError: A file cannot be opened.
        StoreError: Another store has taken the place of this one since it was opened.
    """
    files = [RowFile(store, field) if field.row_bytes else None for field in store.schema.fields]
    if Manifest.read(store.path).content != store.manifest.content:
        raise StoreError(f"the store at {store.path} was replaced meanwhile: open it again")
    return files
