"""Stores at URLs, whose shards are kept in a directory of bounded size, of one user.

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
from lightning_memmap.sampling.rows import Integers
from lightning_memmap.sizes import format_bytes, parse_bytes
from lightning_memmap.store.building import unfinished_build
from lightning_memmap.store.checksums import merge_chunks
from lightning_memmap.store.files import check_plain, open_plain, read_plain
from lightning_memmap.store.manifest import MAX_MANIFEST_BYTES, Manifest
from lightning_memmap.store.open_columns import ItemRows, OpenColumn, Supplied
from lightning_memmap.store.places import CACHE, StoreUrl, cache_directory, place_of
from lightning_memmap.store.remote.files import OFFLINE, RemoteFiles, UnreachableError, is_offline
from lightning_memmap.store.remote.shards import (
    RECORDS,
    RemoteShards,
    copy_name,
    make_records,
    read_manifest,
)
from lightning_memmap.store.store import Damage, Store, Supply, open_directory
from lightning_memmap.store.workers import threads

#: The directory of the cache, and the most bytes in it.
DIRECTORY, LIMIT = CACHE, "LIGHTNING_MEMMAP_CACHE_SIZE"

_SETTING = f"{DIRECTORY} names another directory, and {LIMIT} the size that it may have"
_IN_USE = ".in_use"
#: What a version needs on the disk beside its shards.
_ROOM_BYTES = 2**20
#: A fetch of fewer bytes shows no progress.
_SHOWN_BYTES = 64 * 2**20
#: Shards in the cache that are compared with their checksums at once.
_NUM_CHECKS = 4
#: How long a fetch that is stopped may take to end.
_PATIENCE_S = 5.0
_log = logging.getLogger(__name__)


def open_store(path: str | Path) -> Store:
    """Open a store for reading.

    Of a store at a URL, the manifest is read now, and each shard when a row of it is needed, once:
    it is kept in a cache on this machine. The environment variable ``LIGHTNING_MEMMAP_CACHE`` names
    its directory, by default ``~/.cache/lightning_memmap``, and ``LIGHTNING_MEMMAP_CACHE_SIZE`` the
    most bytes in it, such as ``500GiB``. Where nobody answers at the URL, or
    ``LIGHTNING_MEMMAP_OFFLINE`` is ``1``, the store is opened in the version in the cache that its
    server gave last.

    Args:
        path: Directory of the store, or its URL, such as ``s3://bucket/stores/train``.

    Returns:
        The store, its files mapped and no row read.

    Raises:
        StoreNotFoundError: There is no store at this path.
        StoreError: The manifest is damaged or of another version, or a file is missing, linked, of
            the wrong size, or cannot be read; or the URL cannot be reached.
        ValueError: No library knows the protocol of the URL.
    """
    place = place_of(path)
    if isinstance(place, StoreUrl):
        return RemoteStore(place)
    try:
        return open_directory(place)
    except StoreNotFoundError as error:
        if (there := unfinished_build(place)) is None:
            raise
        raise StoreNotFoundError(f"no store at {place}: {there}") from error


def verify_store(
    path: str | Path,
    *,
    num_threads: int = 2,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> list[Damage]:
    """Compare every byte of a store with its checksums, and find what is damaged.

    Of a store at a URL, these are the bytes that this machine would use: those in the cache, and
    for shards that are not there, those of the server. What is damaged in the cache is fetched
    again when it is next needed.

    Args:
        path: Directory of the store, or its URL.
        num_threads: Threads that read and hash.
        advance: Called with the number of bytes read since the last call, from these threads.

    Returns:
        The damaged shards by field and shard; empty if there is no damage.

    Raises:
        StoreNotFoundError: There is no store at this path.
        StoreError: The manifest is damaged, or a file is missing, has the wrong size, or cannot be
            read; or the URL cannot be reached.
    """
    return open_store(path).damage(num_threads, advance)


class RemoteStore(Store):
    """An open store at a URL. Use `lightning_memmap.store.open_store` to get one."""

    def __init__(
        self,
        url: StoreUrl,
        generation: str | None = None,
        *,
        meanwhile: bool = False,
        progress: bool = True,
    ) -> None:
        shards = _CachedShards(url, progress)
        if generation not in (None, shards.manifest.generation):
            raise StoreError(f"the store at {url} was replaced meanwhile: open it again")
        columns = [
            Supplied(column.open(shards.directory), partial(shards.require_rows, index))
            for index, column in enumerate(shards.manifest.columns)
        ]
        super().__init__(shards.path, shards.manifest, columns)
        # Whatever the name of the directory leads to by now.
        self.files = shards.directory
        self._shards = shards
        if meanwhile and min(shards.records(), default=1) <= 0:
            self.supply = _Fetching(shards)

    @property
    @override
    def location(self) -> str:
        return str(self._shards.files.url)

    @override
    def provide(self, fields: Collection[str] | None, shards: Collection[int]) -> list[OpenColumn]:
        if fields is None and isinstance(self.supply, _Fetching):
            self.supply.needed = [*shards]
            self.supply.numbers = self._shards.numbers(range(len(self.columns)), [*shards])
        else:
            names = [field.name for field in self.schema.fields]
            found = [index for index, name in enumerate(names) if fields is None or name in fields]
            self._shards.require(found, [*shards])
        return super().provide(fields, shards)

    @property
    @override
    def whole(self) -> Store:
        if self.supply is None:
            return self
        # Not by `copy`, which would open the store again: see `__reduce__`.
        found = object.__new__(RemoteStore)
        vars(found).update({**vars(self), "supply": None})
        return found

    @override
    def lengths(self, field: str) -> Integers:
        index = self._index_of(field)
        (column,) = super().provide([field], ())
        if not isinstance(column, ItemRows):
            return super().lengths(field)
        ends = self._shards.read_index(index).reshape(column.index.shape)
        return replace(column, index=ends).lengths()

    @override
    def damage(self, num_threads: int, advance: Callable[[int], None]) -> list[Damage]:
        # Shards that are not here are read from the server.
        verify = partial(self._shards.damaged_chunks, advance=advance)
        with threads(num_threads) as pool:
            damaged = list(pool.map(verify, range(len(self._shards.num_bytes))))
        files = self._shards.files.url / self.manifest.generation
        return [
            Damage(
                self.schema.fields[number // self.num_shards].name, shard, files / file, start, stop
            )
            for number, chunks in enumerate(damaged)
            for shard, file, start, stop in merge_chunks(chunks)
        ]

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteStore, (self._shards.files.url, self.manifest.generation)


class _CachedShards(RemoteShards):
    """The shards of one store at a URL, fetched into the cache when they are asked for."""

    def __init__(self, url: StoreUrl, progress: bool = True) -> None:
        #: Whether long fetches show a progress bar.
        self.progress = progress
        self._cache, files, self._is_checked = _Cache(), RemoteFiles(url), True
        try:
            manifest = read_manifest(files)
        except UnreachableError as error:
            manifest, self._is_checked = self._cache.last(url, error), False
        with self._cache.locked():
            self.path = self._cache.version(url, manifest, is_last=self._is_checked)
            in_use = open_plain(self.path / _IN_USE)
            weakref.finalize(self, os.close, in_use)
            super().__init__(files, manifest, self.path)
            with suppress(OSError):  # A cache that cannot be written.
                os.utime(self.path)
                with _unused(self.path) as is_first:
                    if is_first:  # What is still to come was for processes that were killed.
                        self.record(np.flatnonzero(self.records() < 0).tolist(), sign=0)
            fcntl.flock(in_use, fcntl.LOCK_SH)
        #: The shards that this process has fetched, or compared with their checksums.
        self._is_checked_here = np.zeros(len(self.records()), np.bool_)

    def require_rows(self, field: int, rows: Integers | None) -> None:
        """Fetch the shards of some rows of a field, or all."""
        count = self.manifest.num_shards
        self.require([field], range(count) if rows is None else np.unique(rows % count))

    def require(
        self, fields: Sequence[int], shards: Sequence[int] | Integers, **meanwhile: Any
    ) -> None:
        """Fetch the shards that are not yet here, of fields by their place in the schema.

        While some are used, ``meanwhile`` is given to `RemoteShards.fetch`.
        """
        numbers = self.numbers(fields, shards)
        if self._is_checked_here[numbers].all():
            return
        with self._cache.usable():
            self._check(numbers[~self._is_checked_here[numbers]])
            if len(missing := self.missing(numbers)):
                # Before stores are removed to make room for what cannot be fetched.
                if not self._is_checked and (error := self.changed()):
                    raise StoreError(
                        f"{len(missing)} shards of fields that are needed are not in the cache at"
                        f" {self._cache.directory}, and {error}"
                    ) from error
                self._is_checked = True
                self._cache.reserve(self, missing)
                num_bytes = int(self.num_bytes[missing].sum())
                hidden = bool(meanwhile) or not self.progress or num_bytes < _SHOWN_BYTES
                self.fetch(missing, "fetching", hidden=hidden, **meanwhile)
            self._is_checked_here[numbers] = True

    def _check(self, numbers: Integers) -> None:
        """Compare shards that are in the cache with their checksums. Damaged ones are then missing.

        What is read stays in memory, and is used from there. Where there is no room for that, it
        would be read twice from the disk, and is not compared.
        """
        here = numbers[self.records()[numbers] > 0]
        if not len(here) or self.num_bytes[here].sum() > available_bytes():
            return
        verify = partial(self.damaged_chunks, advance=lambda _: None)
        with threads(min(_NUM_CHECKS, len(here))) as pool:
            damaged = list(pool.map(verify, here.tolist()))
        if num_wrong := sum(map(bool, damaged)):
            _log.warning(
                "%s of %s shards in the cache at %s have other bytes than those of their checksums,"
                " and are fetched again: see that its disk works",
                num_wrong,
                len(here),
                self.path,
            )


class _Fetching(Supply):
    """Fetches shards in the order in which they are needed, while rows of others are read."""

    def __init__(self, shards: _CachedShards) -> None:
        self._shards, self._fields = shards, range(len(shards.manifest.columns))
        #: The shards whose rows are read, and their numbers for all fields.
        self.needed, self.numbers = list[int](), np.zeros(0, np.int64)
        self._changed, self._stop = Condition(), Event()
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    @property
    @override
    def share(self) -> float:
        return 1.0 - len(self._shards.missing(self.numbers)) / max(1, len(self.numbers))

    @property
    @override
    def is_complete(self) -> bool:
        return self.share == 1.0

    @override
    def want(self, rows: Integers, turns: Integers | None = None) -> None:
        # The first rows that are wanted say in which order shards are: in an epoch, all come soon.
        if self._thread is None and self.needed:
            shards, firsts = np.unique(rows % self._shards.manifest.num_shards, return_index=True)
            order = dict.fromkeys([*shards[np.argsort(firsts)].tolist(), *self.needed])
            run = partial(self._run, [*order], self._stop)
            self._thread = Thread(target=run, name="lightning_memmap fetch", daemon=True)
            self._thread.start()

    def _run(self, shards: list[int], stop: Event) -> None:
        try:
            self._shards.require(self._fields, shards, note=self._note, stop=stop)
        except BaseException as error:  # Whoever waits for rows must get it.
            if stop is self._stop:  # Or else it was closed, and nobody waits for these.
                self._error = error
        self._note()

    def _note(self) -> None:
        with self._changed:
            self._changed.notify_all()

    @override
    def wait(self, rows: Integers) -> None:
        shards = np.unique(rows % self._shards.manifest.num_shards)
        numbers = self._shards.numbers(self._fields, shards)
        with self._changed:
            self._changed.wait_for(lambda: self._error or not len(self._shards.missing(numbers)))
        if self._error is not None:
            raise self._error

    @override
    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE_S)
        self._stop, self._thread, self._error = Event(), None, None


class _Cache:
    """The cache that the environment names, by default that of the user."""

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
                f"others may write to the cache at {self.directory}, and so give this user rows of"
                " their own: let it belong to this user, keep others out (`chmod go-w"
                f" {self.directory}`), and see that they have left nothing there; or {_SETTING}"
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
            yield

    def version(self, url: StoreUrl, manifest: Manifest, *, is_last: bool) -> Path:
        """Find or make the directory of a version. The lock must be held."""
        version = self._of(url) / copy_name(manifest)
        if not _is_whole(version, manifest):
            _remove(version)
            version.parent.mkdir(0o700, exist_ok=True)
            version.mkdir(0o700)
            for name, num_bytes in manifest.file_bytes.items():
                with open(version / name, "xb") as file:
                    file.truncate(num_bytes)
            make_records(version, manifest)
            (version / _IN_USE).write_text(f"{url}\n", encoding="utf-8")
        if is_last:
            with suppress(OSError):  # A cache that cannot be written.
                manifest.write(version.parent)
        return version

    def last(self, url: StoreUrl, reason: UnreachableError) -> Manifest:
        """Find the version of a store that its server gave last, since nobody can be asked now."""
        try:
            manifest = Manifest.read(self._of(url))
            if not _is_whole(self._of(url) / copy_name(manifest), manifest):
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

    def reserve(self, shards: RemoteShards, numbers: Integers) -> None:
        """Make room for shards, once for all that are needed, and record that they are to come."""
        with self.locked(), ExitStack() as stack:
            known = shards.records()
            wanted = numbers[known[numbers] == 0]
            needed = int(shards.num_bytes[wanted].sum())
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
                _remove(path)
            shards.record(wanted, sign=-1)

    def _lack(self, here: int, coming: int, free: int) -> str | None:
        """Why there is no room for bytes that are to come; None where there is."""
        if self._limit is not None and here + coming > self._limit:
            total, limit = format_bytes(here + coming), format_bytes(self._limit)
            return f"it would have {total} and may hold {limit}"
        if coming + _ROOM_BYTES > free:
            return f"{format_bytes(coming)} are to come, and its disk has {format_bytes(free)} free"
        return None

    def _of(self, url: StoreUrl) -> Path:
        return self.directory / hashlib.sha256(url.encode()).hexdigest()[:32]


def _is_whole(version: Path, manifest: Manifest) -> bool:
    """Whether a version is there, and its files are plain and have their sizes."""
    try:
        sizes = {name: check_plain(version / name) for name in manifest.file_bytes}
        check_plain(version / _IN_USE)
        num_bytes = check_plain(version / RECORDS)
    except (MemmapError, OSError):
        return False  # It is not there, or was damaged.
    expected = 8 * len(manifest.columns) * manifest.num_shards
    return sizes == manifest.file_bytes and num_bytes == expected


def _remove(version: Path) -> None:
    """Remove a version, of which a process that is killed meanwhile leaves nothing to be read."""
    with suppress(OSError):
        (version / RECORDS).unlink()
    shutil.rmtree(version, ignore_errors=True)


def _bytes_of(version: Path) -> tuple[int, int]:
    """The bytes of the shards of a version that are here, and of those that are to come."""
    with suppress(OSError, ValueError, StoreError):  # It was damaged.
        records = np.frombuffer(read_plain(version / RECORDS, MAX_MANIFEST_BYTES), np.int64)
        return int(records[records > 0].sum()), int(-records[records < 0].sum())
    return 0, 0


@contextmanager
def _unused(version: Path) -> Iterator[bool]:
    """Whether nobody has a version open, nor opens it meanwhile."""
    # For writing: NFS has exclusive locks for no other file.
    with open(open_plain(version / _IN_USE, os.O_RDWR | os.O_CREAT), "rb") as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # It is in use, or nobody can say.
            yield False
        else:
            yield True
