"""The journal of a build: which rows are on the disk, and who writes them.

The building process and all workers share a lock on it: while one of them lives, no other process
writes into the same files. The processes of a build in parts know nothing of each other: each part
has a journal of its own.
"""

import fcntl
import os
import re
from collections.abc import Iterable
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from platform import node
from time import monotonic, sleep

from lightning_memmap.errors import StoreError
from lightning_memmap.store.directory import JOURNAL
from lightning_memmap.store.files import TEMPORARY, OpenFiles
from lightning_memmap.store.ranges import merge_ranges

_MAX_BYTES = 256 * 2**20
#: How long the workers of a killed build may take to end.
_PATIENCE_S = 2.0
#: What begins the line that says which process has the journal.
_WRITER = "by "
_LINE = re.compile(rb"([0-9]{1,15}) ([0-9]{1,15})\n")


class PartInUseError(StoreError):
    """A process writes these rows."""

    def __init__(self, writer: str) -> None:
        super().__init__(f"{writer}, which began it, is still alive")
        self.writer = writer


class Journal:
    """The journal of a build or of one of its parts, which no other build has."""

    def __init__(
        self, generation: Path, num_rows: int, part: int | None = None, *, is_writer: bool = True
    ) -> None:
        self.name = journal_name(part)
        with closing(OpenFiles(generation, is_own=True)) as files:
            self._file = os.dup(files.open(self.name, os.O_APPEND | os.O_CREAT))
            try:
                has_lock = _lock(self._file, _PATIENCE_S if is_writer else 0.0)
                data = files.read(self.name, _MAX_BYTES)
                if not has_lock:
                    raise PartInUseError(_last_writer(data))
                whole = data[: data.rfind(b"\n") + 1]
                if whole != data:
                    # A kill has cut the last line short: the next one must not be joined to it.
                    os.ftruncate(self._file, len(whole))
                if is_writer:  # No line of rows: it is for the message of another process.
                    now = datetime.now(timezone.utc).isoformat(sep=" ", timespec="seconds")
                    line = f"{_WRITER}process {os.getpid()} on {node()} at {now}\n"
                    os.write(self._file, line.encode())
            except BaseException:
                os.close(self._file)
                raise
        #: The rows that it lists, and who wrote them before this process.
        self.rows, self.writer = _listed(whole, num_rows), _last_writer(whole)

    def add(self, rows: Iterable[range]) -> None:
        """List rows that are on the disk."""
        data = b"".join(b"%d %d\n" % (each.start, len(each)) for each in rows)
        num_bytes = os.fstat(self._file).st_size
        try:
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)
        except OSError:
            # Half a line, joined with the next one, would name other rows.
            os.ftruncate(self._file, num_bytes)
            raise
        self.rows += rows

    def close(self) -> None:
        """Close it. The lock is free once no worker shares it. A second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def journal_name(part: int | None) -> str:
    """The name of a journal. No file of a column has such a name."""
    return JOURNAL if part is None else f"{JOURNAL}-{part}{TEMPORARY}"


def num_listed(generation: Path, num_rows: int) -> int:
    """How many rows of an unfinished build are on the disk, whoever writes them."""
    with closing(OpenFiles(generation, is_own=True)) as files:
        data = files.read(JOURNAL, _MAX_BYTES)
    return sum(map(len, merge_ranges(_listed(data, num_rows))))


def _listed(journal: bytes, num_rows: int) -> list[range]:
    """The rows that the lines of a journal list."""
    lines = (_LINE.fullmatch(line) for line in journal.splitlines(keepends=True))
    pairs = (map(int, found.groups()) for found in lines if found is not None)
    return [range(first, first + count) for first, count in pairs if first + count <= num_rows]


def _lock(descriptor: int, patience_s: float) -> bool:
    """Lock a journal, once no process has it, and share the lock with the workers to come.

    Between the two it is free for a moment: the lock of the store must be held.
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
        except OSError:
            if os.fstat(descriptor).st_size:
                raise
            return True  # Without locks on this file system, the build is not resumed.


def _last_writer(journal: bytes) -> str:
    """The process that wrote to a journal last, as it has named itself there, not checked."""
    lines = journal.decode(errors="replace").splitlines()
    names = [line.removeprefix(_WRITER) for line in lines if line.startswith(_WRITER)]
    is_known = bool(names) and len(names[-1]) < 200 and names[-1].isprintable()
    return names[-1] if is_known else "another process"
