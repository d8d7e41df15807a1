"""Private names of Lightning around processes, and of what a Trainer writes."""

import os
import sys
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import torch
from lightning.fabric.strategies.launchers import subprocess_script as fabric_script
from lightning.fabric.utilities import distributed
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.utilities import exceptions

from lightning_memmap._compat.required import REQUIRED, missing


class _NoLauncher:
    """Takes the place of a base class that a version of Lightning lacks; see `required`."""


#: The Trainer forwards its signals to the processes of this class of launchers, ``procs``.
ScriptLauncher: Any = getattr(subprocess_script, "_SubprocessScriptLauncher", _NoLauncher)


class _NeverRaised(Exception):  # noqa: N818
    pass


#: Ends a fit in which a Tuner tried something.
TunerExit: Any = getattr(exceptions, "_TunerExitException", _NeverRaised)


def script_command() -> Sequence[str]:
    """Return the command that runs this program again."""
    if (command := getattr(fabric_script, "_basic_subprocess_cmd", None)) is not None:
        return list(command())
    main = sys.modules["__main__"]
    if main.__spec__ is None:
        return [sys.executable, os.path.abspath(sys.argv[0]), *sys.argv[1:]]
    return [sys.executable, "-m", main.__spec__.name, *sys.argv[1:]]


def share_threads(num_processes: int) -> None:
    """Let torch use this process's part of the CPU, unless OMP_NUM_THREADS is set."""
    if (share := getattr(distributed, "_set_num_threads_if_needed", None)) is not None:
        share(num_processes)
    elif "OMP_NUM_THREADS" not in os.environ:
        num_threads = max(1, (os.cpu_count() or 1) // num_processes)
        torch.set_num_threads(num_threads)
        os.environ["OMP_NUM_THREADS"] = str(num_threads)


def move_outputs(trainer: Any, folder: str) -> None:
    """Redirect everything that a Trainer writes to folders of this name. Idempotent."""
    # None of these has a public setter.
    _move(trainer, "_default_root_dir", folder)
    for logger in trainer.loggers:
        if isinstance(logger, (CSVLogger, TensorBoardLogger)):
            _move(logger, "_root_dir", folder)
        if isinstance(logger, CSVLogger):
            # It has two copies of the directory, and looks for its next version in this one.
            _move(logger, "_save_dir", folder)
    for callback in trainer.callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            callback.dirpath = _below(callback.dirpath, folder)


def _move(owner: Any, name: str, folder: str) -> None:
    directory = getattr(owner, name, None)
    if directory is None:
        path = f"{type(owner).__module__}:{type(owner).__name__}.{name}"
        raise missing("memmap_independent", path, REQUIRED["memmap_independent"][0])
    setattr(owner, name, _below(directory, folder))


def _below(directory: str | os.PathLike[str], folder: str) -> str:
    """The path of a folder in a directory; the directory itself if it is in such a folder."""
    path = os.fspath(directory)
    return path if folder in PurePath(path).parts else os.path.join(path, folder)
