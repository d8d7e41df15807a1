"""``memmap_independent``: each device trains its own model, and none waits for another."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from typing_extensions import override

from lightning_memmap._compat.processes import LaunchedStrategy, is_interactive
from lightning_memmap.placement import check_device
from lightning_memmap.strategies._base import OneNode, started_in_several
from lightning_memmap.strategies.members.launcher import MEMBER_VARIABLE, member_of_this_process
from lightning_memmap.strategies.members.processes import ProcessLauncher
from lightning_memmap.strategies.members.results import MemberResults
from lightning_memmap.strategies.members.sequential import InProcessLauncher, SequentialLauncher


class IndependentStrategy(OneNode, LaunchedStrategy, SingleDeviceStrategy):
    """Trains members that exchange nothing: the folds of a k-fold, an ensemble, a model per site.

    The program runs once for each member, in its own process on its own device. Each member has
    its own Trainer with its own optimizers, checkpoints, loggers and early stopping, and its
    weights are bit for bit those of a run by itself. The program chooses its data and its model by
    ``member``; a `MemmapDataModule` chooses the member's fold or subset by it.

    What a Trainer writes goes to a folder ``member_<m>`` for each member: below its
    ``default_root_dir``, the ``save_dir`` of CSV and TensorBoard loggers, and the ``dirpath`` of a
    ``ModelCheckpoint``. The process that the user started is member 0. At the end of each stage it
    waits until the others have completed theirs, and prints one table. A member that fails does
    not stop the others.

    With ``processes=False`` the members run sequentially in this process, one member's whole stage
    after the other's. Each but member 0 has its own copies of the Trainer, the module and the
    data, made as the first stage begins. What depends on ``member`` then belongs into hooks:
    ``configure_model``, ``setup``, ``configure_optimizers``.

    Args:
        num_members: Number of members; by default one per device. Where there are more than
            devices, member ``m`` has device ``m % devices``.
        raise_on_failure: Whether member 0 raises an error, once all others have ended, if one
            of them failed. Otherwise it continues, and ``results`` says which ones failed.
        processes: Whether each member has its own process. Otherwise they run sequentially in this
            one: in a notebook, under a debugger, or for members that train for seconds.
        accelerator: As for every Lightning strategy.
        checkpoint_io: As for every Lightning strategy.
        precision_plugin: As for every Lightning strategy.

    Raises:
        ValueError: ``num_members`` is below 1 or below the number of devices, the environment
            variable ``LIGHTNING_MEMMAP_MEMBER`` is not a member, the Trainer asks for more than
            one node, the program was started in several processes, or it is a notebook and
            ``processes`` is not False.
        UnsuitableModuleError: With ``processes=False``, something cannot be copied for each member.
        MemberError: With ``raise_on_failure``, at the end of a stage in which a member failed.
    """

    strategy_name = "memmap_independent"
    #: Members have no common result that could be compared with that of another strategy.
    trains_one_model = False
    several_nodes = (
        "members exchange nothing, so each machine can run some of them by itself: start the"
        f" program there with {MEMBER_VARIABLE}=<member> for each"
    )

    def __init__(
        self,
        num_members: int | None = None,
        raise_on_failure: bool = True,
        processes: bool = True,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin
        )
        if num_members is not None and num_members < 1:
            raise ValueError(
                f"num_members={num_members}: at least 1; leave it out for one per device"
            )
        #: Set by the Trainer.
        self.cluster_environment: ClusterEnvironment | None = None
        self._count = num_members
        self._raise_on_failure = raise_on_failure
        self._processes = processes
        self._devices: list[torch.device] = []
        self._members: ProcessLauncher | InProcessLauncher | None = None

    @property
    def member(self) -> int:
        """The member that trains, counted from 0.

        Known before there is a Trainer if each member has its own process; otherwise in the hooks
        of a stage, and for member 0 afterwards.

        Raises:
            RuntimeError: The members run sequentially in this process, and no stage has begun.
            ValueError: The environment variable ``LIGHTNING_MEMMAP_MEMBER`` is not a number.
        """
        if self._processes or member_of_this_process() is not None:
            return self._number
        if self._members is None or self._members.folder is None:
            raise RuntimeError(
                "processes=False: strategy.member is known once a stage has begun, since all"
                " members begin as copies of one Trainer, module and data. Use"
                " self.trainer.strategy.member in configure_model, setup or configure_optimizers;"
                f" or leave out processes=False; or train one member alone with {MEMBER_VARIABLE}"
            )
        return self._number

    @property
    def _number(self) -> int:
        if self._members is not None:
            return self._members.member
        return member_of_this_process() or 0

    @property
    def num_processes(self) -> int:
        """Processes of the run on this machine."""
        return self.num_members if self._processes else 1

    @property
    def num_members(self) -> int:
        """Members of the run: as given, or else the Trainer's devices."""
        return self._count or len(self._devices) or 1

    @property
    def results(self) -> MemberResults | None:
        """How the latest stage ended for all members, in the process that the user started.

        None in all other processes, and before the end of a stage.
        """
        return None if self._members is None else self._members.results

    @property
    def trainers(self) -> dict[int, L.Trainer]:
        """With ``processes=False``, the Trainers of all members that have not failed, by member.

        They exist from the first stage on. Each has its own ``lightning_module``; member 0's is the
        program's. Empty with ``processes=True``.
        """
        return {} if self._members is None else self._members.trainers

    @property
    def member_dir(self) -> Path:
        """The directory of this member's results, and of anything else that it wants to keep.

        Raises:
            RuntimeError: No stage has begun.
        """
        folder = None if self._members is None else self._members.folder
        if folder is None:
            raise RuntimeError("member_dir is known once the Trainer has begun a stage")
        return folder

    @property
    @override
    def root_device(self) -> torch.device:
        if not self._devices:
            return super().root_device
        return self._devices[self._number % len(self._devices)]

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The devices of all members; the Trainer sets them."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        """Take over the devices of the Trainer.

        Args:
            devices: The devices; member ``m`` has device ``m % len(devices)``.

        Raises:
            ValueError: There are fewer members than devices, the environment variable
                ``LIGHTNING_MEMMAP_MEMBER`` is not a member, or a device that this process uses does
                not exist.
        """
        self._devices = list(devices)
        if self._count is not None and self._count < len(devices):
            raise ValueError(
                f"num_members={self._count} with Trainer(devices={len(devices)}): some devices"
                f" would be idle; use devices={self._count}"
            )
        if self._number >= self.num_members:
            raise ValueError(
                f"{MEMBER_VARIABLE}={self._number}: there are {self.num_members} members, counted"
                " from 0"
            )
        for device in [self.root_device] if self._processes else devices:
            check_device(device)

    @override
    def make_launcher(self) -> ProcessLauncher | SequentialLauncher:
        environment = self.cluster_environment
        # An earlier Trainer may have set a rank, which processes started from here would inherit.
        has_rank = isinstance(environment, LightningEnvironment) and (
            environment.creates_processes_externally
        )
        if has_rank or (environment is not None and started_in_several(environment)):
            raise ValueError(
                "strategy='memmap_independent' starts the processes of its members itself, and this"
                " program was already started in several (by torchrun, srun or another Trainer):"
                f" start it once, or once for each member with {MEMBER_VARIABLE}=<member>; to train"
                " one model in all of them, use strategy='memmap_superbatch_ddp'"
            )
        launcher: ProcessLauncher | SequentialLauncher
        if not self._processes:
            launcher = SequentialLauncher(self.num_members, self._raise_on_failure)
        elif is_interactive() and self.num_members > 1 and member_of_this_process() is None:
            raise ValueError(
                "strategy='memmap_independent' runs the program again in a process for each member,"
                " and a notebook cannot be run again: run the members sequentially, with"
                f" IndependentStrategy(num_members={self.num_members}, processes=False)"
            )
        else:
            launcher = ProcessLauncher(self.num_members, self._raise_on_failure)
        self._members = launcher
        return launcher

    @override
    def setup_environment(self) -> None:
        # configure_callbacks of the module may have added callbacks.
        module = self.lightning_module
        if self._members is not None and module is not None:
            self._members.move_outputs(module.trainer)
        super().setup_environment()

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint; ``{member}`` in its path is replaced by the number of this member."""
        path = str(checkpoint_path).replace("{member}", str(self._number))
        return super().load_checkpoint(path, weights_only)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._members is not None:
            self._members.on_exception(exception)
