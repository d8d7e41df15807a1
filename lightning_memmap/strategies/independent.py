"""``memmap_independent``: each device trains a model of its own, and none waits for another."""

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from typing_extensions import override

from lightning_memmap._compat.processes import LaunchedStrategy
from lightning_memmap.placement import check_device
from lightning_memmap.strategies.members.launcher import (
    MEMBER_VARIABLE,
    MemberLauncher,
    member_of_this_process,
)
from lightning_memmap.strategies.members.results import MemberResults


class IndependentStrategy(LaunchedStrategy, SingleDeviceStrategy):
    """Trains members that exchange nothing: the folds of a k-fold, an ensemble, a model per site.

    The program runs once for each member, each in a process of its own on a device of its own. To
    the Trainer each is alone: it has its own optimizers, checkpoints, loggers and early stopping,
    and its weights are those of a lone run, bit for bit. What it is to train on, and with which
    model, the program decides by ``member``; a `MemmapDataModule` takes its fold or part by it.

    What a Trainer writes goes to a folder ``member_<m>`` for each member: below its
    ``default_root_dir``, the ``save_dir`` of CSV and TensorBoard loggers, and the ``dirpath`` of a
    ``ModelCheckpoint``. The process that the user started is member 0. At the end of each of its
    stages it waits until the others have come to the end of theirs, and prints one table. A member
    that fails does not stop the others.

    Args:
        num_members: Members; by default one a device. Where there are more, they share the devices
            in turn: member ``m`` has device ``m % devices``.
        raise_on_failure: Whether member 0 raises an error, once all others have ended, where one
            of them has failed. Otherwise it goes on, and ``results`` says who failed.
        accelerator: As for every Lightning strategy.
        checkpoint_io: As for every Lightning strategy.
        precision_plugin: As for every Lightning strategy.

    Raises:
        ValueError: ``num_members`` is below 1 or below the number of devices, the environment
            variable ``LIGHTNING_MEMMAP_MEMBER`` names no member, or the Trainer asks for more than
            one node or was started in several processes.
    """

    strategy_name = "memmap_independent"

    def __init__(
        self,
        num_members: int | None = None,
        raise_on_failure: bool = True,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin
        )
        if num_members is not None and num_members < 1:
            raise ValueError(
                f"num_members={num_members}: at least 1; leave it out for one a device"
            )
        #: Set by the Trainer.
        self.cluster_environment: ClusterEnvironment | None = None
        self._count = num_members
        self._raise_on_failure = raise_on_failure
        self._devices: list[torch.device] = []
        self._members: MemberLauncher | None = None

    @property
    def member(self) -> int:
        """Which member this process trains, counted from 0. Known before there is a Trainer."""
        return member_of_this_process() or 0

    @property
    def num_members(self) -> int:
        """Members of the run; known once there is a Trainer, or where it was given."""
        return self._count or len(self._devices) or 1

    @property
    def results(self) -> MemberResults | None:
        """How the latest stage ended for all members: in the process that the user started, where
        there are several members. None in all others."""
        return None if self._members is None else self._members.results

    @property
    def member_dir(self) -> Path:
        """Where this member's results are; also a place for what else it wants to keep.

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
        return self._devices[self.member % len(self._devices)]

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The devices of the Trainer, over all members; it sets them."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        self._devices = list(devices)
        if self._count is not None and self._count < len(devices):
            raise ValueError(
                f"num_members={self._count} with Trainer(devices={len(devices)}): some devices"
                f" would do nothing; use devices={self._count}"
            )
        if self.member >= self.num_members:
            raise ValueError(
                f"{MEMBER_VARIABLE}={self.member}: there are {self.num_members} members, counted"
                " from 0"
            )
        check_device(self.root_device)

    @property
    def num_nodes(self) -> int:
        """One: the Trainer sets it, and more are refused."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes != 1:
            raise ValueError(
                f"num_nodes={num_nodes}: members exchange nothing, so that each machine can run"
                f" some of them by itself: start the program there with {MEMBER_VARIABLE}=<member>"
                " for each"
            )

    @override
    def make_launcher(self) -> MemberLauncher:
        environment = self.cluster_environment
        assert environment is not None
        if isinstance(environment, LightningEnvironment):
            started = environment.creates_processes_externally
        else:
            started = environment.world_size() > 1
        if started:
            raise ValueError(
                "strategy='memmap_independent' starts a process for each member itself, and this"
                " program was already started in several (by torchrun, srun or another Trainer):"
                f" start it once, or once for each member with {MEMBER_VARIABLE}=<member>"
            )
        self._members = MemberLauncher(self.num_members, self._raise_on_failure)
        return self._members

    @override
    def setup_environment(self) -> None:
        # The module may have brought callbacks of its own.
        module = self.lightning_module
        if self._members is not None and module is not None:
            self._members.move_outputs(module.trainer)
        super().setup_environment()

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint; ``{member}`` in its path stands for the number of this member."""
        path = str(checkpoint_path).replace("{member}", str(self.member))
        return super().load_checkpoint(path, weights_only)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._members is not None:
            self._members.on_exception(exception)
