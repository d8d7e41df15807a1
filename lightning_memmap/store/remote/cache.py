"""Stores at URLs, whose shards are cached in a directory of bounded size, one per user.

    .lock                    held for all bookkeeping
    <URL>/manifest.json      the last manifest received from the server of a URL
    <URL>/g-<manifest>/      one version, the copy of a generation: its files, RECORDS of the
                             downloaded shards, and
      .in_use                a lock that all processes share which have the version open

A store that changes at its URL has another manifest, and so another version. If the cache is full,
versions that no process has open are removed, least recently opened first.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import stat
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Condition, Event, Thread
from typing import Any

import numpy as np
from filelock import FileLock
from typing_extensions import override

from lightning_memmap.errors import MemmapError, StoreError, StoreNotFoundError
from lightning_memmap.host_memory import available_bytes
from lightning_memmap.integers import Integers
from lightning_memmap.sizes import format_bytes, parse_bytes
from lightning_memmap.store.building import describe_unfinished_build
from lightning_memmap.store.checksums import Damage, list_damages
from lightning_memmap.store.files import check_plain, open_plain, read_plain
from lightning_memmap.store.manifest import MAX_MANIFEST_BYTES, Manifest
from lightning_memmap.store.open_columns import IndexedItems
from lightning_memmap.store.paths import CACHE, StoreUrl, cache_directory, path_or_url
from lightning_memmap.store.remote.files import OFFLINE, RemoteFiles, UnreachableError, is_offline
from lightning_memmap.store.remote.shards import (
    RECORDS,
    RemoteShards,
    copy_name,
    make_records,
    read_manifest,
)
from lightning_memmap.store.store import PendingRows, Store, open_directory
from lightning_memmap.store.workers import start_threads

#: Environment variable with the directory of the cache.
DIRECTORY = CACHE
#: Environment variable with the most bytes in it.
LIMIT = "LIGHTNING_MEMMAP_CACHE_SIZE"

_SETTING = f"Set {DIRECTORY} to use another directory, and {LIMIT} to allow another size."
_IN_USE = ".in_use"
#: Disk space of a version in addition to its shards.
_ROOM_BYTES = 2**20
#: Downloads of fewer bytes show no progress bar.
_SHOWN_BYTES = 64 * 2**20
#: Threads that compare shards in the cache with their checksums.
_NUM_CHECKS = 4
#: How long to wait for a download that is stopped.
_PATIENCE_S = 5.0
_log = logging.getLogger(__name__)


def open_store(path: str | Path) -> Store:
    """Open a store for reading.

    If the store is at a URL, its manifest is read now, and each shard when one of its rows is
    first read: shards are kept in a cache on this machine. The environment variable
    ``LIGHTNING_MEMMAP_CACHE`` names its directory, by default ``~/.cache/lightning_memmap``, and
    ``LIGHTNING_MEMMAP_CACHE_SIZE`` the most bytes in it, such as ``500GiB``. If the URL cannot be
    reached, or ``LIGHTNING_MEMMAP_OFFLINE`` is ``1``, the last version in the cache is opened.

    Args:
        path: Directory of the store, or its URL, such as ``s3://bucket/stores/train``.

    Returns:
        The store. Its files are mapped, and no row is read.

    Raises:
        StoreNotFoundError: There is no store at this path.
        StoreError: The manifest is damaged or of another version; a file is missing, a link, of the
            wrong size, or cannot be read; or the URL cannot be reached.
        ValueError: No installed library supports the protocol of the URL.
    """
    location = path_or_url(path)
    if isinstance(location, StoreUrl):
        return RemoteStore(location)
    try:
        return open_directory(location)
    except StoreNotFoundError as error:
        if (description := describe_unfinished_build(location)) is None:
            raise
        raise StoreNotFoundError(f"no store at {location}: {description}") from error


def verify_store(
    path: str | Path,
    *,
    num_threads: int = 2,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> list[Damage]:
    """Compare every byte of a store with its checksums, and list the damaged shards.

    If the store is at a URL, shards in the cache are read from there, and all others from the
    server. Damaged shards in the cache are downloaded again when they are next read.

    Args:
        path: Directory of the store, or its URL.
        num_threads: Threads that read and hash.
        advance: Called with the number of bytes read since the last call, from these threads.

    Returns:
        The damaged shards by field and shard; empty if all are intact.

    Raises:
        StoreNotFoundError: There is no store at this path.
        StoreError: The manifest is damaged, or a file is missing, has the wrong size, or cannot be
            read; or the URL cannot be reached.
    """
    return open_store(path).find_damages(num_threads, advance)


class RemoteStore(Store):
    """An open store at a URL. Use `lightning_memmap.store.open_store` to get one."""

    _is_readable = False

    def __init__(
        self,
        url: StoreUrl,
        generation: str | None = None,
        *,
        in_background: bool = False,
        progress: bool = True,
    ) -> None:
        shards = _CachedShards(url, progress)
        if generation not in (None, shards.manifest.generation):
            raise StoreError(f"the store at {url} was replaced: open it again")
        columns = [column.open(shards.directory) for column in shards.manifest.columns]
        super().__init__(shards.path, shards.manifest, columns)
        # By its open descriptor: the path may have been replaced.
        self.files = shards.directory
        self._shards = shards
        if in_background and min(shards.records(), default=1) <= 0:
            self.pending = _Download(shards)

    @property
    @override
    def location(self) -> str:
        return str(self._shards.files.url)

    @override
    def download(
        self, shards: Collection[int] | None = None, fields: Collection[str] | None = None
    ) -> None:
        shards = range(self.num_shards) if shards is None else shards
        names = [field.name for field in self.schema.fields]
        indices = [index for index, name in enumerate(names) if fields is None or name in fields]
        self._shards.require(indices, [*shards])

    @override
    def _make_readable(self, rows: Integers, field: str | None = None) -> None:
        self.download(np.unique(rows % self.num_shards), None if field is None else [field])

    @override
    def completed(self) -> Store:
        if self.pending is None:
            return self
        # Not by `copy`, which would open the store again: see `__reduce__`.
        store = object.__new__(RemoteStore)
        vars(store).update({**vars(self), "pending": None})
        return store

    @override
    def lengths(self, field: str) -> Integers:
        index = self._field_index(field)
        column = self.mapped_columns[index]
        if not isinstance(column, IndexedItems):
            return super().lengths(field)
        ends = self._shards.read_index(index).reshape(column.index.shape)
        return replace(column, index=ends).lengths(self.num_rows)

    @override
    def find_damages(self, num_threads: int, advance: Callable[[int], None]) -> list[Damage]:
        # Shards that are not in the cache are read from the server.
        verify = partial(self._shards.damaged_chunks, advance=advance)
        with start_threads(num_threads) as pool:
            damaged = list(pool.map(verify, range(len(self._shards.num_bytes))))
        files = self._shards.files.url / self.manifest.generation
        names = [field.name for field in self.schema.fields]
        return [
            damage
            for field_shard, chunks in enumerate(damaged)
            for damage in list_damages(names[field_shard // self.num_shards], files, chunks)
        ]

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteStore, (self._shards.files.url, self.manifest.generation)


class _CachedShards(RemoteShards):
    """The shards of one store at a URL, downloaded into the cache on request."""

    def __init__(self, url: StoreUrl, progress: bool = True) -> None:
        #: Whether long downloads show a progress bar.
        self.progress = progress
        self._cache = _Cache()
        files = RemoteFiles(url)
        try:
            manifest = read_manifest(files)
            #: Whether the server still has this version, as far as this process knows.
            self._is_latest = True
        except UnreachableError as error:
            manifest = self._cache.last(url, error)
            self._is_latest = False
        with self._cache.locked():
            self.path = self._cache.prepare_version(url, manifest, is_latest=self._is_latest)
            in_use = open_plain(self.path / _IN_USE)
            weakref.finalize(self, os.close, in_use)
            super().__init__(files, manifest, self.path)
            with suppress(OSError):  # A cache that cannot be written.
                os.utime(self.path)
                with _lock_if_unused(self.path) as is_first:
                    if is_first:  # Shards were reserved for processes that were killed.
                        self.record(np.flatnonzero(self.records() < 0).tolist(), sign=0)
            fcntl.flock(in_use, fcntl.LOCK_SH)
        #: The shards that this process has downloaded, or compared with their checksums.
        self._is_checked_here = np.zeros(len(self.records()), np.bool_)

    def require(
        self,
        fields: Sequence[int],
        shards: Sequence[int] | Integers,
        on_shard: Callable[[], None] | None = None,
        stop: Event | None = None,
    ) -> None:
        """Download shards that are not in the cache, after checking those that are.

        Args:
            fields: Indices of fields in the schema.
            shards: Indices of shards.
            on_shard: As for `RemoteShards.fetch`. Shows no progress bar.
            stop: As for `RemoteShards.fetch`.
        """
        field_shards = self.field_shards(fields, shards)
        if self._is_checked_here[field_shards].all():
            return
        with self._cache.usable():
            self._check(field_shards[~self._is_checked_here[field_shards]])
            if len(missing := self.missing(field_shards)):
                # Before other stores are removed to make room for shards that cannot be downloaded.
                if not self._is_latest and (error := self.make_error_if_changed()):
                    raise StoreError(
                        f"{len(missing)} shards that are needed are not in the cache at"
                        f" {self._cache.directory}, and {error}"
                    ) from error
                self._is_latest = True
                self._cache.reserve(self, missing)
                num_bytes = int(self.num_bytes[missing].sum())
                hidden = on_shard is not None or not self.progress or num_bytes < _SHOWN_BYTES
                self.fetch(missing, "fetching", hidden=hidden, on_shard=on_shard, stop=stop)
            self._is_checked_here[field_shards] = True

    def _check(self, field_shards: Integers) -> None:
        """Compare shards in the cache with their checksums, and forget the damaged ones.

        Their pages stay in memory and are used from there. If memory is short, they would be read
        from the disk twice, so they are not compared.
        """
        cached = field_shards[self.records()[field_shards] > 0]
        if not len(cached) or self.num_bytes[cached].sum() > available_bytes():
            return
        with start_threads(min(_NUM_CHECKS, len(cached))) as pool:
            verify = partial(self.damaged_chunks, advance=lambda _: None)
            damaged = list(pool.map(verify, cached.tolist()))
        if num_damaged := sum(map(bool, damaged)):
            _log.warning(
                "%s of %s shards in the cache at %s don't match their checksums, and are"
                " downloaded again. Check that its disk works.",
                num_damaged,
                len(cached),
                self.path,
            )


class _Download(PendingRows):
    """Downloads shards in the order in which they are requested, in a thread."""

    def __init__(self, shards: _CachedShards) -> None:
        self._shards = shards
        self._fields = range(len(shards.manifest.columns))
        #: The only shards that will be read.
        self._expected = list[int]()
        #: These shards of all fields.
        self._field_shards = np.zeros(0, np.int64)
        self._changed = Condition()
        self._stop = Event()
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    @override
    def expect(self, shards: Collection[int]) -> None:
        self._expected = [*shards]
        self._field_shards = self._shards.field_shards(self._fields, self._expected)

    @property
    @override
    def progress(self) -> float:
        return 1.0 - len(self._shards.missing(self._field_shards)) / max(1, len(self._field_shards))

    @property
    @override
    def is_complete(self) -> bool:
        return self.has_all_rows

    @override
    def request(self, rows: Integers, priorities: Integers | None = None) -> None:
        # The first request determines the order: an epoch needs rows of all shards soon.
        if self._thread is None and self._expected:
            shards, firsts = np.unique(rows % self._shards.manifest.num_shards, return_index=True)
            order = dict.fromkeys([*shards[np.argsort(firsts)].tolist(), *self._expected])
            run = partial(self._run, [*order], self._stop)
            self._thread = Thread(target=run, name="lightning_memmap fetch", daemon=True)
            self._thread.start()

    def _run(self, shards: list[int], stop: Event) -> None:
        try:
            self._shards.require(self._fields, shards, self._notify, stop)
        except BaseException as error:  # A reader that waits must get any error.
            if stop is self._stop:  # Else it was closed, and no reader waits.
                self._error = error
        self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    @override
    def wait(self, rows: Integers) -> None:
        shards = np.unique(rows % self._shards.manifest.num_shards)
        field_shards = self._shards.field_shards(self._fields, shards)
        with self._changed:
            self._changed.wait_for(
                lambda: self._error or not len(self._shards.missing(field_shards))
            )
        if self._error is not None:
            raise self._error

    @override
    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE_S)
        self._stop = Event()
        self._thread = None
        self._error = None


class _Cache:
    """The cache, in the directory that the environment names, by default one per user."""

    def __init__(self) -> None:
        self.directory = cache_directory()
        try:
            self._limit = parse_bytes(text) if (text := os.environ.get(LIMIT)) else None
        except ValueError as error:
            raise ValueError(f"{LIMIT}: {error}") from error
        with self.usable():
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = os.lstat(self.directory)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
            raise StoreError(
                f"other users may write to the cache at {self.directory}, and so replace rows. Make"
                f" this user its owner, deny access to others (`chmod go-w {self.directory}`), and"
                f" delete files of theirs. {_SETTING}"
            )

    @contextmanager
    def usable(self) -> Iterator[None]:
        """Turn an error of a file or a lock in the cache into one that suggests a remedy."""
        try:
            yield
        except MemmapError:
            raise
        except OSError as error:
            is_removed = isinstance(error, FileNotFoundError)
            remedy = "If it was removed, open the store again." if is_removed else _SETTING
            raise StoreError(
                f"the cache at {self.directory} cannot be used: {error}. {remedy}"
            ) from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the cache."""
        with self.usable(), ExitStack() as stack:
            # Without write permission, a complete version can still be read.
            if os.access(self.directory, os.W_OK):
                stack.enter_context(FileLock(self.directory / ".lock"))
            yield

    def prepare_version(self, url: StoreUrl, manifest: Manifest, *, is_latest: bool) -> Path:
        """Find or make the directory of a version. The caller must hold the lock."""
        version = self._versions_of(url) / copy_name(manifest)
        if not _is_whole(version, manifest):
            _remove_version(version)
            version.parent.mkdir(0o700, exist_ok=True)
            version.mkdir(0o700)
            for name, num_bytes in manifest.file_bytes.items():
                with open(version / name, "xb") as file:
                    file.truncate(num_bytes)
            make_records(version, manifest)
            (version / _IN_USE).write_text(f"{url}\n", encoding="utf-8")
        if is_latest:
            with suppress(OSError):  # A cache that cannot be written.
                manifest.write(version.parent)
        return version

    def last(self, url: StoreUrl, reason: UnreachableError) -> Manifest:
        """Find the last version of a store in the cache, because its server cannot be reached."""
        try:
            manifest = Manifest.read(self._versions_of(url))
            if not _is_whole(self._versions_of(url) / copy_name(manifest), manifest):
                raise StoreError("its files are gone")
        except (OSError, MemmapError) as error:
            not_cached = f"it is not in the cache at {self.directory}"
            if is_offline():  # Only stores in the cache exist.
                _log.warning("no store at %s: %s is set, and %s", url, OFFLINE, not_cached)
                raise StoreNotFoundError(
                    f"no store at {url}: {reason}, and {not_cached}"
                ) from error
            raise UnreachableError(f"{reason}; and {not_cached}") from reason
        _log.warning(
            "%s is opened in the last version in the cache, because its server cannot be reached:"
            " %s",
            url,
            str(reason),  # The error would keep the frames of its traceback alive.
        )
        return manifest

    def reserve(self, shards: RemoteShards, field_shards: Integers) -> None:
        """Make room for all shards that are needed at once, and record them as reserved."""
        with self.locked(), ExitStack() as stack:
            records = shards.records()
            unreserved = field_shards[records[field_shards] == 0]
            needed_bytes = int(shards.num_bytes[unreserved].sum())
            versions = sorted(self.directory.glob("*/g-*"), key=lambda path: path.lstat().st_mtime)
            sizes = {path: _count_bytes(path) for path in versions}
            cached_bytes = sum(cached for cached, _ in sizes.values())
            reserved_bytes = needed_bytes + sum(reserved for _, reserved in sizes.values())
            free_bytes = shutil.disk_usage(self.directory).free
            removed = list[Path]()
            for path in versions:
                if self._describe_lack(cached_bytes, reserved_bytes, free_bytes) is None:
                    break
                if stack.enter_context(_lock_if_unused(path)):
                    removed.append(path)
                    cached_bytes -= sizes[path][0]
                    reserved_bytes -= sizes[path][1]
                    free_bytes += sizes[path][0]
            lack = self._describe_lack(cached_bytes, reserved_bytes, free_bytes)
            if lack is not None:
                raise StoreError(
                    f"{format_bytes(needed_bytes)} of shards don't fit into the cache at"
                    f" {self.directory}: {lack}, and all versions in it are in use. {_SETTING}"
                )
            for path in removed:
                _log.info("removing %s from the cache", path)
                _remove_version(path)
            shards.record(unreserved, sign=-1)

    def _describe_lack(self, cached_bytes: int, reserved_bytes: int, free_bytes: int) -> str | None:
        """Describe why reserved bytes don't fit; None if they do."""
        total_bytes = cached_bytes + reserved_bytes
        if self._limit is not None and total_bytes > self._limit:
            return f"it would take {format_bytes(total_bytes)} of {format_bytes(self._limit)}"
        if reserved_bytes + _ROOM_BYTES > free_bytes:
            return (
                f"{format_bytes(reserved_bytes)} are reserved, and its disk has"
                f" {format_bytes(free_bytes)} free"
            )
        return None

    def _versions_of(self, url: StoreUrl) -> Path:
        return self.directory / hashlib.sha256(url.encode()).hexdigest()[:32]


def _is_whole(version: Path, manifest: Manifest) -> bool:
    """Return whether a version exists, and its files are plain and have the right sizes."""
    try:
        sizes = {name: check_plain(version / name) for name in manifest.file_bytes}
        check_plain(version / _IN_USE)
        num_bytes = check_plain(version / RECORDS)
    except (MemmapError, OSError):
        return False  # It doesn't exist, or is damaged.
    expected = 8 * len(manifest.columns) * manifest.num_shards
    return sizes == manifest.file_bytes and num_bytes == expected


def _remove_version(version: Path) -> None:
    """Remove a version. If this process is killed, the rest of it is not read any more."""
    with suppress(OSError):
        (version / RECORDS).unlink()
    shutil.rmtree(version, ignore_errors=True)


def _count_bytes(version: Path) -> tuple[int, int]:
    """Return the bytes of a version's shards that are downloaded, and of those reserved."""
    with suppress(OSError, ValueError, StoreError):  # It is damaged.
        records = np.frombuffer(read_plain(version / RECORDS, MAX_MANIFEST_BYTES), np.int64)
        return int(records[records > 0].sum()), int(-records[records < 0].sum())
    return 0, 0


@contextmanager
def _lock_if_unused(version: Path) -> Iterator[bool]:
    """Yield whether no process has a version open. If so, none can open it in this context."""
    # For writing: NFS supports exclusive locks of such files only.
    with open(open_plain(version / _IN_USE, os.O_RDWR | os.O_CREAT), "rb") as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # It is in use, or the file system cannot tell.
            yield False
        else:
            yield True
