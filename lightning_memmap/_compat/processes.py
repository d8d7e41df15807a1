"""Names of Lightning's strategies and launchers."""

import os
import subprocess
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import PurePath
from typing import IO, Any

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy, Strategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import _TunerExitException
from typing_extensions import override

#: What runs the stages of a Trainer.
Launcher = _Launcher
#: By this a Tuner ends the fit that it has tried something in.
TunerExit = _TunerExitException


class DataParallelMesh(ModelParallelStrategy):
    """Lightning's strategy of a device mesh, with all processes on its data-parallel axis.

    By default it takes as many as there are nodes, and can be told only before they are counted.
    """

    @override
    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        self._tensor_parallel_size = 1
        super().setup_environment()


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs this program again in other processes, to which the Trainer hands its signals on."""

    def __init__(self) -> None:
        super().__init__(LightningEnvironment(), num_processes=1, num_nodes=1)

    def run_again(self, variables: Mapping[str, str], output: IO[bytes]) -> "subprocess.Popen[Any]":
        """Run this program again, with the same arguments.

        Args:
            variables: Environment variables of the new process, beside those of this one.
            output: Where it prints to.
        """
        process = subprocess.Popen(
            _basic_subprocess_cmd(),
            env={**os.environ, **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        self.procs.append(process)
        return process

    def share_threads(self, num_processes: int) -> None:
        """Give this process its part of the CPU's cores, unless ``OMP_NUM_THREADS`` is set."""
        _set_num_threads_if_needed(num_processes)


class LaunchedStrategy(Strategy):
    """A strategy that says which launcher runs the Trainer's stages."""

    @abstractmethod
    def make_launcher(self) -> Launcher:
        """The launcher; the Trainer asks once, after it has set all that it knows."""

    @override
    def _configure_launcher(self) -> None:
        self._launcher = self.make_launcher()


def is_interactive() -> bool:
    """Whether this is a notebook or a prompt, whose program cannot be run again."""
    return _IS_INTERACTIVE


def folder_below(directory: str | os.PathLike[str], folder: str) -> str:
    """A folder of a directory; the directory itself where that is in such a folder."""
    path = os.fspath(directory)
    return path if folder in PurePath(path).parts else os.path.join(path, folder)


def move_trainer(trainer: Any, folder: str) -> None:
    """Let a Trainer, and the loggers of it that write versions to a directory, write to a folder
    below."""
    trainer._default_root_dir = folder_below(trainer._default_root_dir, folder)
    for logger in trainer.loggers:
        if isinstance(logger, (CSVLogger, TensorBoardLogger)):
            logger._root_dir = folder_below(logger._root_dir, folder)
        if isinstance(logger, CSVLogger):
            # This one keeps the directory twice, and finds its next version by the other.
            logger._save_dir = folder_below(logger._save_dir, folder)


def syncs_batch_norm(strategy: ParallelStrategy) -> bool:
    """Whether the Trainer has ``sync_batchnorm=True``."""
    return strategy._layer_sync is not None
