"""A store that is being written: a generation, a plan, a journal, and a writer in each process.

``build.json`` says what is built, ``journal`` which rows are on the disk, so that the next build of
the same can go on from there. The building process and all workers that write share a lock on the
journal: while one of them lives, no other process writes into the same files. The processes of a
build in parts know nothing of each other: each has a journal of its own, which it alone writes.
"""

import errno
import fcntl
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from platform import node
from time import monotonic, sleep
from typing import Any

import msgspec
import numpy as np
import tensordict
import torch

from lightning_memmap.errors import StoreError, StoreNotFoundError
from lightning_memmap.sampling import Integers, Shards
from lightning_memmap.schema import Schema, Values
from lightning_memmap.store.checksums import compute_checksums
from lightning_memmap.store.columns import Column, grow_columns, ragged_files
from lightning_memmap.store.directory import JOURNAL, KEY, PARTS, StoreDirectory, remove_tree
from lightning_memmap.store.files import (
    SAFE_FLAGS,
    TEMPORARY,
    OpenFiles,
    check_own,
    check_plain,
    claim,
    open_own,
    own_directory,
    read_at_most,
    read_own,
    sync_path,
)
from lightning_memmap.store.identity import Fingerprint
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.probes import hash_row, probe_rows, random_dataset_error
from lightning_memmap.store.progress import ShowProgress
from lightning_memmap.store.ranges import merge_ranges, missing_ranges
from lightning_memmap.store.row_bytes import rows_bytes
from lightning_memmap.store.workers import exit_if_orphaned, threads

#: What a build needs on the disk beside the rows: its plan, its journal, the manifest.
_ROOM_BYTES = 64 * 2**10
#: Holds the place of rows that differ in length until they are joined.
_CLAIMED = "claimed" + TEMPORARY
#: Files that are brought to the disk at once.
_NUM_SYNCS = 4
#: Files that a process keeps open. With more fields than that, it opens them again when needed.
_MAX_OPEN_FILES = 64
#: The disk begins with so many bytes while others are being read, so that few are left at the end.
_SYNC_BYTES = 64 * 2**20
_MAX_KEY_BYTES, _MAX_JOURNAL_BYTES = 64 * 2**20, 256 * 2**20
#: How long the workers of a killed build may take to end.
_PATIENCE_S = 2.0
#: What begins the line in the journal of a part that says which process has it.
_WRITER = "by "
_LINE = re.compile(rb"([0-9]{1,15}) ([0-9]{1,15})\n")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StorePlan:
    """A store that is to be made, the same for all processes that write its rows.

    Args:
        path: Directory of the store.
        num_rows: Rows of the store.
        num_shards: Shards that the rows are divided into.
        schema: The fields and the nesting of a sample.
        classes: The names of the dataset's classes, by label.
    """

    path: Path
    num_rows: int
    num_shards: int
    schema: Schema
    classes: tuple[str, ...] = ()

    @cached_property
    def shards(self) -> Shards:
        """The rows, and the shards that they are divided into."""
        return Shards(self.num_rows, self.num_shards)

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the store before a row is written, in the order of the fields."""
        try:
            return grow_columns(self.schema, self.shards)
        except ValueError as error:
            raise StoreError(f"no store can be made of this: {error}") from error

    @property
    def file_bytes(self) -> dict[str, int]:
        """The size of each file that is made before the first row is written, by its name."""
        return {name: size for column in self.columns for name, size in column.file_bytes.items()}

    def to_json(self) -> dict[str, Any]:
        """What must be the same in a build that goes on with this one, as JSON values."""
        return {
            "num_rows": self.num_rows,
            "num_shards": self.num_shards,
            **self.schema.to_json(),
            "columns": msgspec.to_builtins(ragged_files(self.columns)),
        }

    def check(self) -> None:
        """Check that the store can be opened once it is built."""
        self.draft().encode()

    def draft(
        self,
        probes: tuple[tuple[int, str], ...] = (),
        fingerprint: Fingerprint | None = None,
    ) -> Manifest:
        """The manifest of the store before a row is written."""
        sums = {field.name: ("0" * 16,) * self.num_shards for field in self.schema.fields}
        return Manifest(
            self.shards, self.schema, self.columns, probes, sums, {}, fingerprint, self.classes
        )

    def __str__(self) -> str:
        fields = ", ".join(f"{field.name} {field}" for field in self.schema.fields)
        return f"{self.num_rows} rows of {fields} at {self.path}"


class RowWriter:
    """Writes rows of a store, in one process.

    The directory stays open, and files are opened relative to it: a process that outlives its build
    writes into no other.

    Args:
        building: The generation.
        columns: Its columns.
        journal: The name of the journal whose lock is shared, so that the next build knows that
            this process is alive; None: there is none.

    Raises:
        OSError: The files cannot be opened.
    """

    def __init__(self, building: Path, columns: Sequence[Column], journal: str | None) -> None:
        self._columns = columns
        self.files = OpenFiles(building, _MAX_OPEN_FILES)
        self._num_waiting = 0
        self._journal = None if journal is None else _share(journal, self.files.directory)

    def write(self, rows: range | Integers, values: Iterable[Values]) -> None:
        """Write rows in any order."""
        for column, each in zip(self._columns, values, strict=True):
            exit_if_orphaned()
            column.write(self.files, rows, each)
            self._num_waiting += each.data.nbytes
        # The disk begins with what was written, once that is much.
        if self._num_waiting >= _SYNC_BYTES:
            self.files.begin_sync()
            self._num_waiting = 0

    def close(self) -> None:
        """Close the files. A second call does nothing."""
        self.files.close()
        if self._journal is not None:
            os.close(self._journal)
            self._journal = None


def _share(name: str, directory: int) -> int:
    """Share the lock of a journal, until the descriptor that is returned is closed."""
    descriptor = os.open(name, os.O_RDWR | SAFE_FLAGS, dir_fd=directory)
    # Without locks on this file system, the build is not resumed; or else it is another one's.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    exit_if_orphaned()
    return descriptor


class Building:
    """A store that is being written. Make one with `begin` or `begin_part`, and close it.

    Args:
        plan: The store.
        path: Its generation.
        journal: The name of the journal; see `RowWriter`.
        descriptor: The open journal, locked.
        done: The rows that it lists.
    """

    def __init__(
        self,
        plan: StorePlan,
        path: Path,
        journal: str = JOURNAL,
        descriptor: int | None = None,
        done: Iterable[range] = (),
    ) -> None:
        self.plan, self.path, self.journal = plan, path, journal
        self._descriptor = descriptor
        self._done = merge_ranges(done)
        self._written: list[range] = []

    @classmethod
    def begin(
        cls,
        plan: StorePlan,
        fingerprint: Fingerprint,
        contents: Mapping[str, Any],
        *,
        resume: bool,
        variable_bytes: int = 0,
    ) -> "Building":
        """Make the files of a build, or go on with those of an interrupted build of the same. The
        lock of the store must be held until it is finished.
        """
        directory = StoreDirectory(plan.path)
        contents = {**plan.to_json(), **contents}
        for path in directory.unfinished(KEY) if resume else ():
            try:
                building, builder = cls._resume(plan, path, fingerprint, contents)
            except (OSError, ValueError, RecursionError, StoreError) as error:
                _log.warning("the interrupted build at %s is not resumed: %s", path, error)
                continue
            if building.num_done:
                _log.warning(
                    "resuming: %s of %s rows were written by %s; fresh=True (--fresh) starts again",
                    f"{building.num_done:,}",
                    f"{plan.num_rows:,}",
                    builder,
                )
            return building
        directory.discard()
        path = directory.begin()
        try:
            allocate_files(path, plan.columns, plan.path, variable_bytes)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | SAFE_FLAGS
            descriptor = os.open(path / JOURNAL, flags, 0o666)
            _write_key(path, KEY, {**_key(fingerprint), **contents})
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
        with suppress(OSError):  # Without locks on this file system, the build is not resumed.
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        return cls(plan, path, JOURNAL, descriptor)

    @classmethod
    def _resume(
        cls, plan: StorePlan, path: Path, fingerprint: Fingerprint, contents: Mapping[str, Any]
    ) -> "tuple[Building, str]":
        """Take over the files of an interrupted build, and say who began it. All must belong to
        this user, and none of its processes may be alive."""
        with own_directory(path) as directory:
            found = _read_key(directory, KEY)
            if (changed := _difference(found, fingerprint, contents)) is not None:
                raise StoreError(changed)
            for name, num_bytes in plan.file_bytes.items():
                state = os.stat(name, dir_fd=directory, follow_symlinks=False)
                check_own(name, state)
                if state.st_size != num_bytes:
                    raise StoreError(f"{name} has {state.st_size} bytes, expected {num_bytes}")
            descriptor = open_own(JOURNAL, directory, os.O_RDWR | os.O_APPEND)
        try:
            _lock(descriptor)
            done = _read_ranges(descriptor, plan.num_rows)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(plan, path, JOURNAL, descriptor, done), _printable(found.get("builder"))

    @classmethod
    def begin_part(
        cls,
        plan: StorePlan,
        fingerprint: Fingerprint,
        contents: Mapping[str, Any],
        part: int,
        *,
        variable_bytes: int = 0,
        **more: Any,
    ) -> "Building":
        """Go on with one part of a build, whose files the first part makes. The lock of the store
        must be held, for this call alone.
        """
        directory = StoreDirectory(plan.path)
        contents = {**plan.to_json(), **contents}
        found = directory.unfinished(PARTS)
        if not found:
            path = directory.begin()
            try:
                allocate_files(path, plan.columns, plan.path, variable_bytes)
                _write_key(path, PARTS, {**more, **_key(fingerprint), **contents})
            except BaseException:
                shutil.rmtree(path, ignore_errors=True)
                raise
        else:
            path = found[0]
            try:
                changed = _difference(read_parts(path), fingerprint, contents)
            except (ValueError, StoreError, OSError) as error:
                changed = str(error)
            if changed is not None:
                raise StoreError(
                    f"the parts of the store at {plan.path} that were written before are of another"
                    f" build: {changed}. Give all parts the same dataset and options, or remove"
                    f" {path} to start again. With a fingerprint=... that was given from the first"
                    " part on, the code of the dataset may change"
                )
        name = _part_journal(part)
        with own_directory(path) as opened:
            descriptor = open_own(name, opened, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            try:
                _lock(descriptor)
            except StoreError:
                raise PartInUseError(_last_writer(descriptor)) from None
            done = _read_ranges(descriptor, plan.num_rows)
            # No line of rows: it is for the message of another process that wants this part.
            os.write(descriptor, f"{_WRITER}{_this_process()}\n".encode())
        except BaseException:
            os.close(descriptor)
            raise
        return cls(plan, path, name, descriptor, done)

    @property
    def num_done(self) -> int:
        """The number of rows that are on the disk."""
        return sum(map(len, self._done))

    def missing(self, rows: range) -> list[range]:
        """Those of some rows that are not on the disk, in ranges."""
        return missing_ranges(self._done, rows.stop, rows.start)

    def wrote(self, rows: range) -> None:
        """Note rows that were written, by whichever process. `sync` brings them to the disk."""
        self._written.append(rows)

    def sync(self) -> None:
        """Bring what was written to the disk, and list it in the journal."""
        # If this fails they are never listed: when asked again, the file system may no longer
        # report the failure.
        rows, self._written = merge_ranges(self._written), []
        names = (name for name in os.listdir(self.path) if name.endswith(TEMPORARY))
        paths = [self.path / name for name in {*self.plan.file_bytes, *names}]
        # A disk can take several files at once.
        if paths:
            with threads(min(_NUM_SYNCS, len(paths))) as pool:
                list(pool.map(sync_path, paths))
        if self._descriptor is None:
            return
        data = b"".join(b"%d %d\n" % (each.start, len(each)) for each in rows)
        num_bytes = os.fstat(self._descriptor).st_size
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
            os.fsync(self._descriptor)
        except OSError:
            # Half a line, joined with the next one, would name other rows.
            os.ftruncate(self._descriptor, num_bytes)
            raise
        self._done += rows

    def finish(
        self,
        probes: Sequence[tuple[int, str]] | None,
        source: Mapping[str, str],
        fingerprint: Fingerprint | None,
        *,
        num_threads: int,
        show: ShowProgress,
    ) -> None:
        """Make this the store, once all rows are written. The lock must be held."""
        plan = self.plan
        (self.path / _CLAIMED).unlink(missing_ok=True)
        # What was written last is brought to the disk while it is read.
        with threads(1) as thread:
            syncing = thread.submit(self.sync)
            columns = tuple(column.finish(self.path) for column in plan.columns)
            sizes = {name: size for each in columns for name, size in each.file_bytes.items()}
            for name, size in sizes.items():
                if (found := check_plain(self.path / name)) != size:
                    raise StoreError(f"{self.path / name} has {found} bytes, and not {size}")
            with show("checksums", sum(sizes.values()), 1) as advance:
                checksums = compute_checksums(
                    self.path, columns, num_threads=max(2, num_threads), advance=advance
                )
            syncing.result()
        assert self._descriptor is None or not self.missing(range(plan.num_rows))

        def digest(row: int) -> str:
            return hash_row([column.read(self.path, row) for column in columns])

        for row, expected in probes or ():
            if digest(row) != expected:
                names = ", ".join(field.name for field in plan.schema.fields)
                self.abandon()
                raise random_dataset_error(row, names)
        probes = [(row, digest(row)) for row in probe_rows(plan.num_rows)]
        source = {
            **source,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "lightning_memmap": version("lightning_memmap"),
            # Looking up the version of an installed package takes milliseconds.
            "torch": str(torch.__version__),
            "tensordict": str(tensordict.__version__),
        }
        manifest = Manifest(
            plan.shards,
            plan.schema,
            columns,
            tuple(probes),
            checksums,
            source,
            fingerprint,
            plan.classes,
            self.path.name,
        )
        StoreDirectory(plan.path).commit(manifest)

    def abandon(self) -> None:
        """Remove what was written, unless it is the store: the disk may fail after the commit."""
        try:
            current = Manifest.read(self.plan.path).generation
        except StoreNotFoundError:
            current = ""
        except StoreError:
            return  # Whose files these are cannot be told.
        if current != self.path.name:
            with suppress(StoreError):
                remove_tree(self.path)

    def close(self) -> None:
        """Close the journal. Its lock is free once no worker shares it either."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class PartInUseError(StoreError):
    """Another process writes a part. The message says which, where it is known."""


def read_parts(path: Path) -> dict[str, Any]:
    """What the first part of a build has recorded, as JSON values, not checked; see `_read_key`."""
    with own_directory(path) as directory:
        return _read_key(directory, PARTS)


def read_part(path: Path, part: int, num_rows: int) -> list[range] | None:
    """The rows of one part that are on the disk."""
    try:
        with own_directory(path) as directory:
            descriptor = open_own(_part_journal(part), directory, os.O_RDWR)
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


@contextmanager
def explained(path: Path, then: str) -> Iterator[None]:
    """Say what to do about a file that cannot be written."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(
            error.errno,
            f"{error.strerror or error}: rows cannot be written. Make room, or raise the limit that"
            f" is in the way; {then}",
            str(path),
        ) from error
    except MemoryError as error:
        raise StoreError(f"{path}: memory is too short for its build; {then}") from error


def allocate_files(
    directory: Path, columns: Sequence[Column], path: Path, variable_bytes: int = 0
) -> None:
    """Make the files of columns and claim their space, and as much as rows that differ in length
    are expected to need once they are joined: a full disk is an error now, not late."""
    try:
        # Several columns may have a file in common.
        files = {
            name: (num_bytes, column.field.name)
            for column in columns
            for name, num_bytes in column.file_bytes.items()
        }
        needed = sum(num_bytes for num_bytes, _ in files.values()) + 2 * variable_bytes
        free = shutil.disk_usage(directory).free
        if needed + _ROOM_BYTES > free:
            raise _disk_full(path, needed, free, variable_bytes)
        if variable_bytes:
            files[_CLAIMED] = variable_bytes, ""
        for name, (num_bytes, field) in files.items():
            try:
                with open(directory / name, "xb") as file:
                    claim(file.fileno(), num_bytes, "for its rows")
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise _disk_full(path, needed, free, variable_bytes) from error
                if error.errno != errno.EFBIG:
                    raise
                if name == _CLAIMED:  # It stands for several files.
                    continue
                raise OSError(
                    errno.EFBIG,
                    f"field {field!r} needs a file of {num_bytes} bytes, more than this process"
                    " (`ulimit -f`) or the file system allows",
                    str(path),
                ) from error
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _disk_full(path: Path, needed: int, free: int, variable_bytes: int) -> OSError:
    likely = (
        f", judging by the rows that were read first: twice {variable_bytes} of them for rows that"
        " differ in length, until these are joined"
    )
    return OSError(
        errno.ENOSPC,
        f"the store needs {needed} bytes{likely if variable_bytes else ''}; {free} are free, of"
        f" which {_ROOM_BYTES} must stay free: make room, or choose a directory on a larger disk",
        str(path),
    )


def _key(fingerprint: Fingerprint) -> dict[str, Any]:
    return {"builder": _this_process(), "fingerprint": msgspec.to_builtins(fingerprint)}


def _write_key(path: Path, name: str, key: Mapping[str, Any]) -> None:
    """Write what is built: all of it or nothing."""
    temporary = path / (name + TEMPORARY)
    with open(temporary, "x", encoding="utf-8") as file:
        json.dump(key, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path / name)


def _read_key(directory: int, name: str) -> dict[str, Any]:
    """Read what is built, not checked, in an open directory of this user."""
    found = json.loads(read_own(name, directory, _MAX_KEY_BYTES))
    if not isinstance(found, dict):
        raise ValueError(f"{name} holds no JSON object")
    return found


def _difference(
    found: Mapping[str, Any], fingerprint: Fingerprint, contents: Mapping[str, Any]
) -> str | None:
    """Say in words how what was found differs from what is to be built; None where it does not."""
    changed = msgspec.convert(found.get("fingerprint"), Fingerprint).difference(fingerprint)
    if changed is not None:
        return f"since then, {changed}"
    for key, value in contents.items():
        if (was := found.get(key)) == value:
            continue
        if key == "order":
            return "its rows are read in another order"
        if key == "probes":
            return "rows that are read for comparison have changed"
        if type(was) is int:
            return f"it has {key}={was}, and this one {key}={value}"
        return f"it has other {key}"
    return None


def _this_process() -> str:
    """Name this process, for the message of another one: its number, its machine and the time."""
    now = datetime.now(timezone.utc).isoformat(sep=" ", timespec="seconds")
    return f"process {os.getpid()} on {node()} at {now}"


def _printable(builder: object) -> str:
    """A process as it has named itself, not checked."""
    is_line = isinstance(builder, str) and len(builder) < 200 and builder.isprintable()
    return str(builder) if is_line else "another process"


def _part_journal(part: int) -> str:
    """The name of the journal of one part of a build. No file of a column has such a name."""
    return f"{JOURNAL}-{part}{TEMPORARY}"


def _last_writer(descriptor: int) -> str:
    """What the process that has the journal of a part has written of itself there."""
    with open(os.dup(descriptor), "rb") as file:
        file.seek(0)
        data = read_at_most(file, JOURNAL, _MAX_JOURNAL_BYTES)
    lines = data.decode(errors="replace").splitlines()
    found = [line.removeprefix(_WRITER) for line in lines if line.startswith(_WRITER)]
    return _printable(found[-1] if found else None)


def _lock(descriptor: int) -> None:
    """Find that no process has a journal, then share its lock with the workers to come.

    Between the two it is free for a moment: the lock of the store must be held.
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


def variable_bytes(plan: StorePlan, row_bytes: float) -> int:
    """Bytes of the rows of a plan that differ in length, where a row has so many in all."""
    fixed = [column for column in plan.columns if not column.field.num_variable]
    if len(fixed) == len(plan.columns):
        return 0
    return max(0, int(plan.num_rows * row_bytes) - rows_bytes(fixed, range(plan.num_rows)))


def numbers_of(rows: Sequence[int] | Integers, num_rows: int) -> Integers:
    """Row numbers as an array, checked."""
    numbers = np.asarray(rows, np.int64)
    if len(numbers) and (numbers.min() < 0 or numbers.max() >= num_rows):
        raise IndexError(f"rows {numbers.min()} to {numbers.max()}: the table has {num_rows}")
    return numbers
