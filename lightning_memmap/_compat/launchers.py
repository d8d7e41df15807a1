"""Private names of Lightning around processes, and around the outputs of a Trainer."""

import os
import sys
from pathlib import PurePath
from typing import Any

import torch
from lightning.fabric.utilities import distributed
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.utilities import exceptions

from lightning_memmap._compat.required import REQUIRED, missing


class _NoLauncher:
    """A stand-in for a base class that a version of Lightning lacks; see `required`."""


#: The Trainer forwards its signals to the processes of this class of launchers, ``procs``.
ScriptLauncher: Any = getattr(subprocess_script, "_SubprocessScriptLauncher", _NoLauncher)


class _NeverRaised(Exception):  # noqa: N818
    pass


#: Ends a fit in which a Tuner tried something.
TunerExit: Any = getattr(exceptions, "_TunerExitException", _NeverRaised)


def _current_directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # It was removed.
        return None


#: The directory in which the program started, unless it changed it before this import.
_BEGAN_IN = _current_directory()


def script_command() -> tuple[list[str], str | None]:
    """Return the command that runs this program again, and the directory to run it in."""
    main = sys.modules["__main__"]
    if main.__spec__ is None:
        # The path in sys.argv is relative to where the program began, unlike this one.
        script = getattr(main, "__file__", None) or sys.argv[0]
        program = [os.path.join(_BEGAN_IN or "", script)]
    else:
        program = ["-m", main.__spec__.name]
    return [sys.executable, *program, *sys.argv[1:]], _BEGAN_IN


def share_threads(num_processes: int) -> None:
    """Limit torch to this process's share of the CPU, unless OMP_NUM_THREADS is set."""
    if (share := getattr(distributed, "_set_num_threads_if_needed", None)) is not None:
        share(num_processes)
    elif "OMP_NUM_THREADS" not in os.environ:
        num_threads = max(1, (os.cpu_count() or 1) // num_processes)
        torch.set_num_threads(num_threads)
        os.environ["OMP_NUM_THREADS"] = str(num_threads)


def move_outputs(trainer: Any, folder: str) -> None:
    """Redirect everything that a Trainer writes to folders of this name. Idempotent."""
    # There are no public setters.
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
    """Return the path of a folder in a directory, or a directory that is in such a folder."""
    path = os.fspath(directory)
    return path if folder in PurePath(path).parts else os.path.join(path, folder)
