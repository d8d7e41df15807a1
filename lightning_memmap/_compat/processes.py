"""Private names of Lightning's strategies and launchers."""

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

#: Base of the launchers that run the stages of a Trainer.
Launcher = _Launcher
#: With this a Tuner ends the fit in which it tried something.
TunerExit = _TunerExitException


class DataParallelMesh(ModelParallelStrategy):
    """Lightning's strategy of a device mesh, with all processes on its data-parallel axis.

    By default this axis has the size of the number of nodes. It can be set only before Lightning
    counts the processes.
    """

    @override
    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        self._tensor_parallel_size = 1
        super().setup_environment()


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs this program again in other processes, to which the Trainer forwards its signals."""

    def __init__(self) -> None:
        super().__init__(LightningEnvironment(), num_processes=1, num_nodes=1)

    def run_again(self, variables: Mapping[str, str], output: IO[bytes]) -> "subprocess.Popen[Any]":
        """Run this program again, with the same arguments.

        Args:
            variables: Environment variables of the new process, in addition to those of this one.
            output: The file that it prints to, errors included.

        Returns:
            The new process, to which the Trainer forwards its signals from now on.
        """
        process = subprocess.Popen(
            _basic_subprocess_cmd(),
            env={**os.environ, **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        self.procs.append(process)
        return process

    def limit_threads(self, num_processes: int) -> None:
        """Limit the threads to the cores per process, unless ``OMP_NUM_THREADS`` is set.

        It sets the variable as well, which processes that are started later inherit.

        Args:
            num_processes: Processes that share the cores, at least 1.
        """
        _set_num_threads_if_needed(num_processes)


class LaunchedStrategy(Strategy):
    """A strategy that chooses the launcher of the Trainer's stages."""

    @abstractmethod
    def make_launcher(self) -> Launcher:
        """Make the launcher. The Trainer calls this once, after it has set all of its options.

        Returns:
            The launcher that runs every stage of the Trainer.

        Raises:
            ValueError: The options do not allow a launch, as the strategy describes.
        """

    @override
    def _configure_launcher(self) -> None:
        self._launcher = self.make_launcher()


def is_interactive() -> bool:
    """Whether this is a notebook or a prompt, whose program cannot be run again.

    Returns:
        True in a notebook, at a prompt, and in other interactive programs.
    """
    return _IS_INTERACTIVE


def folder_below(directory: str | os.PathLike[str], folder: str) -> str:
    """The path of a folder in a directory; the directory itself if it is in such a folder.

    Args:
        directory: A path or a URL.
        folder: Name of the folder.

    Returns:
        The path. The folder is not created.
    """
    path = os.fspath(directory)
    return path if folder in PurePath(path).parts else os.path.join(path, folder)


def move_trainer(trainer: Any, folder: str) -> None:
    """Redirect a Trainer, and its CSV and TensorBoard loggers, to a folder below.

    Args:
        trainer: The Trainer; what is redirected already stays as it is.
        folder: Name of the folder, below ``default_root_dir`` and each logger's ``save_dir``.
    """
    trainer._default_root_dir = folder_below(trainer._default_root_dir, folder)
    for logger in trainer.loggers:
        if isinstance(logger, (CSVLogger, TensorBoardLogger)):
            logger._root_dir = folder_below(logger._root_dir, folder)
        if isinstance(logger, CSVLogger):
            # It has two copies of the directory, and looks for its next version in this one.
            logger._save_dir = folder_below(logger._save_dir, folder)


def syncs_batch_norm(strategy: ParallelStrategy) -> bool:
    """Whether the Trainer has ``sync_batchnorm=True``.

    Args:
        strategy: The Trainer's strategy.

    Returns:
        True if batch norm layers are synchronized over processes.
    """
    return strategy._layer_sync is not None
