"""The journal of a build: which rows are on the disk, so that the next build can go on from there.

``build.json`` says what is built, ``journal`` which rows are on the disk. The building process and
all workers that write share a lock on the journal: while one of them lives, no other process writes
into the same files.
"""

import fcntl
import json
import logging
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

from lightning_memmap.errors import StoreError
from lightning_memmap.store.build_key import (
    KEY,
    BuildKey,
    builder_text,
    read_key_in,
    this_process,
)
from lightning_memmap.store.files import TEMPORARY
from lightning_memmap.store.own_files import (
    SAFE_FLAGS,
    check_own,
    open_own,
    own_directory,
    read_at_most,
)
from lightning_memmap.store.ranges import merge_ranges
from lightning_memmap.store.workers import exit_if_orphaned

JOURNAL = "journal"

_MAX_JOURNAL_BYTES = 256 * 2**20
#: How long the workers of a killed build may take to end.
_PATIENCE_S = 2.0
#: What begins the line in the journal of a part that says which process has it.
_WRITER = "by "
_LINE = re.compile(rb"([0-9]{1,15}) ([0-9]{1,15})\n")
_log = logging.getLogger(__name__)


class Journal:
    """The rows of a build that are on the disk.

    Args:
        name: The name of its file; see `share`.
        descriptor: The open file, locked. `close` closes it.
        done: The rows that it lists.
    """

    def __init__(self, name: str, descriptor: int, done: Iterable[range] = ()) -> None:
        self.name = name
        self.descriptor = descriptor
        self.done = merge_ranges(done)

    @property
    def num_done(self) -> int:
        """The number of rows that it lists."""
        return sum(map(len, self.done))

    @classmethod
    def create(cls, building: Path, key: BuildKey) -> "Journal":
        """Start the journal of a build whose files have just been made.

        Args:
            building: The directory in which the store is being built.
            key: What the build makes. It is written beside the journal.

        Returns:
            The journal, locked where the file system has locks, and without rows.

        Raises:
            OSError: The files cannot be written, or are there already.
        """
        with open(building / KEY, "x", encoding="utf-8") as file:
            json.dump(key.to_json(), file)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | SAFE_FLAGS
        journal = cls(JOURNAL, os.open(building / JOURNAL, flags, 0o666))
        with suppress(OSError):  # Without locks on this file system, the build is not resumed.
            fcntl.flock(journal.descriptor, fcntl.LOCK_SH)
        return journal

    @classmethod
    def resume(cls, building: Path, key: BuildKey) -> "Journal | None":
        """Take over the journal of an interrupted build that had the same key.

        All its files must belong to this user, and none of its processes may be alive. Otherwise a
        warning in the log says why the build is not resumed.

        Args:
            building: The directory in which the store is being built.
            key: What this build makes.

        Returns:
            The journal, locked; None where the build must start anew.
        """
        if not os.path.lexists(building):
            return None
        try:
            journal, builder = cls._resume(building, key)
        except (OSError, ValueError, RecursionError, StoreError) as error:
            _log.warning("the interrupted build at %s is not resumed: %s", building, error)
            return None
        if journal.done:
            _log.warning(
                "resuming: %s of %s rows were written by %s; fresh=True (--fresh) starts anew",
                f"{journal.num_done:,}",
                f"{key.num_rows:,}",
                builder,
            )
        return journal

    @classmethod
    def of_part(cls, building: Path, part: int, num_rows: int) -> "Journal":
        """Open the journal of one part of a build, or start it.

        Args:
            building: The directory in which the store is being built.
            part: Number of the part.
            num_rows: Rows of the dataset.

        Returns:
            The journal, locked.

        Raises:
            PartInUseError: Another process has it.
            StoreError: It is no plain file of this user.
            OSError: It cannot be opened, or the file system has no locks.
        """
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        name = part_journal(part)
        with own_directory(building) as directory:
            descriptor = open_own(name, directory, flags)
        try:
            try:
                _lock(descriptor)
            except StoreError:
                raise PartInUseError(_last_writer(descriptor)) from None
            done = _read_ranges(descriptor, num_rows)
            # No line of rows: it is for the message of another process that wants this part.
            os.write(descriptor, f"{_WRITER}{this_process()}\n".encode())
            return cls(name, descriptor, done)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def _resume(cls, building: Path, key: BuildKey) -> "tuple[Journal, str]":
        with own_directory(building) as directory:
            found = read_key_in(directory)
            if (changed := key.difference(found)) is not None:
                raise StoreError(changed)
            for name, num_bytes in key.file_bytes.items():
                state = os.stat(name, dir_fd=directory, follow_symlinks=False)
                check_own(name, state)
                if state.st_size != num_bytes:
                    raise StoreError(f"{name} has {state.st_size} bytes, expected {num_bytes}")
            descriptor = open_own(JOURNAL, directory, os.O_RDWR | os.O_APPEND)
        try:
            _lock(descriptor)
            done = _read_ranges(descriptor, key.num_rows)
            return cls(JOURNAL, descriptor, done), builder_text(found.get("builder"))
        except BaseException:
            os.close(descriptor)
            raise

    def note(self, written: Iterable[range]) -> None:
        """Add rows that have been brought to the disk.

        Args:
            written: The rows, in ranges in any order.

        Raises:
            OSError: The rows could not be added. The journal is as it was.
        """
        ranges = merge_ranges(written)
        data = b"".join(b"%d %d\n" % (rows.start, len(rows)) for rows in ranges)
        num_bytes = os.fstat(self.descriptor).st_size
        try:
            while data:
                data = data[os.write(self.descriptor, data) :]
            os.fsync(self.descriptor)
        except OSError:
            # Half a line, joined with the next one, would name other rows.
            os.ftruncate(self.descriptor, num_bytes)
            raise
        self.done = merge_ranges((*self.done, *ranges))

    def close(self) -> None:
        """Close the file. Its lock is free once no worker shares it either."""
        os.close(self.descriptor)


def share(name: str, directory: int) -> int:
    """Share the lock of a journal, so that the next build knows that this process is alive.

    Args:
        name: The name of the journal.
        directory: A descriptor of the directory in which the store is being built.

    Returns:
        The open file; the lock is held until it is closed.

    Raises:
        OSError: It cannot be opened.
    """
    descriptor = os.open(name, os.O_RDWR | SAFE_FLAGS, dir_fd=directory)
    with suppress(OSError):  # As in `Journal.create`; or else the build is another one's by now.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    exit_if_orphaned()
    return descriptor


class PartInUseError(StoreError):
    """Another process writes a part. The message says which, where it is known."""


def part_journal(part: int) -> str:
    """The name of the journal of one part of a build. No file of a column has such a name.

    Args:
        part: Number of the part.
    """
    return f"{JOURNAL}-{part}{TEMPORARY}"


def read_part(building: Path, part: int, num_rows: int) -> list[range] | None:
    """The rows of one part that are on the disk.

    Args:
        building: The directory in which the store is being built.
        part: Number of the part.
        num_rows: Rows of the dataset.

    Returns:
        The rows in ranges; None where no process has begun with the part.

    Raises:
        PartInUseError: A process writes it.
        StoreError: It is no plain file of this user.
        OSError: It cannot be read.
    """
    try:
        with own_directory(building) as directory:
            descriptor = open_own(part_journal(part), directory, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PartInUseError(_last_writer(descriptor)) from None
        return _read_ranges(descriptor, num_rows)
    finally:
        os.close(descriptor)


def _last_writer(descriptor: int) -> str:
    """What the process that has the journal of a part has written of itself there."""
    lines = os.pread(descriptor, _MAX_JOURNAL_BYTES, 0).decode(errors="replace").splitlines()
    found = [line.removeprefix(_WRITER) for line in lines if line.startswith(_WRITER)]
    return builder_text(found[-1] if found else None)


def _lock(descriptor: int) -> None:
    """Find that no process has a journal, then share its lock with the workers to come.

    Between the two it is free for a moment: the lock beside the store must be held.
    """
    deadline = monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if monotonic() > deadline:
                raise StoreError("a worker process of it is still alive") from None
        sleep(0.02)


def _read_ranges(descriptor: int, num_rows: int) -> list[range]:
    with open(os.dup(descriptor), "rb") as file:
        data = read_at_most(file, JOURNAL, _MAX_JOURNAL_BYTES)
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        # A kill has cut the last line short: the next one must not be joined to it.
        os.ftruncate(descriptor, len(whole))
    ranges = []
    for line in whole.splitlines(keepends=True):
        found = _LINE.fullmatch(line)
        if found is not None:
            first, count = map(int, found.groups())
            if count and first + count <= num_rows:
                ranges.append(range(first, first + count))
    return ranges
