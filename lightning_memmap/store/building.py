"""A store that is being written: a generation, a draft, journals, and a writer in each process.

``build.json`` is the manifest before a row is written. ``journal`` has a byte for each row: whether
it is written, and may be read meanwhile, and whether it is on the disk, from where the next build
of the same goes on. A build in parts is called ``parts.json``, and each part has a journal of its
own. What begins with a dot in the source of a draft is for that comparison alone.

The building process and all its workers share a lock on the journal: while one of them lives, no
other process writes the same rows.
"""

import errno
import fcntl
import logging
import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Lock
from time import monotonic, sleep
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from typing_extensions import Self

from lightning_memmap.errors import StoreError
from lightning_memmap.schema.fields import Values
from lightning_memmap.store.checksums import compute_checksums
from lightning_memmap.store.columns import Column, shard_items
from lightning_memmap.store.directory import JOURNAL, KEY, PARTS, StoreDirectory
from lightning_memmap.store.files import (
    TEMPORARY,
    OpenFiles,
    read_exactly,
    sync_path,
    write_all,
    write_rows,
)
from lightning_memmap.store.identity import Fingerprint
from lightning_memmap.store.manifest import MAX_MANIFEST_BYTES, Manifest
from lightning_memmap.store.progress import ShowProgress, show_progress
from lightning_memmap.store.samples import (
    RandomDatasetError,
    hash_row,
    probe_rows,
    random_dataset_error,
)
from lightning_memmap.store.workers import RowNumbers, threads

#: What a build needs on the disk beside the rows: its draft, its journal, the manifest.
_ROOM_BYTES = 64 * 2**10
#: Files that are brought to the disk at once.
_NUM_SYNCS = 4
#: Files that a process keeps open. With more fields than that, it opens them again when needed.
_MAX_OPEN_FILES = 64
#: Rows whose marks are looked at together, and of which a call for each range costs nothing.
_MARKED_ROWS, _MANY_ROWS = 2**24, 2**12
#: How long the workers of a killed build may take to end.
_PATIENCE_S = 2.0
#: What a journal has for a row: it can be read; and it is on the disk.
WRITTEN, KEPT = 1, 2
#: In the source of a draft: the number of parts.
NUM_PARTS = ".num_parts"
_HIDDEN = partial(show_progress, hidden=True)
_log = logging.getLogger(__name__)


class InUseError(StoreError):
    """Another process writes these rows."""


class Journal:
    """Which of some rows are on the disk. It is locked: no other process writes these rows."""

    def __init__(
        self, generation: Path, rows: range, part: int | None = None, patience_s: float = 0.0
    ) -> None:
        self.rows, self.part, self._generation = rows, part, generation
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
            # What a killed process has written is not known to be on the disk.
            for some in self._where(WRITTEN) if num_bytes else ():
                self.mark(some, 0)
        except BaseException:
            self.close()
            raise

    def mark(self, rows: RowNumbers, what: int) -> None:
        """Note that rows are written, or on the disk."""
        marks = np.full((len(rows), 1), what, np.uint8)
        if isinstance(rows, range):
            write_all(self._file, marks.data.cast("B"), rows.start - self.rows.start)
        else:
            write_rows(self._file, rows - self.rows.start, marks)

    def sync(self) -> None:
        """Bring the marks to the disk."""
        os.fsync(self._file)

    def missing(self) -> Iterator[range]:
        """The rows that are still to be written, in ranges."""
        return self._where(0)

    def _where(self, what: int) -> Iterator[range]:
        """The rows for which it has this, in ranges."""
        for first in range(0, len(self.rows), _MARKED_ROWS):
            some = self.rows[first : first + _MARKED_ROWS]
            is_other = _marks(self._generation, self.name, first, len(some)) != what
            edges = np.flatnonzero(np.diff(is_other, prepend=True, append=True)).tolist()
            yield from (some[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True))

    @property
    def num_done(self) -> int:
        """How many of its rows are written."""
        return len(self.rows) - sum(map(len, self.missing()))

    def close(self) -> None:
        """Close it. The lock is free once no worker shares it. A second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def journal_name(part: int | None) -> str:
    """The name of a journal. No file of a column has such a name."""
    return JOURNAL if part is None else f"{JOURNAL}-{part}{TEMPORARY}"


def _marks(generation: Path, name: str, first: int, count: int) -> NDArray[np.uint8]:
    """The marks of some rows. Opened again, a file of the network has what others have written."""
    with closing(OpenFiles(generation, is_own=True)) as files:
        return read_exactly(files.open(name), first, count)


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


class RowWriter:
    """Writes rows of a store, in one process."""

    def __init__(self, generation: Path, columns: Sequence[Column], journal: str) -> None:
        self._columns = columns
        self.files = OpenFiles(generation, _MAX_OPEN_FILES)
        self.journal = os.dup(self.files.open(journal))
        # Without locks on this file system, the build is not resumed; or else it is another's.
        with suppress(OSError):
            fcntl.flock(self.journal, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def write(self, rows: RowNumbers, values: Iterable[Values]) -> None:
        """Write rows in any order."""
        for column, each in zip(self._columns, values, strict=True):
            column.write(self.files, rows, each)

    def close(self) -> None:
        """Close the files. A second call does nothing."""
        self.files.close()
        if self.journal >= 0:
            os.close(self.journal)
            self.journal = -1


class Building:
    """A store that is being written, by `begin`. As a context, it says what to do about an error,
    and removes what is not to be kept."""

    def __init__(
        self,
        store: Path,
        draft: Manifest,
        path: Path,
        journal: Journal | None = None,
        *,
        is_kept: bool = True,
    ) -> None:
        self.store, self.path, self.journal = store, path, journal
        self.draft = replace(draft, generation=path.name)
        self._written, self._syncing = deque[RowNumbers](), Lock()
        self._is_kept, self.is_committed = is_kept, False

    @classmethod
    def begin(
        cls,
        store: Path,
        draft: Manifest,
        *,
        resume: bool,
        part: tuple[int, int] | None = None,
        row_bytes: float = 0.0,
    ) -> "Building":
        """Make the files of a build, or go on with those of an interrupted build of the same.

        The lock of the store must be held: until it is finished, or for a part for this call alone.
        One that is not to be resumed is not kept where it fails.
        """
        directory, key = StoreDirectory(store), KEY if part is None else PARTS
        index, rows = (None, range(draft.num_rows))
        if part is not None:
            index, rows = part[0], rows_of_part(*part, draft.num_rows)
        for path in directory.unfinished(key) if resume else ():
            try:
                _check_same(read_draft(path, key), draft)
                _check_own_files(path, draft)
                journal = Journal(path, rows, index, _PATIENCE_S)
            except (OSError, ValueError, RecursionError, StoreError) as error:
                if part is None:
                    _log.warning("the interrupted build at %s is not resumed: %s", path, error)
                    continue
                if isinstance(error, InUseError):
                    raise StoreError(
                        f"part {index} of {part[1]} of the store at {store} is being written by"
                        " another process: give each process a part of its own"
                    ) from None
                raise StoreError(
                    f"the parts of the store at {store} that were written before are of another"
                    f" build: {error}. Give all parts the same dataset and options, or remove"
                    f" {path} to start again. With a fingerprint=... that was given from the"
                    " first part on, the code of the dataset may change"
                ) from error
            if part is None and (num_done := journal.num_done):
                num_rows, text = f"{len(rows):,}", "resuming: %s of %s rows were written before"
                _log.warning(f"{text}; to start again, remove %s", f"{num_done:,}", num_rows, path)
            return cls(store, draft, path, journal)
        if part is None:
            directory.discard()
        path = directory.begin()
        try:
            allocate_files(path, draft.columns, store, draft.num_rows * row_bytes)
            draft.write(path, key)
            journal = Journal(path, rows, index)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
        return cls(store, draft, path, journal, is_kept=resume)

    def __str__(self) -> str:
        num_done = self.draft.num_rows if self.journal is None else self.journal.num_done
        kept = f"{num_done:,} of {self.draft.num_rows:,} rows are kept"
        return f"the store at {self.store}: {kept} at {self.path}"

    @property
    def is_part(self) -> bool:
        """Whether other processes write other rows of the store."""
        return self.journal is not None and self.journal.part is not None

    def missing(self) -> list[range]:
        """The rows that are still to be written, in ranges: of a part, those of the part."""
        assert self.journal is not None
        return list(self.journal.missing())

    def wrote(self, rows: RowNumbers) -> None:
        """Note rows that were written, by whichever process. `sync` brings them to the disk."""
        assert self.journal is not None
        self.journal.mark(rows, WRITTEN)
        self._written.append(rows)

    def sync(self) -> None:
        """Bring what was written to the disk, and mark it in the journal."""
        with self._syncing:
            if self.is_committed:
                return
            # If this fails they are never marked: when asked again, the file system may no longer
            # report the failure. Others may be written meanwhile.
            rows = [self._written.popleft() for _ in range(len(self._written))]
            # A disk can take several files at once.
            with threads(_NUM_SYNCS) as pool:
                list(pool.map(_sync, [*self.path.iterdir(), self.path]))
            if self.journal is not None and rows:
                few = [np.asarray(some) for some in rows if len(some) < _MANY_ROWS]
                many = [some for some in rows if len(some) >= _MANY_ROWS]
                # Together, few rows are long ranges, each of which is one call.
                for some in [*many, *([np.concatenate(few)] if few else [])]:
                    self.journal.mark(some, KEPT)
                self.journal.sync()

    def finish(self, *, num_threads: int = 2, show: ShowProgress = _HIDDEN, **changes: Any) -> None:
        """Make this the store, once all rows are written. The lock must be held.

        Threads compute checksums. ``changes`` are those of the manifest from its draft.
        """
        # What was written last is brought to the disk while it is read.
        with threads(1) as thread:
            syncing = thread.submit(self.sync)
            columns = tuple(column.finish(self.path) for column in self.draft.columns)
            manifest = replace(self.draft, items=shard_items(columns), **changes)
            opened = [column.open(self.path) for column in columns]
            with show("checksums", sum(manifest.file_bytes.values()), 1) as advance:
                checksums = compute_checksums(
                    self.path, columns, num_threads=num_threads, advance=advance
                )
            syncing.result()
        assert self.journal is None or not self.missing()

        def digest(row: int) -> str:
            return hash_row([column.row(row) for column in opened])

        for row, expected in manifest.probes:
            if digest(row) != expected:
                names = [field.name for field in manifest.schema.fields]
                raise random_dataset_error(row, names)
        source = {
            # What begins with a dot was for the next build alone.
            **{key: text for key, text in manifest.source.items() if key[0] != "."},
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "lightning_memmap": _own_version(),
            # Looking up the version of an installed package takes milliseconds.
            "torch": str(torch.__version__),
        }
        probes = tuple((row, digest(row)) for row in probe_rows(manifest.num_rows))
        with self._syncing:  # A thread that brings files to the disk finds all of them, or none.
            StoreDirectory(self.store).commit(
                replace(manifest, checksums=checksums, probes=probes, source=source)
            )
            self.is_committed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, KeyboardInterrupt) and self._is_kept and self.journal is not None:
            kept = f"{self.journal.num_done:,} of {len(self.journal.rows):,} rows"
            _log.warning("interrupted: %s are kept at %s", kept, self.path)
        if self.journal is not None:
            self.journal.close()
        self._is_kept &= not isinstance(error, RandomDatasetError)
        if not (self._is_kept or self.is_committed):
            part = None if self.journal is None else self.journal.part
            with suppress(OSError):  # Then nobody goes on with it.
                (self.path / (KEY if part is None else journal_name(part))).unlink()
            if part is None:  # A part holds no lock. The store stays: a disk may fail after that.
                StoreDirectory(self.store).clear()
        then = "the same call then goes on" if self._is_kept else "nothing was changed"
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        is_ours = isinstance(error, OSError) and error.filename == str(self.store)
        if isinstance(error, OSError) and not is_ours and (is_full or error.filename is None):
            raise OSError(
                error.errno,
                f"{error.strerror or error}: rows cannot be written. Make room, or raise the limit"
                f" that is in the way; {then}",
                str(self.store),
            ) from error
        if isinstance(error, MemoryError):
            raise StoreError(f"{self.store}: memory is too short for its build; {then}") from error


def _sync(path: Path) -> None:
    """Bring a file to the disk. Other parts remove temporary ones of their own meanwhile."""
    try:
        sync_path(path)
    except FileNotFoundError:
        if not path.name.endswith(TEMPORARY):
            raise


def _own_version() -> str:
    try:
        return version("lightning_memmap")
    except PackageNotFoundError:  # It is run from a checkout.
        return "not installed"


def rows_of_part(index: int, num_parts: int, num_rows: int) -> range:
    """The rows of a part."""
    return range(index * num_rows // num_parts, (index + 1) * num_rows // num_parts)


def read_draft(generation: Path, key: str) -> Manifest:
    """Read what is built in a directory of this user."""
    with closing(OpenFiles(generation, is_own=True)) as files:
        size = os.fstat(file := files.open(key)).st_size
        data = read_exactly(file, 0, min(size, MAX_MANIFEST_BYTES + 1))
    found = Manifest.decode(data.tobytes(), f"{generation}, not finished,")
    return replace(found, items={}, generation=generation.name)


def unfinished_build(store: Path) -> str | None:
    """How much of an unfinished build is on the disk, and how it goes on; None without one."""
    found = {each: key for key in (PARTS, KEY) for each in StoreDirectory(store).unfinished(key)}
    for generation, key in found.items():
        with suppress(OSError, ValueError, StoreError):  # It is another user's, or damaged.
            draft, num_done = read_draft(generation, key), 0
            if not (journals := [*generation.glob(f"{JOURNAL}*")]):
                continue  # An unfinished pull has none.
            for journal in journals:
                count = min(journal.stat().st_size, draft.num_rows)
                num_done += np.count_nonzero(_marks(generation, journal.name, 0, count) == KEPT)
            there = f"{num_done:,} of {draft.num_rows:,} rows are there: its build"
            if key == KEY:
                return f"{there} is not finished, and goes on with them when it is run again"
            return (
                f"{there} in {int(draft.source.get(NUM_PARTS, 1))} parts is not finished: once all"
                f" are written, run `lightning-memmap store build {store} --finish`"
            )
    return None


def allocate_files(
    directory: Path, columns: Sequence[Column], store: Path, rows_bytes: float = 0.0
) -> None:
    """Make the files of columns and claim their space: a full disk is an error now, not late.

    ``rows_bytes`` are those of all rows, as far as is known. Where some differ in length, these
    will need twice their share, until they are joined.
    """
    files = {name: size for column in columns for name, size in column.file_bytes.items()}
    fixed = [column for column in columns if not column.field.num_variable]
    fixed_bytes = sum(sum(column.file_bytes.values()) for column in fixed)
    variable_bytes = max(0, int(rows_bytes) - fixed_bytes) if len(fixed) < len(columns) else 0
    needed = sum(files.values()) + 2 * variable_bytes
    free = shutil.disk_usage(directory).free
    try:
        if needed + _ROOM_BYTES > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for name, num_bytes in files.items():
            with open(directory / name, "xb") as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
    except BaseException as error:
        shutil.rmtree(directory, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            likely = f", judging by the rows that were read first: twice {variable_bytes} of them"
            likely += " for rows that differ in length, until these are joined"
            raise OSError(
                error.errno,
                f"{error.strerror}: the store needs {needed} bytes"
                f"{likely if variable_bytes else ''}, and up to {max(files.values(), default=0)} in"
                f" one file; {free} are free, of which {_ROOM_BYTES} must stay free: make room,"
                " choose a directory on a larger disk, or raise the limit (`ulimit -f`)",
                str(store),
            ) from error
        raise


def _check_own_files(path: Path, draft: Manifest) -> None:
    """Check that the files of an unfinished build are plain ones of this user."""
    with closing(OpenFiles(path, _MAX_OPEN_FILES, is_own=True)) as files:
        for name, num_bytes in draft.file_bytes.items():
            if (found := os.fstat(files.open(name)).st_size) != num_bytes:
                raise StoreError(f"{name} has {found} bytes, expected {num_bytes}")


def _check_same(found: Manifest, draft: Manifest) -> None:
    """Check that what was begun is what is to be built. The message is the difference in words."""
    identity = found.fingerprint or Fingerprint({})
    changed = identity.difference(draft.fingerprint or Fingerprint({}))
    if changed is not None:
        raise StoreError(f"since then, {changed}")
    one, other = ({**_facts_of(each), **each.source} for each in (found, draft))
    for name in sorted({*one, *other} - {"dataset"}):
        if one.get(name) != other.get(name):
            named = name.removeprefix(".")
            old, new = (str(each.get(name))[:99] for each in (one, other))
            raise StoreError(f"it has {named}={old}, and this one {named}={new}")


def _facts_of(manifest: Manifest) -> dict[str, Any]:
    return {
        "num_rows": manifest.num_rows,
        "num_shards": manifest.num_shards,
        **{f"field {each.name!r}": str(each) for each in manifest.schema.fields},
        "structure": manifest.structure,
        "probes": tuple(manifest.probes),
        "classes": manifest.classes,
    }
