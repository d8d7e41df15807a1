"""Write a store: a generation, its draft, its journals, and a writer in each process.

``build.json`` is the draft: the manifest before a row is written. ``journal`` has a byte for each
row: whether it is written, so that it can be read during the build, and whether it is on the disk,
so that the next build can resume from it. The draft of a build in parts is ``parts.json``, and each
part has its own journal. Keys of ``source`` that begin with a dot are only used to match an
interrupted build; they are not committed.

The building process and all its workers share a lock on the journal: while one of them lives, no
other process writes the same rows.
"""

import errno
import fcntl
import logging
import os
import shutil
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from datetime import datetime, timezone
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from typing_extensions import Self

from lightning_memmap.errors import StoreError
from lightning_memmap.integers import even_range
from lightning_memmap.schema.fields import Values
from lightning_memmap.store.checksums import compute_checksums
from lightning_memmap.store.columns import Column, shard_items
from lightning_memmap.store.directory import DRAFT, JOURNAL, PARTS_DRAFT, StoreDirectory
from lightning_memmap.store.files import (
    TEMPORARY,
    OpenFiles,
    read_exactly,
    sync_path,
)
from lightning_memmap.store.identity import Identity
from lightning_memmap.store.journal import (
    KEPT,
    WRITTEN,
    InUseError,
    Journal,
    journal_name,
    read_marks,
)
from lightning_memmap.store.manifest import MAX_MANIFEST_BYTES, Manifest
from lightning_memmap.store.progress import ShowProgress, show_progress
from lightning_memmap.store.samples import (
    RandomDatasetError,
    choose_probe_rows,
    hash_row,
    make_random_dataset_error,
)
from lightning_memmap.store.workers import RowIndices, start_threads

#: Bytes of the draft, the journal and the manifest.
_ROOM_BYTES = 64 * 2**10
#: Files that are synced at once.
_NUM_SYNCS = 4
#: The most files that a process keeps open. It opens others again when it needs them.
_MAX_OPEN_FILES = 64
#: Blocks of at least this many rows are marked with a call each.
_MANY_ROWS = 2**12
#: How long the workers of a killed build may take to end.
_PATIENCE_S = 2.0
#: In the source of a draft: the number of parts.
NUM_PARTS = ".num_parts"
_HIDDEN = partial(show_progress, hidden=True)
_log = logging.getLogger(__name__)


class RowWriter:
    """Writes rows of a store, in one process."""

    def __init__(self, generation: Path, columns: Sequence[Column], journal: str) -> None:
        self._columns = columns
        self.files = OpenFiles(generation, _MAX_OPEN_FILES)
        self.journal = os.dup(self.files.open(journal))
        # Without locks on this file system, the build is not resumed; or else it is another's.
        with suppress(OSError):
            fcntl.flock(self.journal, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def write(self, rows: RowIndices, values: Iterable[Values]) -> None:
        """Write rows in any order."""
        for column, column_values in zip(self._columns, values, strict=True):
            column.write(self.files, rows, column_values)

    def close(self) -> None:
        """Close the files. A second call does nothing."""
        self.files.close()
        if self.journal >= 0:
            os.close(self.journal)
            self.journal = -1


class Building:
    """A store that is being written, made by `begin`.

    Use it as a context manager: it tells the user what to do about an error, and removes files that
    no later build can use.
    """

    def __init__(
        self,
        store: Path,
        draft: Manifest,
        path: Path,
        journal: Journal | None = None,
        *,
        is_kept: bool = True,
    ) -> None:
        self.store = store
        self.path = path
        self.journal = journal
        self.draft = replace(draft, generation=path.name)
        self._written = deque[RowIndices]()
        self._syncing = Lock()
        self._is_kept = is_kept
        self.is_committed = False

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
        """Create the files of a build, or resume an interrupted build of the same draft.

        The lock of the store must be held until the build is finished, or for a part during this
        call. Without ``resume``, the files are removed if the build fails.
        """
        directory = StoreDirectory(store)
        draft_name = DRAFT if part is None else PARTS_DRAFT
        index = None if part is None else part[0]
        rows = range(draft.num_rows) if part is None else even_range(*part, draft.num_rows)
        for path in directory.unfinished(draft_name) if resume else ():
            try:
                _check_same_build(read_draft(path, draft_name), draft)
                _check_own_files(path, draft)
                journal = Journal(path, rows, index, _PATIENCE_S)
            except (OSError, ValueError, RecursionError, StoreError) as error:
                if part is None:
                    _log.warning("the interrupted build at %s is not resumed: %s", path, error)
                    continue
                if isinstance(error, InUseError):
                    raise StoreError(
                        f"part {index} of {part[1]} of the store at {store} is being written by"
                        " another process: use another part for each process"
                    ) from None
                raise StoreError(
                    f"the parts of the store at {store} that were written before are of another"
                    f" build: {error}. Use the same dataset and options for all parts, or remove"
                    f" {path} to start again. If all parts set the same fingerprint=..., the code"
                    " of the dataset may change"
                ) from error
            if part is None and (num_done := journal.num_done):
                _log.warning(
                    "resuming: %s of %s rows were written before; to start again, remove %s",
                    f"{num_done:,}",
                    f"{len(rows):,}",
                    path,
                )
            return cls(store, draft, path, journal)
        if part is None:
            directory.remove_unfinished()
        path = directory.begin()
        try:
            allocate_files(path, draft.columns, store, draft.num_rows * row_bytes)
            draft.write(path, draft_name)
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
        """Return the ranges of rows that are still to be written, in this part if it is one."""
        assert self.journal is not None
        return list(self.journal.missing())

    def mark_written(self, rows: RowIndices) -> None:
        """Mark rows that any process has written. `sync` writes them to the disk."""
        assert self.journal is not None
        self.journal.mark(rows, WRITTEN)
        self._written.append(rows)

    def sync(self) -> None:
        """Sync all written rows to the disk, and mark them in the journal."""
        with self._syncing:
            if self.is_committed:
                return
            # If this fails they are never marked: a second fsync may not report the failure. More
            # rows may be written during the sync.
            rows = [self._written.popleft() for _ in range(len(self._written))]
            # A disk can take several files at once.
            with start_threads(_NUM_SYNCS) as pool:
                list(pool.map(_sync_if_there, [*self.path.iterdir(), self.path]))
            if self.journal is not None and rows:
                short = [np.asarray(block) for block in rows if len(block) < _MANY_ROWS]
                blocks = [block for block in rows if len(block) >= _MANY_ROWS]
                # Short blocks are marked together, because one call marks a contiguous range.
                if short:
                    blocks.append(np.concatenate(short))
                for block in blocks:
                    self.journal.mark(block, KEPT)
                self.journal.sync()

    def finish(self, *, num_threads: int = 2, show: ShowProgress = _HIDDEN, **changes: Any) -> None:
        """Commit the store, once all rows are written. The lock must be held.

        ``num_threads`` compute checksums. ``changes`` are values of the manifest that differ from
        the draft.
        """
        # The last rows are synced while they are read.
        with start_threads(1) as thread:
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
                raise make_random_dataset_error(row, names)
        # Keys that begin with a dot only served to match an interrupted build.
        source = {key: text for key, text in manifest.source.items() if key[0] != "."}
        source |= describe_writer()
        probes = tuple((row, digest(row)) for row in choose_probe_rows(manifest.num_rows))
        with self._syncing:  # A thread that syncs files finds all of them, or none.
            StoreDirectory(self.store).commit(
                replace(manifest, checksums=checksums, probes=probes, source=source)
            )
            self.is_committed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: object, error: object, trace: object) -> None:
        if isinstance(error, KeyboardInterrupt) and self._is_kept and self.journal is not None:
            kept = f"{self.journal.num_done:,} of {len(self.journal.rows):,} rows"
            _log.warning("interrupted: %s are kept at %s", kept, self.path)
        if self.journal is not None:
            self.journal.close()
        self._is_kept &= not isinstance(error, RandomDatasetError)
        if not (self._is_kept or self.is_committed):
            part = None if self.journal is None else self.journal.part
            with suppress(OSError):  # Without this file, no build resumes it.
                (self.path / (DRAFT if part is None else journal_name(part))).unlink()
            if part is None:  # A part holds no lock. The store stays: a disk may fail after that.
                StoreDirectory(self.store).remove_unused()
        then = "the same call then resumes" if self._is_kept else "nothing was changed"
        raise_if_full(error, self.store, then)


def raise_if_full(error: object, store: Path, then: str) -> None:
    """Raise an error that names the store, if another one means that disk or memory is full.

    Args:
        error: The error, if any.
        store: The store that was being written.
        then: The state of the store now.
    """
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    is_ours = isinstance(error, OSError) and error.filename == str(store)
    if isinstance(error, OSError) and not is_ours and (is_full or error.filename is None):
        raise OSError(
            error.errno,
            f"{error.strerror or error}: rows cannot be written. Free disk space, or raise the"
            f" limit; {then}",
            str(store),
        ) from error
    if isinstance(error, MemoryError):
        raise StoreError(f"{store}: out of memory during its build; {then}") from error


def _sync_if_there(path: Path) -> None:
    """Sync a file to the disk. Temporary files of other parts may have been removed."""
    try:
        sync_path(path)
    except FileNotFoundError:
        if not path.name.endswith(TEMPORARY):
            raise


def describe_writer() -> dict[str, str]:
    """Return when a store is written, and by which versions, for its manifest."""
    return {
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "lightning_memmap": _find_own_version(),
        "torch": str(torch.__version__),
    }


@cache
def _find_own_version() -> str:
    # Looking up the version of an installed package takes milliseconds.
    try:
        return version("lightning_memmap")
    except PackageNotFoundError:  # It is run from a checkout.
        return "not installed"


def read_draft(generation: Path, draft_name: str) -> Manifest:
    """Read the draft of a build in a directory of this user."""
    with closing(OpenFiles(generation, is_own=True)) as files:
        size = os.fstat(file := files.open(draft_name)).st_size
        data = read_exactly(file, 0, min(size, MAX_MANIFEST_BYTES + 1))
    draft = Manifest.decode(data.tobytes(), f"{generation}, not finished,")
    return replace(draft, items={}, generation=generation.name)


def describe_unfinished_build(store: Path) -> str | None:
    """Describe an unfinished build: how many rows are on the disk, and how to resume it."""
    directory = StoreDirectory(store)
    names = (PARTS_DRAFT, DRAFT)
    drafts = {path: name for name in names for path in directory.unfinished(name)}
    for generation, draft_name in drafts.items():
        with suppress(OSError, ValueError, StoreError):  # It is another user's, or damaged.
            draft = read_draft(generation, draft_name)
            num_done = 0
            if not (journals := [*generation.glob(f"{JOURNAL}*")]):
                continue  # An unfinished pull doesn't have a journal.
            for journal in journals:
                count = min(journal.stat().st_size, draft.num_rows)
                num_done += np.count_nonzero(read_marks(generation, journal.name, 0, count) == KEPT)
            progress = f"{num_done:,} of {draft.num_rows:,} rows are there: its build"
            if draft_name == DRAFT:
                return f"{progress} is not finished; run it again to resume"
            num_parts = int(draft.source.get(NUM_PARTS, 1))
            return (
                f"{progress} in {num_parts} parts is not finished: once all are written, run"
                f" `lightning-memmap store build {store} --finish`"
            )
    return None


def allocate_files(
    directory: Path, columns: Sequence[Column], store: Path, rows_bytes: float = 0.0
) -> None:
    """Create the files of columns and allocate their space, so that a full disk is an error now.

    ``rows_bytes`` is an estimate for all rows. Rows that differ in length need twice their size
    until they are joined.
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
            estimate = f", estimated from the first rows, with twice the {variable_bytes} bytes of"
            estimate += " rows that differ in length, until these are joined"
            raise OSError(
                error.errno,
                f"{error.strerror}: the store needs {needed} bytes"
                f"{estimate if variable_bytes else ''}, up to {max(files.values(), default=0)} of"
                f" them in one file; {free} are free, and {_ROOM_BYTES} must stay free. Free disk"
                " space, choose a directory on a larger disk, or raise the limit (`ulimit -f`)",
                str(store),
            ) from error
        raise


def _check_own_files(path: Path, draft: Manifest) -> None:
    """Check that the files of an unfinished build are plain ones of this user."""
    with closing(OpenFiles(path, _MAX_OPEN_FILES, is_own=True)) as files:
        for name, num_bytes in draft.file_bytes.items():
            if (size := os.fstat(files.open(name)).st_size) != num_bytes:
                raise StoreError(f"{name} has {size} bytes, expected {num_bytes}")


def _check_same_build(begun: Manifest, draft: Manifest) -> None:
    """Check that an interrupted build has the same draft. The message says what differs."""
    identity = begun.identity or Identity({})
    changed = identity.difference(draft.identity or Identity({}))
    if changed is not None:
        raise StoreError(f"since then, {changed}")
    old_facts, new_facts = ({**_list_facts(m), **m.source} for m in (begun, draft))
    for name in sorted({*old_facts, *new_facts} - {"dataset"}):
        if old_facts.get(name) != new_facts.get(name):
            label = name.removeprefix(".")
            old, new = (str(facts.get(name))[:99] for facts in (old_facts, new_facts))
            raise StoreError(f"it has {label}={old}, and this one {label}={new}")


def _list_facts(manifest: Manifest) -> dict[str, Any]:
    return {
        "num_rows": manifest.num_rows,
        "num_shards": manifest.num_shards,
        **{f"field {field.name!r}": str(field) for field in manifest.schema.fields},
        "structure": manifest.structure,
        "probes": tuple(manifest.probes),
        "classes": manifest.classes,
    }
