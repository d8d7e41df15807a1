"""What lies beside a store: the lock, a build in progress, an old store that is being replaced.

Other users may have put something there. A link is never followed. A directory is called ours if it
belongs to this user, or to the owner of the directory above it, who could put anything there.
Anything else is neither removed nor made the store.
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
from lightning_memmap.store.build_key import KEY
from lightning_memmap.store.files import TEMPORARY, check_plain, sync_path
from lightning_memmap.store.journal import JOURNAL
from lightning_memmap.store.manifest import MANIFEST

_log = logging.getLogger(__name__)

#: How long a reader waits for another process to finish replacing a store, which takes two renames.
_READER_WAIT_S = 10.0


def is_store(directory: Path) -> bool:
    """Whether a directory has a manifest, as every store has, whole or damaged.

    Args:
        directory: The directory, which need not exist.

    Returns:
        True if there is a manifest, readable or not.

    Raises:
        StoreError: This process may not look into the directory.
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


def stores_within(directory: Path) -> list[str]:
    """The stores that lie in a directory, such as those of several datasets.

    Args:
        directory: The directory, which need not exist.

    Returns:
        Their names in order.

    Raises:
        StoreError: This process may not look into one of them.
    """
    found = sorted(child.name for child in directory.iterdir()) if directory.is_dir() else []
    return [name for name in found if not name.startswith(".") and is_store(directory / name)]


def no_store_error(directory: Path, argument: str) -> StoreError:
    """Make the error for a place that has something else than a store in it.

    Args:
        directory: The place.
        argument: What chooses it.

    Returns:
        The error, to be raised by the caller.
    """
    if names := stores_within(directory):
        return StoreError(
            f"{directory} exists and is not a store, but has stores in it ({', '.join(names)}):"
            f" choose another {argument}"
        )
    return StoreError(
        f"{directory} exists and is not a store: choose another {argument}, or remove it"
    )


def building_path(directory: Path) -> Path:
    """Return the directory in which the next store is built, until it replaces ``directory``.

    Args:
        directory: Directory of the store.

    Returns:
        A hidden path beside the store.
    """
    return directory.parent / f".{directory.name}.building"


def parts_path(directory: Path) -> Path:
    """Return the directory in which a store is built in parts.

    No other build of the store touches it: the processes that write there come and go.

    Args:
        directory: Directory of the store.

    Returns:
        A hidden path beside the store.
    """
    return directory.parent / f".{directory.name}.parts"


def _old_path(directory: Path) -> Path:
    return directory.parent / f".{directory.name}.old"


def _unfinished_manifest(directory: Path) -> Path:
    return directory / (MANIFEST + TEMPORARY)


def can_use_unlocked(directory: Path) -> bool:
    """Whether a store can be used without its lock.

    It can if a killed process has left nothing that must be cleared away, or if this process may
    not clear it away.

    Args:
        directory: Directory of the store.

    Returns:
        True if there is a store that needs no lock.

    Raises:
        StoreError: This process may not look into the directory.
    """
    if not is_store(directory):
        return False
    left = (building_path(directory), _old_path(directory), _unfinished_manifest(directory))
    return not any(map(os.path.lexists, left)) or not os.access(directory.parent, os.W_OK)


def can_write_manifest(directory: Path) -> bool:
    """Whether this process may take the lock of a store and replace its manifest.

    Args:
        directory: Directory of the store.
    """
    return os.access(directory, os.W_OK) and os.access(directory.parent, os.W_OK)


@contextmanager
def locked(directory: Path, *, timeout_s: float = math.inf) -> Iterator[None]:
    """Hold the lock for changes to the store at ``directory``.

    What a killed process has left half done is finished or undone first. Everyone who may write to
    the directory above the store may use the lock, no matter who made it.

    Args:
        directory: Directory of the store.
        timeout_s: Seconds to wait for another process that has the lock.

    Yields:
        Nothing; inside, this process has the lock.

    Raises:
        StoreError: Another process keeps the lock for longer, or this process may not use it; or
            the directory that is to replace the store is not ours, or an old store cannot be
            removed.
        OSError: A directory cannot be renamed.
    """
    path = directory.parent / f".{directory.name}.lock"
    try:
        if os.path.lexists(path):
            check_plain(path)
        lock = FileLock(path, mode=0o600 | os.stat(directory.parent).st_mode & 0o066)
        try:
            lock.acquire(timeout=min(timeout_s, 0.1))
        except Timeout:
            # filelock cannot tell a directory without write permission from a lock that is held.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600))
            if timeout_s:
                _log.warning(
                    "another process is building the store at %s: waiting for it (it holds %s)",
                    directory,
                    path,
                )
            lock.acquire(timeout=-1 if timeout_s == math.inf else timeout_s)
    except Timeout:
        raise StoreError(
            f"another process is writing the store at {directory}: it holds {path}; wait for it"
        ) from None
    except (OSError, RuntimeError) as error:
        # filelock raises RuntimeError where this thread has the lock already.
        raise StoreError(
            f"the store at {directory} cannot be locked: {error}: choose another directory, or let"
            f" the owner of {directory.parent} build the store or remove {path.name}"
        ) from error
    try:
        _recover(directory)
        yield
    finally:
        lock.release()


def put_in_place(directory: Path, whole: Path) -> None:
    """Move a finished build to the place of the store. The lock must be held.

    A store that is there is moved aside and then removed; `make_room` has checked that this is
    allowed.

    Args:
        directory: Directory of the store.
        whole: The directory of the build, beside it.

    Raises:
        OSError: A directory cannot be renamed.
        StoreError: The old store cannot be removed. The new one is in place.
    """
    old = _old_path(directory)
    if os.path.lexists(directory):
        os.rename(directory, old)
    _rename(whole, directory)
    sync_path(directory.parent)
    if os.path.lexists(old):
        _remove(old)


def is_interrupted(directory: Path) -> bool:
    """Whether a process was killed between the two renames that replace a store.

    Args:
        directory: Directory of the store.

    Returns:
        True if no store is left under its own name, and one is there under another.

    Raises:
        StoreError: This process may not look into a directory beside it.
    """
    return not os.path.lexists(directory) and _whole_path(directory) is not None


def _whole_path(directory: Path) -> Path | None:
    """The store that is to take the place of ``directory``, where that is missing."""
    building, old = building_path(directory), _old_path(directory)
    if _is_directory(building) and is_store(building):
        return building
    return old if _is_directory(old) else None


def finish_interrupted(directory: Path) -> Path:
    """Finish, for a reader, a replacement that a killed process has left half done.

    Args:
        directory: Directory of the store.

    Returns:
        Where to read the store: ``directory``, or where this process may not rename it, the
        directory that is to replace it.

    Raises:
        StoreError: This process may not look into a directory beside the store.
    """
    if is_interrupted(directory):
        try:
            with locked(directory, timeout_s=_READER_WAIT_S):
                pass  # That was all.
        except (StoreError, OSError) as error:
            if whole := _whole_path(directory):
                _log.warning("reading the store at %s where it is: %s", whole, error)
                return whole
    return directory


def _recover(directory: Path) -> None:
    """Finish or undo what a killed process has left half done. The lock must be held."""
    if is_interrupted(directory) and (whole := _whole_path(directory)):
        check_ours(whole)
        _rename(whole, directory)
    if _is_ours(_old_path(directory)):
        remove_tree(_old_path(directory))
    with suppress(OSError):  # It is not there, or this process may not remove it.
        _unfinished_manifest(directory).unlink()


def make_room(directory: Path) -> None:
    """Check, before a store is built, that everything in its way is ours and may be removed.

    Args:
        directory: Directory of the store.

    Raises:
        StoreError: A build, an old store, or the store to be replaced is not ours, or this process
            may not remove it.
    """
    for path in (building_path(directory), _old_path(directory)):
        if os.path.lexists(path):
            check_ours(path)
    if os.geteuid() and os.path.lexists(directory):
        check_ours(directory)
        if not _may_remove(directory):
            raise StoreError(
                f"the store at {directory} belongs to another user, and this one may not replace"
                " it: let its owner do it, or choose another directory"
            )


def discard_build(directory: Path) -> None:
    """Remove an interrupted build that is not needed, if it is ours. The lock must be held.

    Args:
        directory: Directory of the store, beside which the build is.

    Raises:
        StoreError: The build cannot be removed.
    """
    if _is_ours(building_path(directory)):
        remove_tree(building_path(directory))


def remove_tree(path: Path) -> None:
    """Remove a directory that is ours. No link in it is followed.

    Args:
        path: The directory.

    Raises:
        StoreError: It is not ours, or cannot be removed.
    """
    check_ours(path)
    _remove(path)


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be removed: {error}: remove it by hand") from error


def check_ours(path: Path) -> None:
    """Check that a directory is ours.

    Args:
        path: The directory.

    Raises:
        StoreError: It is not.
    """
    if not _is_ours(path):
        raise StoreError(
            f"{path} is in the way of a store, and is not a directory that belongs to this user:"
            " remove it, let its owner open the store once, or choose another directory"
        )


def _is_ours(path: Path) -> bool:
    """Whether there is a directory, and it is ours."""
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
    return os.path.isdir(path) and not os.path.islink(path)


def _rename(whole: Path, directory: Path) -> None:
    # A build keeps these until its manifest is written, so that no row is lost by a kill before.
    for path in (whole / KEY, whole / JOURNAL, *whole.glob(f"*{TEMPORARY}")):
        path.unlink(missing_ok=True)
    os.rename(whole, directory)
