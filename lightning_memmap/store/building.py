"""A store that is being written: a generation, a draft, a journal, and a writer in each process.

``build.json`` is the manifest before a row is written, ``journal`` lists the rows that are on the
disk, so that the next build of the same can go on from there. What begins with a dot in the source
of a draft is for that comparison alone.
"""

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import tensordict
import torch

from lightning_memmap.errors import StoreError, StoreNotFoundError
from lightning_memmap.sampling import Integers
from lightning_memmap.schema import Values
from lightning_memmap.store.checksums import compute_checksums, hashed_bytes
from lightning_memmap.store.columns import Column, grow_columns
from lightning_memmap.store.directory import KEY, PARTS, StoreDirectory, remove_tree
from lightning_memmap.store.files import (
    TEMPORARY,
    OpenFiles,
    claim,
    sync_path,
)
from lightning_memmap.store.identity import Fingerprint
from lightning_memmap.store.journal import Journal, PartInUseError, num_listed
from lightning_memmap.store.manifest import MAX_MANIFEST_BYTES, Manifest, check_files
from lightning_memmap.store.progress import ShowProgress
from lightning_memmap.store.ranges import merge_ranges, missing_ranges
from lightning_memmap.store.samples import hash_row, probe_rows, random_dataset_error
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
#: In the source of a draft: the order in which rows are read, and the number of parts.
ORDER, NUM_PARTS = ".order", ".num_parts"
_log = logging.getLogger(__name__)


class RowWriter:
    """Writes rows of a store, in one process."""

    def __init__(self, building: Path, columns: Sequence[Column], journal: str | None) -> None:
        self._columns = columns
        self.files = OpenFiles(building, _MAX_OPEN_FILES)
        self._num_waiting = 0
        self._journal: int | None = None
        if journal is not None:
            self._journal = os.dup(self.files.open(journal))
            # Without locks on this file system, the build is not resumed; or else it is another's.
            with suppress(OSError):
                fcntl.flock(self._journal, fcntl.LOCK_SH | fcntl.LOCK_NB)
            exit_if_orphaned()

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


class Building:
    """A store that is being written. Make one with `begin`, and close it."""

    def __init__(
        self,
        store: Path,
        draft: Manifest,
        path: Path,
        journal: Journal | None = None,
    ) -> None:
        self.store, self.path, self.journal = store, path, journal
        self.draft = replace(draft, generation=path.name)
        self._written: list[range] = []
        self._writer: RowWriter | None = None

    @classmethod
    def begin(
        cls,
        store: Path,
        draft: Manifest,
        *,
        resume: bool,
        part: int | None = None,
        row_bytes: float = 0.0,
    ) -> "Building":
        """Make the files of a build, or go on with those of an interrupted build of the same.

        The lock of the store must be held: until it is finished, or for a part for this call alone.
        """
        directory = StoreDirectory(store)
        key = KEY if part is None else PARTS
        for path in directory.unfinished(key) if resume else ():
            try:
                _check_same(read_draft(path, key), draft)
                _check_own_files(path, draft)
                journal = Journal(path, draft.num_rows, part)
            except (OSError, ValueError, RecursionError, StoreError) as error:
                if part is not None and isinstance(error, PartInUseError):
                    raise
                if part is not None:
                    raise StoreError(
                        f"the parts of the store at {store} that were written before are of another"
                        f" build: {error}. Give all parts the same dataset and options, or remove"
                        f" {path} to start again. With a fingerprint=... that was given from the"
                        " first part on, the code of the dataset may change"
                    ) from error
                _log.warning("the interrupted build at %s is not resumed: %s", path, error)
                continue
            building = cls(store, draft, path, journal)
            if building.num_done and part is None:
                _log.warning(
                    "resuming: %s of %s rows were written by %s; to start again, remove %s",
                    f"{building.num_done:,}",
                    f"{draft.num_rows:,}",
                    journal.writer,
                    path,
                )
            return building
        if part is None:
            directory.discard()
        path = directory.begin()
        try:
            allocate_files(path, draft.columns, store, draft.num_rows * row_bytes)
            draft.write(path, key)
            journal = Journal(path, draft.num_rows, part)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
        return cls(store, draft, path, journal)

    @property
    def num_done(self) -> int:
        """The number of rows that are on the disk."""
        return sum(map(len, merge_ranges(self._done)))

    def __str__(self) -> str:
        kept = f"{self.num_done:,} of {self.draft.num_rows:,} rows are kept"
        return f"the store at {self.store}: {kept} at {self.path}"

    def missing(self, rows: range) -> list[range]:
        """Those of some rows that are not on the disk, in ranges."""
        return missing_ranges(self._done, rows.stop, rows.start)

    @property
    def _done(self) -> list[range]:
        return [] if self.journal is None else self.journal.rows

    def write(self, rows: range | Integers, values: Iterable[Values]) -> None:
        """Write rows in this process, in any order; see `wrote`."""
        self._writer = self._writer or RowWriter(self.path, self.draft.columns, None)
        self._writer.write(rows, values)
        self.wrote(rows)

    def wrote(self, rows: range | Integers) -> None:
        """Note rows that were written, by whichever process. `sync` brings them to the disk."""
        if isinstance(rows, range):
            self._written.append(rows)
            return
        rows = np.sort(rows)
        runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
        self._written += [range(int(run[0]), int(run[-1]) + 1) for run in runs if len(run)]

    def sync(self) -> None:
        """Bring what was written to the disk, and list it in the journal."""
        # If this fails they are never listed: when asked again, the file system may no longer
        # report the failure.
        rows, self._written = merge_ranges(self._written), []
        # A disk can take several files at once.
        with threads(_NUM_SYNCS) as pool:
            list(pool.map(sync_path, self.path.iterdir()))
        if self.journal is not None:
            self.journal.add(rows)

    def finish(self, *, num_threads: int, show: ShowProgress, **changes: Any) -> None:
        """Make this the store, once all rows are written. The lock must be held.

        ``changes`` are those of the manifest from its draft.
        """
        (self.path / _CLAIMED).unlink(missing_ok=True)
        # What was written last is brought to the disk while it is read.
        with threads(1) as thread:
            syncing = thread.submit(self.sync)
            columns = tuple(column.finish(self.path) for column in self.draft.columns)
            manifest = replace(self.draft, columns=columns, **changes)
            check_files(self.path, manifest)
            with show("checksums", hashed_bytes(columns), 1) as advance:
                checksums = compute_checksums(
                    self.path, columns, num_threads=max(2, num_threads), advance=advance
                )
            syncing.result()
        num_rows = manifest.num_rows
        assert self.journal is None or not self.missing(range(num_rows))
        opened = [column.open(self.path) for column in columns]

        def digest(row: int) -> str:
            return hash_row([column.row(row) for column in opened])

        for row, expected in manifest.probes:
            if digest(row) != expected:
                names = ", ".join(field.name for field in manifest.schema.fields)
                self.abandon()
                raise random_dataset_error(row, names)
        source = {
            # What begins with a dot was for the next build alone.
            **{key: text for key, text in manifest.source.items() if key[0] != "."},
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "lightning_memmap": _own_version(),
            # Looking up the version of an installed package takes milliseconds.
            "torch": str(torch.__version__),
            "tensordict": str(tensordict.__version__),
        }
        probes = tuple((row, digest(row)) for row in probe_rows(num_rows))
        StoreDirectory(self.store).commit(
            replace(manifest, checksums=checksums, probes=probes, source=source)
        )

    def abandon(self) -> None:
        """Remove what was written, unless it is the store: the disk may fail after the commit."""
        try:
            current = Manifest.read(self.store).generation
        except StoreNotFoundError:
            current = ""
        except StoreError:
            return  # Whose files these are cannot be told.
        if current != self.path.name:
            with suppress(StoreError):
                remove_tree(self.path)

    def close(self) -> None:
        """Close the files. The lock of the journal is free once no worker shares it either."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self.journal is not None:
            self.journal.close()


def _own_version() -> str:
    try:
        return version("lightning_memmap")
    except PackageNotFoundError:  # It is run from a checkout.
        return "not installed"


def read_draft(generation: Path, key: str) -> Manifest:
    """Read what is built in a directory of this user."""
    with closing(OpenFiles(generation, is_own=True)) as files:
        data = files.read(key, MAX_MANIFEST_BYTES)
    found = Manifest.decode(data, f"{generation}, not finished,")
    columns = grow_columns(found.schema, found.shards)
    return replace(found, columns=columns, generation=generation.name)


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
    directory: Path, columns: Sequence[Column], path: Path, rows_bytes: float = 0.0
) -> None:
    """Make the files of columns and claim their space: a full disk is an error now, not late.

    ``rows_bytes`` are those of all rows, as far as is known. Where some differ in length, these
    will need twice their share, until they are joined.
    """
    fixed = [column for column in columns if not column.field.num_variable]
    fixed_bytes = sum(sum(column.file_bytes.values()) for column in fixed)
    variable_bytes = max(0, int(rows_bytes) - fixed_bytes) if len(fixed) < len(columns) else 0
    try:
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
    one, other = ({**_numbers_of(each), **each.source} for each in (found, draft))
    for name in sorted({*one, *other} - {"dataset"}):
        if one.get(name) != other.get(name):
            if name == ORDER:
                raise StoreError("its rows are read in another order")
            named = name.removeprefix(".")
            raise StoreError(
                f"it has {named}={one.get(name)}, and this one {named}={other.get(name)}"
            )
    if found.schema.to_json() != draft.schema.to_json():
        raise StoreError("it has other fields")
    if tuple(found.probes) != tuple(draft.probes):
        raise StoreError("rows that are read for comparison have changed")


def _numbers_of(manifest: Manifest) -> dict[str, Any]:
    return {"num_rows": manifest.num_rows, "num_shards": manifest.num_shards}


def rows_of_unfinished(store: Path) -> tuple[int, int] | None:
    """How many rows of an unfinished build are on the disk, and of how many; None without one."""
    for generation in StoreDirectory(store).unfinished(KEY):
        num_rows = read_draft(generation, KEY).num_rows
        return num_listed(generation, num_rows), num_rows
    return None
