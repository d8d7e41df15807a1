"""The files of a store as files: rows read in long pieces, past the mapping.

An error of the disk, or a file that was cut short, is a Python error here. In a mapping both are a
SIGBUS, which ends the process.
"""

import mmap
import os
import weakref

from lightning_memmap.errors import StoreError
from lightning_memmap.schema import Field
from lightning_memmap.store.manifest import Manifest, field_path
from lightning_memmap.store.reader import Store

#: A longer range is not always read ahead in one piece: the kernel has a limit for each device.
_ADVICE_BYTES = 512 * 2**10


class RowFile:
    """The file of one field. It is closed when nobody has this any more.

    Args:
        store: The open store.
        field: A field of it with at least one byte in a row.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(self, store: Store, field: Field) -> None:
        self.path = field_path(store.path, field)
        self.row_bytes = field.row_bytes
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        weakref.finalize(self, os.close, self._descriptor)
        # Lanes begin all over the file. The kernel's own guess would read on where each one ends.
        self._advise(0, 0, "POSIX_FADV_RANDOM")

    def will_need(self, first: int, num_rows: int) -> None:
        """Let the kernel read rows into the page cache, and do not wait for it."""
        begin, end = first * self.row_bytes, (first + num_rows) * self.row_bytes
        for start in range(begin, end, _ADVICE_BYTES):
            self._advise(start, min(_ADVICE_BYTES, end - start), "POSIX_FADV_WILLNEED")

    def read(self, first: int, target: memoryview) -> None:
        """Read rows, and let the page cache go of them.

        Args:
            first: The first row, counted in the file.
            target: Memory for whole rows, as bytes.

        Raises:
            OSError: The disk cannot be read. It names the file.
            StoreError: The file is shorter than the store.
        """
        begin = first * self.row_bytes
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._descriptor, [target[done:]], begin + done)
            except OSError as error:
                reason = f"{error.strerror}, at byte {begin + done}"
                raise OSError(error.errno, reason, str(self.path)) from error
            if not count:
                raise StoreError(
                    f"{self.path} has {os.fstat(self._descriptor).st_size} bytes, and was read to"
                    f" byte {begin + len(target)}: it was cut short while it was in use; build the"
                    " store again"
                )
            done += count
        # Whole pages, those that other lanes share with this one too: only whole ones are let go.
        start = begin // mmap.PAGESIZE * mmap.PAGESIZE
        end = -(-(begin + done) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._advise(start, end - start, "POSIX_FADV_DONTNEED")

    def _advise(self, start: int, num_bytes: int, advice: str) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, start, num_bytes, getattr(os, advice))


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
