"""Where the shards of stores at URLs are kept: a directory of bounded size, of one user.

    .lock                  held for all bookkeeping
    <URL>.last             the version that the server of a URL gave last: its <URL>-<manifest>
    <URL>-<manifest>/      one version: its manifest and files, RECORDS of what was fetched, and
      .in_use              a lock that all who have it open share, used last when it was modified

What changes at a URL has another manifest, and so another directory. Versions that nobody has open
are removed where there is no room, the one that was opened longest ago first.
"""

import fcntl
import hashlib
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
from filelock import FileLock

from lightning_memmap.errors import MemmapError, StoreError, StoreNotFoundError
from lightning_memmap.sizes import format_bytes, parse_bytes
from lightning_memmap.store.manifest import MANIFEST, check_files
from lightning_memmap.store.places import StoreUrl
from lightning_memmap.store.remote.files import (
    OFFLINE,
    UnreachableError,
    is_offline,
)
from lightning_memmap.store.remote.shards import (
    RECORDS,
    RemoteManifest,
    RemoteShards,
    closing_fd,
    make_records,
    read_plain,
)

#: The directory of the cache, and the most bytes in it.
DIRECTORY, LIMIT = "LIGHTNING_MEMMAP_CACHE", "LIGHTNING_MEMMAP_CACHE_SIZE"

_SETTING = f"{DIRECTORY} names another directory, and {LIMIT} the size that it may have"
IN_USE, _LAST, _GONE = ".in_use", ".last", ".gone"
_VERSION = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}")
#: What a version needs on the disk beside its shards.
_ROOM_BYTES = 2**20
_log = logging.getLogger(__name__)


class Cache:
    """The cache that the environment names, by default that of the user.

    Raises:
        ValueError: Its size is not one.
        StoreError: It cannot be made, or others may write to it.
    """

    def __init__(self) -> None:
        given = os.environ.get(DIRECTORY)
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        directory = Path(given).expanduser() if given else home / "lightning_memmap"
        self.directory = Path(os.path.realpath(directory))
        try:
            self._limit = parse_bytes(text) if (text := os.environ.get(LIMIT)) else None
        except ValueError as error:
            raise ValueError(f"{LIMIT}: {error}") from error
        with self.usable():
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = os.lstat(self.directory)
        if not _is_own_directory(status):
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
    def _locked(self) -> Iterator[None]:
        if not os.access(self.directory, os.W_OK):
            yield  # Whole stores in it are used as they are.
            return
        with FileLock(self.directory / ".lock"):
            for left in self.directory.glob(f"*{_GONE}"):  # Of a process that was killed.
                shutil.rmtree(left, ignore_errors=True)
            yield

    @contextmanager
    def entered(self, remote: RemoteManifest, url: StoreUrl, *, is_last: bool) -> Iterator[Path]:
        """Find or make the directory of a version, in which nothing is removed meanwhile.

        ``is_last`` says that the server has just given this version.
        """
        directory = self.directory / _version(url, remote.data)
        with self.usable(), self._locked():
            if not _is_whole(directory, remote):
                self._make(directory, remote, url)
            if is_last:
                with suppress(OSError):  # A cache that cannot be written.
                    _replace(self.directory / _last(url), directory.name.encode())
            yield directory

    def _make(self, directory: Path, remote: RemoteManifest, url: StoreUrl) -> None:
        self._remove(directory)
        # A name that nobody can have foreseen, and that is removed if this process is killed.
        made = Path(tempfile.mkdtemp(suffix=_GONE, dir=self.directory))
        # Several columns may have a file in common.
        sizes = {name: n for c in remote.manifest.columns for name, n in c.file_bytes.items()}
        for name, num_bytes in sizes.items():
            with open(made / name, "xb") as file:
                file.truncate(num_bytes)
        make_records(made, remote.manifest)
        (made / IN_USE).write_text(f"{url}\n", encoding="utf-8")
        (made / MANIFEST).write_bytes(remote.data)
        os.rename(made, directory)

    def last(self, url: StoreUrl, reason: UnreachableError) -> RemoteManifest:
        """Find the version of a store that its server gave last, since nobody can be asked now."""
        try:
            name = read_plain(self.directory / _last(url)).decode()
            data = read_plain(self.directory / name / MANIFEST)
            if name != _version(url, data):
                raise ValueError(f"{name} has another manifest")
        except (OSError, ValueError, StoreError) as error:
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
        return RemoteManifest(data, url)

    def reserve(self, shards: RemoteShards, missing: Callable[[], list[int]]) -> None:
        """Make room for shards, once for all that are needed, and record that they are to come.

        Args:
            shards: Those of the version.
            missing: Finds the numbers of those that are needed and not here.

        Raises:
            StoreError: There is no room, and what takes it is in use. Nothing was removed.
        """
        with self._locked(), ExitStack() as stack:
            known = shards.records().reshape(-1)
            unreserved = [number for number in missing() if not known[number]]
            needed = int(shards.num_bytes(unreserved).sum())
            versions = [path for path in self.directory.iterdir() if _VERSION.fullmatch(path.name)]
            records = {path: _records(path) for path in versions}
            used = int(sum(np.abs(each).sum() for each in records.values()))
            coming = int(sum(-each[each < 0].sum() for each in records.values()))
            free = shutil.disk_usage(self.directory).free
            removed: list[Path] = []
            for path in sorted(versions, key=_used_last_ns):
                if self._lack(used + needed, coming + needed, free) is None:
                    break
                if stack.enter_context(unused(path)):
                    removed.append(path)
                    used -= int(np.abs(records[path]).sum())
                    coming += int(records[path][records[path] < 0].sum())
                    free += int(records[path][records[path] > 0].sum())
            if (lack := self._lack(used + needed, coming + needed, free)) is not None:
                raise StoreError(
                    f"{format_bytes(needed)} of shards have no room in the cache at"
                    f" {self.directory}: {lack}, and what is in it is in use. {_SETTING}"
                )
            for path in removed:
                _log.info("removing %s from the cache", path)
                self._remove(path)
            shards.record(unreserved, sign=-1)

    def _lack(self, total: int, coming: int, free: int) -> str | None:
        """Why there is no room for all bytes that are here or to come; None where there is."""
        if self._limit is not None and total > self._limit:
            return f"it would have {format_bytes(total)} and may hold {format_bytes(self._limit)}"
        if coming + _ROOM_BYTES > free:
            return f"{format_bytes(coming)} are to come, and its disk has {format_bytes(free)} free"
        return None

    def _remove(self, directory: Path) -> None:
        """Remove a version: all of it or nothing, as far as others see."""
        gone = tempfile.mkdtemp(suffix=_GONE, dir=self.directory)
        with suppress(FileNotFoundError):
            os.rename(directory, f"{gone}/{directory.name}")
        shutil.rmtree(gone, ignore_errors=True)


def _version(url: StoreUrl, manifest: bytes) -> str:
    return f"{_digest(str(url).encode())}-{_digest(manifest)}"


def _last(url: StoreUrl) -> str:
    return _digest(str(url).encode()) + _LAST


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _is_whole(directory: Path, remote: RemoteManifest) -> bool:
    """Whether a version is there, with files of the right kind and sizes that are this user's."""
    num_records = len(remote.manifest.columns) * remote.manifest.num_shards
    try:
        check_files(directory, remote.manifest)
        own = [os.lstat(directory / name) for name in (RECORDS, IN_USE, MANIFEST)]
        is_own = _is_own_directory(os.lstat(directory)) and all(
            stat.S_ISREG(each.st_mode) and each.st_uid == os.geteuid() for each in own
        )
    except (MemmapError, OSError):
        return False  # It is not there, or was damaged.
    return is_own and own[0].st_size == 8 * num_records


def _is_own_directory(status: os.stat_result) -> bool:
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _replace(path: Path, data: bytes) -> None:
    """Write a small file: all of it, or none."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def _records(version: Path) -> np.ndarray:
    try:
        return np.frombuffer(read_plain(version / RECORDS), np.int64)
    except (OSError, ValueError, StoreError):
        return np.empty(0, np.int64)


def _used_last_ns(version: Path) -> int:
    try:
        return os.lstat(version / IN_USE).st_mtime_ns
    except OSError:
        return 0


@contextmanager
def unused(version: Path) -> Iterator[bool]:
    """Whether nobody has a version open, nor opens it meanwhile."""
    try:
        # For writing: NFS has exclusive locks for no other file.
        opened = os.open(version / IN_USE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield True
        return
    with closing_fd(opened):
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # It is in use, or nobody can say.
            yield False
        else:
            yield True
