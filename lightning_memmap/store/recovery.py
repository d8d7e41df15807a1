"""What lies beside a store: the lock, a build under way, an old store on its way out."""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from lightning_memmap.errors import StoreError
from lightning_memmap.store.journal import JOURNAL, PLAN
from lightning_memmap.store.manifest import MANIFEST

_log = logging.getLogger(__name__)


def is_store(directory: Path) -> bool:
    """Whether there is a manifest: the mark of a store, whole or damaged."""
    return os.path.lexists(directory / MANIFEST)


def building_path(directory: Path) -> Path:
    """Where the next store grows until it takes the place of ``directory``."""
    return directory.parent / f".{directory.name}.building"


def _old_path(directory: Path) -> Path:
    return directory.parent / f".{directory.name}.old"


@contextmanager
def locked(directory: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the one lock for changes to the store at ``directory``.

    Args:
        directory: Directory of the store.
        wait: Wait while another process has the lock.

    Raises:
        StoreError: Another process has it, and ``wait`` is False.
    """
    lock = FileLock(directory.parent / f".{directory.name}.lock")
    try:
        lock.acquire(timeout=0.1)
    except Timeout:
        if not wait:
            raise StoreError(f"another process writes the store at {directory}") from None
        _log.warning("another process builds the store at %s: waiting for it", directory)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def put_in_place(directory: Path) -> None:
    """Make the finished build the store, in place of an old one. The lock must be held."""
    if os.path.lexists(directory):
        os.rename(directory, _old_path(directory))
    _rename_build(directory)
    sync_directory(directory.parent)
    recover(directory)


def is_interrupted(directory: Path) -> bool:
    """Whether a process was killed between the two renames that replace a store."""
    return not os.path.lexists(directory) and (
        _old_path(directory).exists() or is_store(building_path(directory))
    )


def finish_interrupted(directory: Path) -> None:
    """Let a reader finish the replacement that a killed process left half done."""
    if is_interrupted(directory):
        with locked(directory):
            recover(directory)


def recover(directory: Path) -> None:
    """Finish, or else undo, a replacement that was interrupted. The lock must be held."""
    old = _old_path(directory)
    if is_interrupted(directory):
        if is_store(building_path(directory)):
            _rename_build(directory)
        else:
            os.rename(old, directory)
    if old.exists():
        shutil.rmtree(old)


def remove_tree(path: Path) -> None:
    """Remove a directory, and follow no link.

    Raises:
        StoreError: There is something else.
    """
    if path.is_symlink() or not path.is_dir():
        raise StoreError(f"{path} is in the way of a store, and is no directory: remove it")
    shutil.rmtree(path)


def _rename_build(directory: Path) -> None:
    building = building_path(directory)
    # Kept until the manifest was written, so that a kill before that costs no row. What a kill
    # after that leaves goes here.
    for name in (PLAN, JOURNAL):
        (building / name).unlink(missing_ok=True)
    os.rename(building, directory)


def sync_directory(directory: Path) -> None:
    """Bring a directory's entries to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
