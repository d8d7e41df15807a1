"""What a build has finished, noted beside the files that grow, so that the next one can go on.

``plan.json`` says what is built, ``journal`` which rows are on the disk. The journal is locked by
the building process and by all workers that it forks: while one of them lives, nobody else writes
into the same files.
"""

import fcntl
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from platform import node
from time import monotonic, sleep
from typing import Any

from lightning_memmap.errors import StoreError
from lightning_memmap.store.fingerprint import Fingerprint
from lightning_memmap.store.ranges import merge_ranges

PLAN = "plan.json"
JOURNAL = "journal"

_MAX_PLAN_BYTES = 64 * 2**20
_MAX_JOURNAL_BYTES = 256 * 2**20
#: How long the workers of a killed build may take to end.
_PATIENCE_S = 2.0
_LINE = re.compile(rb"([0-9]{1,15}) ([0-9]{1,15})\n")
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuildPlan:
    """What a build is to make; another build goes on with it only if it is to make the same.

    Args:
        fingerprint: The identity of the dataset.
        layout: Rows, shards, schema and probes as JSON values.
        file_bytes: Size of each file that the rows go to, by name.
    """

    fingerprint: Fingerprint
    layout: Mapping[str, Any]
    file_bytes: Mapping[str, int]

    @property
    def num_rows(self) -> int:
        """Rows of the dataset."""
        return int(self.layout["num_rows"])

    def difference(self, found: Mapping[str, Any]) -> str | None:
        """What is another thing in the plan that was found, in words."""
        changed = Fingerprint.from_json(found.get("fingerprint")).difference(self.fingerprint)
        if changed is not None:
            return f"since then, {changed}"
        for key, value in self.layout.items():
            if found.get(key) != value:
                return f"it has other {key}"
        return None


class Journal:
    """The rows of a build that are on the disk.

    Args:
        descriptor: The open file, locked. It is inherited by workers, and closed by `close`.
        done: The rows that are noted in it.
    """

    def __init__(self, descriptor: int, done: Iterable[range] = ()) -> None:
        self.descriptor = descriptor
        self.done = merge_ranges(done)

    @property
    def num_done(self) -> int:
        """Rows that are noted."""
        return sum(map(len, self.done))

    @classmethod
    def create(cls, building: Path, plan: BuildPlan) -> "Journal":
        """Begin the journal of a build whose files have just been made."""
        now = datetime.now(timezone.utc).isoformat(sep=" ", timespec="seconds")
        body = {
            "builder": f"process {os.getpid()} on {node()} at {now}",
            "fingerprint": plan.fingerprint.to_json(),
            **plan.layout,
        }
        with open(building / PLAN, "x", encoding="utf-8") as file:
            json.dump(body, file)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | _FLAGS
        journal = cls(os.open(building / JOURNAL, flags, 0o666))
        with suppress(OSError):  # A file system without locks: what is built there is not resumed.
            fcntl.flock(journal.descriptor, fcntl.LOCK_EX)
        return journal

    @classmethod
    def resume(cls, building: Path, plan: BuildPlan) -> "Journal | None":
        """Go on with the journal of an interrupted build, if it is of the same plan, all of it is
        this user's own, and no process of that build lives on. Otherwise the log says why not.

        Returns:
            The journal; None where a new build is to start.
        """
        if not os.path.lexists(building):
            return None
        try:
            journal, builder = cls._resume(building, plan)
        except (OSError, ValueError, RecursionError, StoreError) as error:
            _log.warning("the interrupted build at %s is not resumed: %s", building, error)
            return None
        if journal.done:
            _log.warning(
                "resuming: %s of %s rows were written by %s; fresh=True (--fresh) starts anew",
                f"{journal.num_done:,}",
                f"{plan.num_rows:,}",
                builder,
            )
        return journal

    @classmethod
    def _resume(cls, building: Path, plan: BuildPlan) -> "tuple[Journal, str]":
        directory = os.open(building, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
        try:
            if os.fstat(directory).st_uid != os.geteuid():
                raise StoreError("it belongs to another user")
            found = json.loads(_read_own(PLAN, directory, _MAX_PLAN_BYTES))
            if not isinstance(found, dict):
                raise ValueError(f"{PLAN} is no table")
            if (changed := plan.difference(found)) is not None:
                raise StoreError(changed)
            for name, num_bytes in plan.file_bytes.items():
                state = os.stat(name, dir_fd=directory, follow_symlinks=False)
                _check_own(name, state)
                if state.st_size != num_bytes:
                    raise StoreError(f"{name} has {state.st_size} bytes, expected {num_bytes}")
            descriptor = _open_own(JOURNAL, directory, os.O_RDWR | os.O_APPEND)
        finally:
            os.close(directory)
        try:
            _lock(descriptor)
            return cls(descriptor, _read_ranges(descriptor, plan.num_rows)), _builder(found)
        except BaseException:
            os.close(descriptor)
            raise

    def note(self, written: Iterable[range]) -> None:
        """Note rows that have been brought to the disk.

        Raises:
            OSError: They could not be noted. The journal is as it was.
        """
        ranges = merge_ranges(written)
        data = b"".join(b"%d %d\n" % (rows.start, len(rows)) for rows in ranges)
        num_bytes = os.fstat(self.descriptor).st_size
        try:
            while data:
                data = data[os.write(self.descriptor, data) :]
            os.fsync(self.descriptor)
        except OSError:
            # Half a line must not become one of other rows with what is noted next.
            os.ftruncate(self.descriptor, num_bytes)
            raise
        self.done = merge_ranges((*self.done, *ranges))

    def close(self) -> None:
        """Let go of the file."""
        os.close(self.descriptor)


def _lock(descriptor: int) -> None:
    deadline = monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if monotonic() > deadline:
                raise StoreError("a worker process of it is still alive") from None
        sleep(0.02)


def _check_own(name: str, state: os.stat_result) -> None:
    if not stat.S_ISREG(state.st_mode) or state.st_nlink != 1 or state.st_uid != os.geteuid():
        raise StoreError(f"{name} is no plain file of this user's own")


def _open_own(name: str, directory: int, flags: int) -> int:
    descriptor = os.open(name, flags | _FLAGS, dir_fd=directory)
    try:
        _check_own(name, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _read_own(name: str, directory: int, max_bytes: int) -> bytes:
    descriptor = _open_own(name, directory, os.O_RDONLY)
    with open(descriptor, "rb") as file:
        return _read_at_most(file.read, name, max_bytes)


def _read_at_most(read: Callable[[int], bytes], name: str, max_bytes: int) -> bytes:
    data = read(max_bytes + 1)
    if len(data) > max_bytes:
        raise StoreError(f"{name} is larger than {max_bytes} bytes")
    return data


def _read_ranges(descriptor: int, num_rows: int) -> list[range]:
    with open(os.dup(descriptor), "rb") as file:
        data = _read_at_most(file.read, JOURNAL, _MAX_JOURNAL_BYTES)
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        # A kill cut the last line off; what is noted next must not be joined to it.
        os.ftruncate(descriptor, len(whole))
    ranges = []
    for line in whole.splitlines(keepends=True):
        found = _LINE.fullmatch(line)
        if found is not None:
            first, count = map(int, found.groups())
            if count and first + count <= num_rows:
                ranges.append(range(first, first + count))
    return ranges


def _builder(found: Mapping[str, Any]) -> str:
    builder = found.get("builder")
    is_line = isinstance(builder, str) and len(builder) < 200 and builder.isprintable()
    return str(builder) if is_line else "another process"
