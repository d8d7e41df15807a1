"""Checkpoints that replace others atomically: written next to their path, then renamed."""

import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.plugins.io import TorchCheckpointIO
from typing_extensions import override

from lightning_memmap._compat.checkpoints import METADATA
from lightning_memmap.ranks import is_rank_zero
from lightning_memmap.store.files import sync_path

# From <fcntl.h> and <stdio.h>.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
#: The kernel or the file system cannot exchange two names.
_NO_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY}


class ReplacingCheckpointIO(TorchCheckpointIO):
    """Saves a checkpoint to a local path completely or not at all, whenever the process ends.

    Lightning writes to the directory for temporary files. If that is another file system, it then
    copies the file over the checkpoint that it replaces.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        target = local_path(path)
        if target is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with replaced(target) as partial, open(partial, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())

    @override
    def remove_checkpoint(self, path: Any) -> None:
        target = local_path(path)
        if target is None or not is_checkpoint_folder(target):
            super().remove_checkpoint(path)
            return
        # A folder that is half removed could be mistaken for a checkpoint.
        partial = _partial_path(target)
        remove_path(partial)
        os.rename(target, partial)
        remove_path(partial)


@contextmanager
def replaced(
    target: Path, run: Callable[[Callable[[], None]], None] = lambda action: action()
) -> Iterator[Path]:
    """Yield a path to write a checkpoint to, and then rename it to ``target``; remove it on errors.

    Args:
        target: The path of the checkpoint. An older one there stays until the new one is complete.
        run: Runs each change of files, if one of several processes makes them.
    """
    partial = _partial_path(target)
    run(lambda: check_replaceable(target))
    run(lambda: remove_path(partial))
    try:
        yield partial
        run(lambda: _put_in_place(partial, target))
    except BaseException:
        if is_rank_zero():
            with suppress(OSError):
                remove_path(partial)
        raise


def _partial_path(target: Path) -> Path:
    """Return where a checkpoint is written until it is complete. A later attempt reuses it."""
    return target.with_name(f".{target.name}.part")


def is_checkpoint_folder(path: Path) -> bool:
    """Check whether a path is a checkpoint in a folder, and not any other folder."""
    return path.is_dir() and not path.is_symlink() and (path / METADATA).is_file()


def check_replaceable(target: Path) -> None:
    """Raise IsADirectoryError where a checkpoint would replace a folder that isn't one."""
    if target.is_dir() and not is_checkpoint_folder(target) and any(target.iterdir()):
        raise IsADirectoryError(
            errno.EISDIR, "not a checkpoint: move it, or choose another path", str(target)
        )


def _put_in_place(partial: Path, target: Path) -> None:
    """Rename a complete checkpoint to its path. An older one there is removed afterwards."""
    if partial.is_dir():
        for path in (*partial.iterdir(), partial):
            sync_path(path)
    if not os.path.lexists(target) or not (partial.is_dir() or target.is_dir()):
        os.replace(partial, target)
    elif _exchange(partial, target):
        remove_path(partial)
    else:
        # For a moment no checkpoint has the name, but the old one is kept.
        old = target.with_name(f".{target.name}.old")
        remove_path(old)
        os.rename(target, old)
        os.rename(partial, target)
        remove_path(old)
    sync_path(target.parent)


def remove_path(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two files or folders atomically; return False if not supported."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    names = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second))
    if function(*names, ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    if (error := ctypes.get_errno()) in _NO_EXCHANGE:
        return False
    raise OSError(error, os.strerror(error), str(second))


def local_path(path: Any) -> Path | None:
    """Return the path of a local file; None for the URL of another file system."""
    file_system, local = fsspec.core.url_to_fs(str(path))
    return Path(local) if isinstance(file_system, LocalFileSystem) else None
