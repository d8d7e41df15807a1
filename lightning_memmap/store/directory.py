"""The directory of a store: a manifest that points at a generation, the files of one build.

    stores/mine/train/
      manifest.json            replaced by os.replace: the only commit
      g-3f9c2a.../image.memmap the files of one build, never written again
      g-77d010.../build.json   a build that is under way, or was interrupted, in its own generation
      .lock                    held by a process that changes any of this

A process that has read a manifest finds exactly its files, or none if the store was replaced. Other
users may have put files there. No link is followed, and their files stay as they are.
"""

import fcntl
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_memmap.errors import MemmapError, StoreError
from lightning_memmap.store.files import (
    SAFE_FLAGS,
    TEMPORARY,
    is_there,
    make_unreadable_error,
    open_plain,
    read_plain,
    sync_path,
)
from lightning_memmap.store.manifest import (
    FORMAT,
    GENERATION,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Manifest,
    OtherVersionError,
)

#: The draft of an unfinished build, in its generation.
DRAFT = "build.json"
#: The draft of an unfinished build in parts.
PARTS_DRAFT = "parts.json"
JOURNAL = "journal"
#: The directory of requests by processes that read rows of a build, in its generation.
REQUESTS = "requests"
_LOCK = ".lock"
_UNFINISHED_MANIFEST = MANIFEST + TEMPORARY
#: The locks that this process holds. They are closed in processes that it forks, because these may
#: outlive it.
_locks = set[int]()
os.register_at_fork(after_in_child=lambda: _close_locks(*_locks))
_log = logging.getLogger(__name__)


def is_store(directory: Path) -> bool:
    """Return whether a directory has a manifest, which may be damaged."""
    try:
        os.lstat(directory / MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise StoreError(
            f"{directory} cannot be searched: {error.strerror}: ask its owner for the right"
            " to read it, or choose another directory"
        ) from error
    return True


def list_stores(directory: Path) -> list[str]:
    """Return the sorted names of the stores in a directory."""
    names = sorted(child.name for child in directory.iterdir()) if directory.is_dir() else []
    return [name for name in names if not name.startswith(".") and is_store(directory / name)]


def check_store_path(directory: Path, argument: str) -> None:
    """Check that a directory is missing or empty, or has a store or an unfinished build."""
    if not os.path.lexists(directory):
        return
    if is_store(directory):
        _check_manifest(directory, argument)
        return
    names = os.listdir(directory) if directory.is_dir() else [""]
    # Another process may have finished the store a moment ago.
    ours = (_LOCK, _UNFINISHED_MANIFEST, MANIFEST)
    if all(GENERATION.fullmatch(name) or name in ours for name in names):
        return
    if names := list_stores(directory):
        raise StoreError(
            f"{directory} exists and is not a store, but has stores in it ({', '.join(names)}):"
            f" choose another {argument}"
        )
    raise StoreError(
        f"{directory} exists and is not a store: choose another {argument}, or remove it"
    )


def _check_manifest(directory: Path, argument: str) -> None:
    """Check that the manifest in a directory is of a store: other software uses the name too."""
    if any(GENERATION.fullmatch(name) for name in os.listdir(directory)):
        return  # A damaged manifest may be replaced.
    path = directory / MANIFEST
    try:
        data = read_plain(path, MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise make_unreadable_error(path, error) from error
    if FORMAT.encode() not in data:
        raise StoreError(
            f"{path} is not the manifest of a store, and is not replaced: choose another {argument}"
        )


@dataclass(frozen=True)
class StoreDirectory:
    """The directory of one store, which may not exist yet."""

    path: Path

    def files(self, manifest: Manifest) -> Path:
        """Return the directory of the generation that a manifest names."""
        return self.path / manifest.generation

    @property
    def has_unused(self) -> bool:
        """Whether an interrupted build has left files, as far as this process can see."""
        with suppress(OSError, StoreError):
            return bool(self.unfinished(DRAFT)) or any(map(is_there, self._find_unused()))
        return False

    @contextmanager
    def locked(self, *, wait: bool = True) -> Iterator[None]:
        """Hold the lock for changes, and remove unused files first."""
        path = self.path / _LOCK
        with ExitStack() as stack:
            try:
                lock = self._open_lock(path)
                _locks.add(lock)
                stack.callback(_close_locks, lock)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if not wait:
                        raise StoreError(
                            f"another process is writing the store at {self.path}: it holds"
                            f" {path}; wait for it"
                        ) from None
                    text = "another process is building the store at %s: waiting for it (%s)"
                    _log.warning(text, self.path, path)
                    fcntl.flock(lock, fcntl.LOCK_EX)
            except (FileExistsError, NotADirectoryError) as error:
                raise StoreError(
                    f"no store can be made at {self.path}: {error.filename} is not a directory;"
                    " choose another one"
                ) from error
            except OSError as error:
                raise StoreError(
                    f"the store at {self.path} cannot be locked: {error}: choose another directory,"
                    f" or let the owner of {self.path} build the store or remove {path}"
                ) from error
            self.remove_unused()
            yield

    def _open_lock(self, path: Path) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(exist_ok=True)
        # In a shared directory the system may reject O_CREAT for a file of another user.
        if os.path.lexists(path):
            return open_plain(path, os.O_RDWR)
        mode = 0o600 | os.stat(self.path).st_mode & 0o066
        lock = os.open(path, os.O_RDWR | os.O_CREAT | SAFE_FLAGS, mode)
        with suppress(PermissionError):  # Another process has made it just now.
            os.fchmod(lock, mode)
        return lock

    def begin(self, name: str | None = None) -> Path:
        """Make a generation for a build. The lock must be held until the generation has a draft."""
        path = self.path / (name or f"g-{secrets.token_hex(8)}")
        path.mkdir()
        return path

    def unfinished(self, draft_name: str) -> list[Path]:
        """Return the generations of unfinished builds of this user.

        The current generation may have a draft too, if the process that committed it was killed.
        """
        try:
            generations = [path for path in self._list_generations() if is_there(path / draft_name)]
        except OSError as error:
            raise StoreError(
                f"{self.path} cannot be listed, so unfinished builds in it are not found:"
                f" {error}: check that its disk works, that you have the right to read it, and that"
                " the process may open more files (`ulimit -n`)"
            ) from error
        with suppress(MemmapError):  # There isn't a store yet, or it cannot be read.
            current = Manifest.read(self.path).generation if generations else ""
            return [path for path in generations if path.name != current]
        return generations

    def remove_unfinished(self) -> None:
        """Remove the generations of unfinished builds, if they are ours. The lock must be held."""
        for path in self.unfinished(DRAFT):
            remove_tree(path)

    def commit(self, manifest: Manifest) -> None:
        """Make a generation the store. The lock must be held, and its files must be synced."""
        sync_path(self.files(manifest))
        sync_path(self.path)
        manifest.write(self.path)
        sync_path(self.path)
        sync_path(self.path.parent)
        self.remove_unused()

    def remove_unused(self) -> None:
        """Remove unused files. The lock must be held.

        If the directory cannot be listed now, they stay until the next change.
        """
        try:
            unused = list(self._find_unused())
        except OSError as error:
            _log.warning("%s cannot be listed: old files stay in it: %s", self.path, error)
            return
        for path in unused:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(OSError):  # It is not there, or this process may not remove it.
                    path.unlink()

    def _find_unused(self) -> Iterator[Path]:
        """Yield old generations, and files that the build of the current one has left in it."""
        yield self.path / _UNFINISHED_MANIFEST
        try:
            current = Manifest.read(self.path).generation if is_store(self.path) else ""
        except OtherVersionError:
            raise
        except StoreError:
            return  # Without a manifest, the current generation is unknown.
        for path in self._list_generations():
            if path.name == current:
                yield from (path / JOURNAL, path / REQUESTS)
                yield from path.glob(f"*{TEMPORARY}")
                yield from (path / PARTS_DRAFT, path / DRAFT)
            elif not any(is_there(path / name) for name in (DRAFT, PARTS_DRAFT)):
                yield path

    def _list_generations(self) -> list[Path]:
        """Return the generations that belong to this user or to the owner of the directory."""
        generations = []
        try:
            owners = (os.geteuid(), os.stat(self.path).st_uid)
            names = sorted(os.listdir(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return []
        for name in filter(GENERATION.fullmatch, names):
            with suppress(FileNotFoundError):  # Another process has just removed it.
                status = os.lstat(self.path / name)
                if stat.S_ISDIR(status.st_mode) and status.st_uid in owners:
                    generations.append(self.path / name)
        return generations


def _close_locks(*locks: int) -> None:
    for lock in locks:
        if lock in _locks:
            _locks.remove(lock)
            os.close(lock)


def remove_tree(path: Path) -> None:
    """Remove a generation without following links."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be removed: {error}: remove it manually") from error


def list_unknown_files(directory: Path, manifest: Manifest) -> list[str]:
    """List the files in the directory of a store that belong neither to it nor to a build."""
    names = {name for name in os.listdir(directory) if not GENERATION.fullmatch(name)}
    inside = set(os.listdir(directory / manifest.generation)) - manifest.file_bytes.keys()
    names -= {MANIFEST, _LOCK}
    return sorted({*names, *(f"{manifest.generation}/{name}" for name in inside)})
