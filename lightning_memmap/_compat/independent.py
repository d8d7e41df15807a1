"""Private names of Lightning for members: their launcher, and the outputs of their Trainers."""

import os
import sys
from pathlib import PurePath
from typing import Any

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
BEGAN_IN = _current_directory()


def script_command() -> list[str]:
    """Return the command that runs this program again, in the directory `BEGAN_IN`."""
    main = sys.modules["__main__"]
    if main.__spec__ is None:
        # The path in sys.argv is relative to where the program began, unlike this one.
        script = getattr(main, "__file__", None) or sys.argv[0]
        program = [os.path.join(BEGAN_IN or "", script)]
    else:
        program = ["-m", main.__spec__.name]
    return [sys.executable, *program, *sys.argv[1:]]


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
