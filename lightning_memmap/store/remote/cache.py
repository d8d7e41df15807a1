"""Where the shards of stores at URLs are kept: a directory of bounded size, of one user.

    .lock                    held for all bookkeeping
    <URL>/manifest.json      the manifest that the server of a URL gave last
    <URL>/g-<manifest>/      one version: its files, RECORDS of what was fetched, and
      .in_use                a lock that all who have it open share

What changes at a URL has another manifest, and so another version. Versions that nobody has open
are removed where there is no room, the one that was opened longest ago first.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import stat
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from typing_extensions import override

from lightning_memmap.errors import MemmapError, StoreError, StoreNotFoundError
from lightning_memmap.sampling import Integers
from lightning_memmap.sizes import format_bytes, parse_bytes
from lightning_memmap.store.files import check_plain
from lightning_memmap.store.manifest import Manifest, check_files
from lightning_memmap.store.places import StoreUrl
from lightning_memmap.store.remote.files import OFFLINE, RemoteFiles, UnreachableError, is_offline
from lightning_memmap.store.remote.shards import (
    RECORDS,
    RemoteShards,
    copy_name,
    make_records,
    read_manifest,
    read_plain,
)

#: The directory of the cache, and the most bytes in it.
DIRECTORY, LIMIT = "LIGHTNING_MEMMAP_CACHE", "LIGHTNING_MEMMAP_CACHE_SIZE"

_SETTING = f"{DIRECTORY} names another directory, and {LIMIT} the size that it may have"
_IN_USE, _GONE = ".in_use", ".gone"
#: What a version needs on the disk beside its shards.
_ROOM_BYTES = 2**20
#: A fetch of fewer bytes shows no progress.
_SHOWN_BYTES = 64 * 2**20
_log = logging.getLogger(__name__)


class CachedShards(RemoteShards):
    """The shards of one store at a URL, fetched into the cache when they are asked for."""

    def __init__(self, url: StoreUrl) -> None:
        self._cache, files, self._is_checked = Cache(), RemoteFiles(url), True
        try:
            manifest = read_manifest(files)
        except UnreachableError as error:
            manifest, self._is_checked = self._cache.last(url, error), False
        with self._cache.locked():
            self.path = self._cache.version(url, manifest, is_last=self._is_checked)
            in_use = os.open(self.path / _IN_USE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            weakref.finalize(self, os.close, in_use)
            super().__init__(files, manifest, self.path)
            with suppress(OSError):  # A cache that cannot be written.
                os.utime(self.path)
                with _unused(self.path) as is_first:
                    if is_first:  # What is still to come was for processes that were killed.
                        self.record(np.flatnonzero(self.records() < 0).tolist(), sign=0)
            fcntl.flock(in_use, fcntl.LOCK_SH)
        self._known = self.records()

    def require(self, fields: Collection[int], shards: Collection[int], **meanwhile: Any) -> None:
        """Fetch the shards that are not yet here, of fields by their place in the schema.

        While some are used, ``meanwhile`` is given to `RemoteShards.fetch`.
        """
        numbers = self.numbers(fields, shards)
        if all(self._known[number] > 0 for number in numbers):
            return
        with self._cache.usable():
            if missing := self.missing(numbers):
                # Before stores are removed to make room for what cannot be fetched.
                if not self._is_checked and (error := self.changed()):
                    raise StoreError(
                        f"{len(missing)} shards of fields that are needed are not in the cache at"
                        f" {self._cache.directory}, and {error}"
                    ) from error
                self._is_checked = True
                self._cache.reserve(self, missing)
                hidden = bool(meanwhile or self.num_bytes(missing).sum() < _SHOWN_BYTES)
                self.fetch(missing, "fetching", hidden=hidden, **meanwhile)
            self._known = self.records()

    @override
    def read_index(self, field: int) -> Integers:
        with self._cache.usable():
            return super().read_index(field)

    @override
    def verify(self, number: int, advance: Callable[[int], None]) -> bool:
        with self._cache.usable():
            return super().verify(number, advance)


class Cache:
    """The cache that the environment names, by default that of the user."""

    def __init__(self) -> None:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        given = os.environ.get(DIRECTORY) or home / "lightning_memmap"
        self.directory = Path(os.path.realpath(Path(given).expanduser()))
        try:
            self._limit = parse_bytes(text) if (text := os.environ.get(LIMIT)) else None
        except ValueError as error:
            raise ValueError(f"{LIMIT}: {error}") from error
        with self.usable():
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = os.lstat(self.directory)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise StoreError(
                f"{self.directory} is no directory that belongs to this user: {_SETTING}"
            )
        if status.st_mode & 0o022:
            raise StoreError(
                f"others may write to the cache at {self.directory}, and so give this user rows of"
                f" their own: keep them out (`chmod go-w {self.directory}`, and see that they have"
                f" left nothing there), or {_SETTING}"
            )

    @contextmanager
    def usable(self) -> Iterator[None]:
        """Say what a user can do where a file of the cache cannot be used, or has no locks."""
        try:
            yield
        except MemmapError:
            raise
        except OSError as error:
            removed = isinstance(error, FileNotFoundError)
            remedy = "if it was removed meanwhile, open the store again" if removed else _SETTING
            raise StoreError(
                f"the cache at {self.directory} cannot be used: {error}: {remedy}"
            ) from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the cache."""
        with self.usable(), ExitStack() as stack:
            # Without write permission, whole versions are used as they are.
            if os.access(self.directory, os.W_OK):
                stack.enter_context(FileLock(self.directory / ".lock"))
                for left in self.directory.glob(f"*{_GONE}"):  # Of a process that was killed.
                    shutil.rmtree(left, ignore_errors=True)
            yield

    def version(self, url: StoreUrl, manifest: Manifest, *, is_last: bool) -> Path:
        """Find or make the directory of a version. The lock must be held."""
        directory = self._directory(url, manifest)
        if not _is_whole(directory, manifest):
            if directory.parent.is_symlink():
                self._remove(directory.parent)
            self._remove(directory)
            # A name that nobody can have foreseen, and that is removed if this process is killed.
            made = Path(tempfile.mkdtemp(suffix=_GONE, dir=self.directory))
            for name, num_bytes in manifest.file_bytes.items():
                with open(made / name, "xb") as file:
                    file.truncate(num_bytes)
            make_records(made, manifest)
            (made / _IN_USE).write_text(f"{url}\n", encoding="utf-8")
            directory.parent.mkdir(exist_ok=True)
            os.rename(made, directory)
        if is_last:
            with suppress(OSError):  # A cache that cannot be written.
                manifest.write(directory.parent)
        return directory

    def last(self, url: StoreUrl, reason: UnreachableError) -> Manifest:
        """Find the version of a store that its server gave last, since nobody can be asked now."""
        try:
            manifest = Manifest.read(self.directory / _digest(url))
            if not _is_whole(self._directory(url, manifest), manifest):
                raise StoreError("its files are gone")
        except (OSError, MemmapError) as error:
            nothing = f"the cache at {self.directory} has nothing of it"
            if is_offline():  # What is in the cache is all that there is.
                _log.warning("no store at %s: %s is set, and %s", url, OFFLINE, nothing)
                raise StoreNotFoundError(f"no store at {url}: {reason}, and {nothing}") from error
            raise UnreachableError(f"{reason}; and {nothing}") from reason
        _log.warning(
            "%s is opened from the cache, in the version that its server gave last: whether there"
            " is another one by now cannot be checked: %s",
            url,
            str(reason),  # Who keeps the error keeps the frames that it went through.
        )
        return manifest

    def reserve(self, shards: RemoteShards, numbers: Collection[int]) -> None:
        """Make room for shards, once for all that are needed, and record that they are to come."""
        with self.locked(), ExitStack() as stack:
            known = shards.records()
            wanted = [number for number in numbers if not known[number]]
            needed = int(shards.num_bytes(wanted).sum())
            versions = sorted(self.directory.glob("*/g-*"), key=lambda path: path.lstat().st_mtime)
            uses = {path: _bytes_of(path) for path in versions}
            here, coming = map(sum, zip((0, needed), *uses.values(), strict=True))
            free = shutil.disk_usage(self.directory).free
            removed = list[Path]()
            for path in versions:
                if self._lack(here, coming, free) is None:
                    break
                if stack.enter_context(_unused(path)):
                    removed.append(path)
                    here, coming = here - uses[path][0], coming - uses[path][1]
                    free += uses[path][0]
            if (lack := self._lack(here, coming, free)) is not None:
                raise StoreError(
                    f"{format_bytes(needed)} of shards have no room in the cache at"
                    f" {self.directory}: {lack}, and what is in it is in use. {_SETTING}"
                )
            for path in removed:
                _log.info("removing %s from the cache", path)
                self._remove(path)
            shards.record(wanted, sign=-1)

    def _lack(self, here: int, coming: int, free: int) -> str | None:
        """Why there is no room for bytes that are to come; None where there is."""
        if self._limit is not None and here + coming > self._limit:
            total, limit = format_bytes(here + coming), format_bytes(self._limit)
            return f"it would have {total} and may hold {limit}"
        if coming + _ROOM_BYTES > free:
            return f"{format_bytes(coming)} are to come, and its disk has {format_bytes(free)} free"
        return None

    def _directory(self, url: StoreUrl, manifest: Manifest) -> Path:
        return self.directory / _digest(url) / copy_name(manifest)

    def _remove(self, path: Path) -> None:
        """Remove something: all of it or nothing, as far as others see."""
        gone = tempfile.mkdtemp(suffix=_GONE, dir=self.directory)
        with suppress(FileNotFoundError):
            os.rename(path, f"{gone}/{path.name}")
        shutil.rmtree(gone, ignore_errors=True)


def _digest(url: StoreUrl) -> str:
    return hashlib.sha256(url.encode()).hexdigest()[:32]


def _is_whole(version: Path, manifest: Manifest) -> bool:
    """Whether a version is there, no link leads to it, and its files are plain and have their
    sizes."""
    try:
        check_files(version, manifest)
        num_bytes = check_plain(version / RECORDS)
        check_plain(version / _IN_USE)
    except (MemmapError, OSError):
        return False  # It is not there, or was damaged.
    is_here = os.path.realpath(version) == str(version)
    return is_here and num_bytes == 8 * len(manifest.columns) * manifest.num_shards


def _bytes_of(version: Path) -> tuple[int, int]:
    """The bytes of the shards of a version that are here, and of those that are to come."""
    with suppress(OSError, ValueError, StoreError):  # It was damaged.
        records = np.frombuffer(read_plain(version / RECORDS), np.int64)
        return int(records[records > 0].sum()), int(-records[records < 0].sum())
    return 0, 0


@contextmanager
def _unused(version: Path) -> Iterator[bool]:
    """Whether nobody has a version open, nor opens it meanwhile."""
    # For writing: NFS has exclusive locks for no other file.
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    with open(os.open(version / _IN_USE, flags, 0o600), "rb") as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # It is in use, or nobody can say.
            yield False
        else:
            yield True
