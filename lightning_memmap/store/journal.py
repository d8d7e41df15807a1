"""Journals: which rows of a build are written, with a lock for the processes that write them."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from time import monotonic, sleep

import numpy as np
from numpy.typing import NDArray

from lightning_memmap.errors import StoreError
from lightning_memmap.store.directory import JOURNAL
from lightning_memmap.store.files import (
    TEMPORARY,
    OpenFiles,
    read_exactly,
    write_all,
    write_rows,
)
from lightning_memmap.store.workers import RowIndices

#: Marks that are read at once.
_MARKED_ROWS = 2**24
#: Mark of a row that can be read, but may not be on the disk yet.
WRITTEN = 1
#: Mark of a row that is on the disk.
KEPT = 2


class InUseError(StoreError):
    """Another process is writing these rows."""


class Journal:
    """A file with a mark for each row of a build: whether it is written, and is on the disk.

    It is locked: no other process writes these rows.
    """

    def __init__(
        self, generation: Path, rows: range, part: int | None = None, patience_s: float = 0.0
    ) -> None:
        self.rows = rows
        self.part = part
        self._generation = generation
        self.name = journal_name(part)
        with closing(OpenFiles(generation, is_own=True)) as files:
            self._file = os.dup(files.open(self.name, os.O_CREAT))
        try:
            if not _lock(self._file, patience_s):
                raise InUseError("a process that began it is still alive")
            num_bytes = os.fstat(self._file).st_size
            if num_bytes not in (0, len(rows)):
                raise StoreError(f"{self.name} has {num_bytes} bytes, expected {len(rows)}")
            os.truncate(self._file, len(rows))
            # Rows of a killed process may not be on the disk.
            for rows_written in self._ranges(WRITTEN) if num_bytes else ():
                self.mark(rows_written, 0)
        except BaseException:
            self.close()
            raise

    def mark(self, rows: RowIndices, mark: int) -> None:
        """Mark rows as `WRITTEN` or `KEPT`."""
        marks = np.full((len(rows), 1), mark, np.uint8)
        if isinstance(rows, range):
            write_all(self._file, marks.data.cast("B"), rows.start - self.rows.start)
        else:
            write_rows(self._file, rows - self.rows.start, marks)

    def sync(self) -> None:
        """Write the marks to the disk."""
        os.fsync(self._file)

    def missing(self) -> Iterator[range]:
        """Yield the ranges of rows that are still to be written."""
        return self._ranges(0)

    def _ranges(self, mark: int) -> Iterator[range]:
        """Yield the ranges of rows with this mark."""
        for start in range(0, len(self.rows), _MARKED_ROWS):
            rows = self.rows[start : start + _MARKED_ROWS]
            is_other = read_marks(self._generation, self.name, start, len(rows)) != mark
            # The starts and stops of the ranges of this mark, in turn.
            bounds = np.flatnonzero(np.diff(is_other, prepend=True, append=True)).tolist()
            pairs = zip(bounds[::2], bounds[1::2], strict=True)
            yield from (rows[start:stop] for start, stop in pairs)

    @property
    def num_done(self) -> int:
        """The number of rows that are written."""
        return len(self.rows) - sum(map(len, self.missing()))

    def close(self) -> None:
        """Close the file. The lock is free once no worker shares it. A second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def journal_name(part: int | None) -> str:
    """Return the file name of a journal. No file of a column has such a name."""
    return JOURNAL if part is None else f"{JOURNAL}-{part}{TEMPORARY}"


def read_marks(generation: Path, name: str, start: int, num_rows: int) -> NDArray[np.uint8]:
    """Read marks. The file is opened again, because a network file system may cache it."""
    with closing(OpenFiles(generation, is_own=True)) as files:
        return read_exactly(files.open(name), start, num_rows)


def _lock(descriptor: int, patience_s: float) -> bool:
    """Lock a journal exclusively, then share the lock with later workers.

    The lock of the store must be held, because the journal is unlocked for a moment in between.
    """
    deadline = monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if monotonic() > deadline:
                return False
            sleep(0.02)
