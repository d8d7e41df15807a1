"""What lies beside a store: the lock, a build under way, an old store on its way out.

Others may have put something there. A link is never followed, and what is not ours is neither
removed nor made the store.
"""

import logging
import math
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from lightning_memmap.errors import StoreError
from lightning_memmap.store.files import TEMPORARY, check_plain, sync_path
from lightning_memmap.store.journal import JOURNAL, PLAN
from lightning_memmap.store.manifest import MANIFEST

_log = logging.getLogger(__name__)

#: How long a reader waits for another process to finish a replacement, which takes two renames.
_READER_WAIT_S = 10.0


def is_store(directory: Path) -> bool:
    """Whether there is a manifest: the mark of a store, whole or damaged.

    Raises:
        StoreError: The directory may not be looked into.
    """
    try:
        os.lstat(directory / MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise StoreError(
            f"{directory} cannot be looked into: {error.strerror}: let its owner give you the right"
            " to read it, or choose another directory"
        ) from error
    return True


def building_path(directory: Path) -> Path:
    """Where the next store grows until it takes the place of ``directory``."""
    return directory.parent / f".{directory.name}.building"


def _old_path(directory: Path) -> Path:
    return directory.parent / f".{directory.name}.old"


def _unfinished_manifest(directory: Path) -> Path:
    return directory / (MANIFEST + TEMPORARY)


def can_use_unlocked(directory: Path) -> bool:
    """Whether a store can be used without its lock: a killed process has left nothing that must be
    cleared away, or this process may not do it."""
    if not is_store(directory):
        return False
    left = (building_path(directory), _old_path(directory), _unfinished_manifest(directory))
    return not any(map(os.path.lexists, left)) or not os.access(directory.parent, os.W_OK)


@contextmanager
def locked(directory: Path, *, timeout_s: float = math.inf) -> Iterator[None]:
    """Hold the one lock for changes to the store at ``directory``.

    Whoever may write to the directory above the store may use the lock, whoever has made it.

    Args:
        directory: Directory of the store.
        timeout_s: How long to wait for another process that has the lock.

    Raises:
        StoreError: Another process has it for longer, or this one may not use it.
    """
    path = directory.parent / f".{directory.name}.lock"
    try:
        if os.path.lexists(path):
            check_plain(path)
        lock = FileLock(path, mode=0o600 | os.stat(directory.parent).st_mode & 0o066)
        try:
            lock.acquire(timeout=min(timeout_s, 0.1))
        except Timeout:
            # To filelock a directory that takes no files looks like a lock that somebody has.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600))
            if timeout_s:
                _log.warning(
                    "another process builds the store at %s: waiting for it (it has %s)",
                    directory,
                    path,
                )
            lock.acquire(timeout=-1 if timeout_s == math.inf else timeout_s)
    except Timeout:
        raise StoreError(
            f"another process writes the store at {directory}: it has {path}"
        ) from None
    except (OSError, RuntimeError) as error:
        # A RuntimeError says that this thread has the lock already.
        raise StoreError(
            f"the store at {directory} cannot be locked: {error}: choose another directory, or let"
            f" the owner of {directory.parent} build the store or remove {path.name}"
        ) from error
    try:
        yield
    finally:
        lock.release()


def put_in_place(directory: Path) -> None:
    """Make the finished build the store, in place of an old one, which `make_room` has found to be
    replaceable. The lock must be held."""
    old = _old_path(directory)
    if os.path.lexists(directory):
        os.rename(directory, old)
    _rename(building_path(directory), directory)
    sync_path(directory.parent)
    if os.path.lexists(old):
        _remove(old)


def is_interrupted(directory: Path) -> bool:
    """Whether a process was killed between the two renames that replace a store."""
    return not os.path.lexists(directory) and _whole_path(directory) is not None


def _whole_path(directory: Path) -> Path | None:
    """The store that is to take the place of ``directory``, where that is missing."""
    building, old = building_path(directory), _old_path(directory)
    if _is_directory(building) and is_store(building):
        return building
    return old if _is_directory(old) else None


def finish_interrupted(directory: Path) -> Path:
    """Let a reader finish the replacement that a killed process left half done.

    Returns:
        Where to read the store: ``directory``, or what is to take its place where this process may
        not put it there.
    """
    if is_interrupted(directory):
        try:
            with locked(directory, timeout_s=_READER_WAIT_S):
                recover(directory)
        except (StoreError, OSError) as error:
            if whole := _whole_path(directory):
                _log.warning("reading the store at %s where it is: %s", whole, error)
                return whole
    return directory


def recover(directory: Path) -> None:
    """Finish, or else undo, what an interrupted process has begun. The lock must be held.

    Raises:
        StoreError: What is to take the place of the store is not ours.
    """
    if is_interrupted(directory) and (whole := _whole_path(directory)):
        _check_ours(whole)
        _rename(whole, directory)
    if _is_ours(_old_path(directory)):
        remove_tree(_old_path(directory))
    with suppress(OSError):  # It is not there, or this process may not remove it.
        _unfinished_manifest(directory).unlink()


def make_room(directory: Path) -> None:
    """Check, before a store is built, that nothing of others is in its way.

    Raises:
        StoreError: A build, an old store, or the store to be replaced is not ours, or this process
            may not remove it.
    """
    for path in (building_path(directory), _old_path(directory)):
        if os.path.lexists(path):
            _check_ours(path)
    if os.geteuid() and os.path.lexists(directory):
        _check_ours(directory)
        if not _may_remove(directory):
            raise StoreError(
                f"the store at {directory} belongs to another user, and this one may not replace"
                " it: let its owner do it, or choose another directory"
            )


def discard_build(directory: Path) -> None:
    """Remove a build that nobody goes on with, if it is ours. The lock must be held."""
    if _is_ours(building_path(directory)):
        remove_tree(building_path(directory))


def remove_tree(path: Path) -> None:
    """Remove a directory of ours. No link in it is followed.

    Raises:
        StoreError: It is not ours, or cannot be removed.
    """
    _check_ours(path)
    _remove(path)


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be removed: {error}: remove it by hand") from error


def _check_ours(path: Path) -> None:
    if not _is_ours(path):
        raise StoreError(
            f"{path} is in the way of a store, and is no directory of this user: remove it, let its"
            " owner open the store once, or choose another directory"
        )


def _is_ours(path: Path) -> bool:
    """Whether there is a directory that belongs to this user, or to the owner of the directory
    above it, who could put anything there."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    owners = (os.geteuid(), os.stat(path.parent).st_uid)
    return stat.S_ISDIR(status.st_mode) and status.st_uid in owners


def _may_remove(directory: Path) -> bool:
    """Whether this process may rename a directory and remove the files in it."""
    status, above = os.lstat(directory), os.stat(directory.parent)
    is_sticky = bool(above.st_mode & stat.S_ISVTX)
    if is_sticky and os.geteuid() not in (status.st_uid, above.st_uid):
        return False
    return os.access(directory, os.W_OK | os.X_OK)


def _is_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _rename(whole: Path, directory: Path) -> None:
    # A build keeps these until its manifest is written, so that a kill before that costs no row.
    for path in (whole / PLAN, whole / JOURNAL, *whole.glob(f"*{TEMPORARY}")):
        path.unlink(missing_ok=True)
    os.rename(whole, directory)
