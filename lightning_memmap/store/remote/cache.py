"""Where the shards of stores at URLs are kept: a directory of bounded size.

Each store has an entry, named after its URL and the bytes of its manifest: what changes at the URL
gets another entry. A process that has a store open holds a shared lock on its entry. Entries that
nobody holds are removed when there is no room, the one that was opened longest ago first. All
bookkeeping is done under one lock.

An entry keeps the manifest, and when the server last gave it: where nobody answers at the URL, the
store is opened in the version of it that the server gave last.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import stat
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from filelock import FileLock

from lightning_memmap.errors import MemmapError, StoreError, StoreNotFoundError
from lightning_memmap.sizes import format_bytes, parse_bytes
from lightning_memmap.store.manifest import MANIFEST, check_files
from lightning_memmap.store.places import StoreUrl
from lightning_memmap.store.progress import show_progress
from lightning_memmap.store.remote.fetcher import FETCHED, RESERVED, RemoteManifest, ShardFetcher
from lightning_memmap.store.remote.files import RemoteFiles, UnreachableError

#: The directory of the cache, and the most bytes in it.
DIRECTORY, LIMIT = "LIGHTNING_MEMMAP_CACHE", "LIGHTNING_MEMMAP_CACHE_SIZE"

_FILES, _STATES, _IN_USE, _RESERVED, _LOCKS = "files", "states", "in_use", "reserved", "locks"
#: The URL of an entry; and, after the digest of a URL, the name of the note that nothing is there.
_URL, _ABSENT = "url", ".absent"
#: Letters of the name of an entry.
_NAME_LETTERS = 40
#: Locks of an entry that keep processes from fetching the same shard at once.
_NUM_LOCKS = 64
#: What an entry needs on the disk beside its shards.
_ROOM_BYTES = 2**20
#: A fetch of fewer bytes shows no progress.
_SHOWN_BYTES = 64 * 2**20
_log = logging.getLogger(__name__)


class Cache:
    """The directory of the cache.

    Args:
        directory: The directory, which is made where it is missing.
        limit: The most bytes of shards in it; None for as many as the disk has room for.

    Raises:
        StoreError: It cannot be made, or belongs to another user.
    """

    def __init__(self, directory: Path, limit: int | None) -> None:
        self.directory, self._limit = directory, limit
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = os.lstat(directory)
        except OSError as error:
            raise StoreError(f"the cache at {directory} cannot be made: {error}: {_SETTING}") from (
                error
            )
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise StoreError(f"{directory} is no directory that belongs to this user: {_SETTING}")

    @classmethod
    def of_user(cls) -> "Cache":
        """The cache that the environment names, by default that of the user.

        Raises:
            ValueError: The size is not one.
            StoreError: It cannot be made, or belongs to another user.
        """
        given = os.environ.get(DIRECTORY)
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        directory = Path(given).expanduser() if given else home / "lightning_memmap"
        try:
            limit = parse_bytes(text) if (text := os.environ.get(LIMIT)) else None
        except ValueError as error:
            raise ValueError(f"{LIMIT}: {error}") from error
        return cls(Path(os.path.realpath(directory)), limit)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock for changes to the bookkeeping."""
        if not os.access(self.directory, os.W_OK):
            yield  # Whole stores in it are used as they are.
            return
        with FileLock(self.directory / ".lock"):
            for left in self.directory.glob("*.gone"):  # Of a process that was killed.
                shutil.rmtree(left, ignore_errors=True)
            yield

    @contextmanager
    def usable(self) -> Iterator[None]:
        """Say what a user can do where the cache cannot be read or written.

        Raises:
            StoreError: A file of it cannot be used, or its file system has no locks.
        """
        try:
            yield
        except MemmapError:
            raise
        except OSError as error:
            raise StoreError(
                f"the cache at {self.directory} cannot be used: {error}: open the store again if it"
                f" was removed meanwhile. {_SETTING}"
            ) from error

    def enter(self, remote: RemoteManifest, url: StoreUrl) -> Path:
        """Find the entry of a store, or make it. The lock must be held.

        Args:
            remote: The store.
            url: Its URL.

        Returns:
            The directory of the entry, whose files have the sizes of those of the store.
        """
        entry = self.directory / _entry_name(url, remote.data)
        columns = remote.manifest.columns
        try:
            check_files(entry / _FILES, remote.manifest)
            num_states = os.lstat(entry / _STATES).st_size
            if num_states == len(columns) * remote.manifest.num_shards:
                os.lstat(entry / MANIFEST)
                return entry
        except (MemmapError, OSError):
            pass  # It is not there, or was damaged.
        _remove(entry)
        made = entry.with_suffix(".gone")
        (made / _FILES).mkdir(parents=True)
        (made / _LOCKS).mkdir()
        for column in columns:
            for name, num_bytes in column.file_bytes.items():
                # Several columns may have a file in common.
                with open(made / _FILES / name, "wb") as file:
                    file.truncate(num_bytes)
        (made / _STATES).write_bytes(bytes(len(columns) * remote.manifest.num_shards))
        (made / _IN_USE).touch()
        (made / _URL).write_text(f"{url}\n", encoding="utf-8")
        (made / MANIFEST).write_bytes(remote.data)
        os.rename(made, entry)
        return entry

    def note(self, url: StoreUrl, entry: Path | None) -> None:
        """Note what a server has just said of a URL.

        Args:
            url: The URL.
            entry: The entry of the store there; None where there is none.
        """
        absent = self.directory / (_digest(str(url).encode()) + _ABSENT)
        with suppress(OSError):  # A cache that cannot be written.
            if entry is None:
                absent.touch()
            else:
                os.utime(entry / MANIFEST)
                absent.unlink(missing_ok=True)

    def last(self, url: StoreUrl, reason: UnreachableError) -> RemoteManifest:
        """Find the version of a store that its server gave last.

        Args:
            url: The URL.
            reason: Why the server cannot be asked.

        Returns:
            The version, one of the entries.

        Raises:
            StoreNotFoundError: There was no store when the server was last asked.
            UnreachableError: Nothing of the URL is in the cache.
        """
        if (self.directory / (_digest(str(url).encode()) + _ABSENT)).exists():
            raise StoreNotFoundError(
                f"there was no store at {url} when its server was last asked, and now {reason}"
            )
        versions = {}
        for entry in self._entries():
            with suppress(OSError, ValueError):
                if (entry / _URL).read_text(encoding="utf-8") == f"{url}\n":
                    data = (entry / MANIFEST).read_bytes()
                    if entry.name == _entry_name(url, data):
                        versions[os.lstat(entry / MANIFEST).st_mtime] = data
        if not versions:
            raise UnreachableError(
                f"{reason}; and the cache at {self.directory} has nothing of this store"
            ) from reason
        given = datetime.fromtimestamp(max(versions), timezone.utc)
        _log.warning(
            "%s is opened from the cache, in the version that its server gave last, on %s: whether"
            " there is another one by now cannot be checked: %s",
            url,
            given.isoformat(sep=" ", timespec="seconds"),
            str(reason),  # Who keeps the error keeps the frames that it went through.
        )
        return RemoteManifest(versions[max(versions)], url)

    def reserve(self, fetcher: ShardFetcher, entry: Path, numbers: Collection[int]) -> None:
        """Make room for shards, and count them as there. The lock must be held.

        Args:
            fetcher: That of the entry.
            entry: The entry.
            numbers: The shards of fields, which are neither fetched nor reserved.

        Raises:
            StoreError: There is no room, and what takes it is in use.
        """
        needed, used = fetcher.num_bytes(numbers), sum(map(_reserved, self._entries()))
        for old in sorted(self._entries(), key=_used_last_ns):
            if self._lacks(needed, used) is None:
                break
            num_bytes = _reserved(old)
            if old != entry and _remove_unused(old):
                used -= num_bytes
        if (lack := self._lacks(needed, used)) is not None:
            raise StoreError(
                f"{format_bytes(needed)} of shards have no room in the cache at {self.directory}:"
                f" {lack}, and what is in it is in use. {_SETTING}"
            )
        total = _reserved(entry) + needed
        fetcher.mark(numbers, RESERVED)
        temporary = entry / f"{_RESERVED}.tmp"
        temporary.write_text(str(total), encoding="ascii")
        os.replace(temporary, entry / _RESERVED)

    def _lacks(self, needed: int, used: int) -> str | None:
        """Why there is no room for more bytes; None where there is."""
        if self._limit is not None and used + needed > self._limit:
            return f"it may hold {format_bytes(self._limit)} and has {format_bytes(used)}"
        free = shutil.disk_usage(self.directory).free
        if needed + _ROOM_BYTES > free:
            return f"its disk has {format_bytes(free)} free"
        return None

    def _entries(self) -> list[Path]:
        paths = self.directory.iterdir()
        return [path for path in paths if len(path.name) == _NAME_LETTERS]


_SETTING = f"{DIRECTORY} names another directory, and {LIMIT} the size that it may have"


class CachedShards:
    """The shards of one store at a URL, fetched into the cache when they are asked for.

    The entry of the store stays in the cache as long as this object is there.

    Args:
        url: The URL.

    Attributes:
        url: The URL.
        manifest: The manifest of the store.
        directory: The files of the store, with holes where nothing was fetched.

    Raises:
        StoreNotFoundError: There is no store at the URL.
        StoreError: It cannot be reached, its manifest is damaged, or the cache cannot be used.
        ValueError: No library knows the protocol.
    """

    def __init__(self, url: StoreUrl) -> None:
        self.url, self._cache = url, Cache.of_user()
        self._files, self._is_checked = RemoteFiles(url), True
        try:
            remote = RemoteManifest.read(self._files)
        except UnreachableError as error:
            remote, self._is_checked = self._cache.last(url, error), False
        except StoreNotFoundError:
            self._cache.note(url, None)
            raise
        with self._cache.usable(), self._cache.locked():
            self._entry = self._cache.enter(remote, url)
            in_use = os.open(self._entry / _IN_USE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            weakref.finalize(self, os.close, in_use)
            fcntl.flock(in_use, fcntl.LOCK_SH)
            with suppress(OSError):  # A cache that cannot be written.
                os.utime(self._entry / _IN_USE)
        if self._is_checked:
            self._cache.note(url, self._entry)
        self._remote = remote
        self.manifest, self.directory = remote.manifest, self._entry / _FILES
        lock = partial(_shard_lock, self._entry / _LOCKS)
        states = self._entry / _STATES
        self._fetcher = ShardFetcher(remote, self._files, self.directory, states, lock)
        self._known = self._fetcher.read_states()

    def require(self, fields: Collection[int], shards: Collection[int]) -> None:
        """Fetch the shards that are not yet here.

        Args:
            fields: The fields, by their place in the schema.
            shards: The shards.

        Raises:
            StoreNotFoundError: The store is gone.
            StoreError: It cannot be reached, was replaced, or is damaged; or the cache has no room,
                was removed, or cannot be written.
        """
        fetcher = self._fetcher
        if all(self._known[field, shard] == FETCHED for field in fields for shard in shards):
            return
        with self._cache.usable():
            if missing := fetcher.absent(fields, shards):
                # Before stores are removed to make room for what cannot be fetched.
                self._check(len(missing))
                with self._cache.locked():
                    if unreserved := fetcher.absent(fields, shards, RESERVED):
                        self._cache.reserve(fetcher, self._entry, unreserved)
                num_bytes = fetcher.num_bytes(missing)
                hidden = num_bytes < _SHOWN_BYTES
                with show_progress("fetching", num_bytes, 1, hidden=hidden) as advance:
                    fetcher.fetch(missing, advance)
            self._known = fetcher.read_states()

    def _check(self, num_missing: int) -> None:
        """Compare the manifest with the server's, if it is from the cache."""
        if self._is_checked:
            return
        try:
            found = RemoteManifest.read(self._files).data
        except UnreachableError as error:
            raise UnreachableError(
                f"{num_missing} shards of fields that are needed are not in the cache at"
                f" {self._cache.directory}, and {error}"
            ) from error
        if found != self._remote.data:
            raise StoreError(
                f"the store at {self.url} is another one by now than that in the cache, and shards"
                " of that are missing: open it again"
            )
        self._is_checked = True


def _shard_lock(directory: Path, number: int) -> FileLock:
    return FileLock(directory / str(number % _NUM_LOCKS))


def _entry_name(url: StoreUrl, manifest: bytes) -> str:
    return _digest(str(url).encode() + b"\0" + manifest)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_NAME_LETTERS]


def _reserved(entry: Path) -> int:
    """Bytes of the shards of an entry that are there, or will be."""
    try:
        return int((entry / _RESERVED).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def _used_last_ns(entry: Path) -> int:
    try:
        return os.lstat(entry / _IN_USE).st_mtime_ns
    except OSError:
        return 0


def _remove_unused(entry: Path) -> bool:
    """Remove an entry, unless a process has its store open. Returns whether it did."""
    with suppress(FileNotFoundError):
        # For writing: NFS has exclusive locks for no other file.
        descriptor = os.open(entry / _IN_USE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # It is in use, or nobody can say.
            return False
        finally:
            os.close(descriptor)
    _log.info("removing %s from the cache", entry)
    _remove(entry)
    return True


def _remove(entry: Path) -> None:
    """Remove an entry: all of it or nothing, as far as others see."""
    gone = entry.with_suffix(".gone")
    shutil.rmtree(gone, ignore_errors=True)
    with suppress(FileNotFoundError):
        os.rename(entry, gone)
    shutil.rmtree(gone, ignore_errors=True)
