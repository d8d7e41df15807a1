"""What strategies have in common that use several devices from one process."""

import os
from collections.abc import Sequence
from typing import ClassVar

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from typing_extensions import override

from lightning_memmap.loading import SuperBatchLoader
from lightning_memmap.placement import DataTopology, check_device


class OneNode:
    """A strategy on one machine."""

    strategy_name: str
    #: What an error says of several machines; ``{}`` stands for the name of the strategy.
    several_nodes: ClassVar[str]

    @property
    def num_nodes(self) -> int:
        """One: the Trainer sets it, and more are refused."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        """Take over the Trainer's number of nodes.

        Args:
            num_nodes: Number of nodes.

        Raises:
            ValueError: There are several.
        """
        if num_nodes != 1:
            raise ValueError(
                f"num_nodes={num_nodes}: {self.several_nodes.format(self.strategy_name)}"
            )


class LocalDevices(OneNode, SingleDeviceStrategy):
    """One process on one machine, with the Trainer's devices as data devices, or devices given.

    Args:
        data_devices: Devices that hold shards, repeats allowed. By default all devices of the
            Trainer, the root device first.
        accelerator: As for every Lightning strategy.
        checkpoint_io: As for every Lightning strategy.
        precision_plugin: As for every Lightning strategy.

    Raises:
        ValueError: A device does not exist, none is given, the Trainer asks for more than one node,
            or the program was started in several processes.
    """

    several_nodes = (
        "{} is one process on one machine; use memmap_superbatch_ddp, or Lightning's ddp, for"
        " several"
    )

    def __init__(
        self,
        data_devices: Sequence[str | torch.device] | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin
        )
        if data_devices is not None and not data_devices:
            raise ValueError("data_devices=[]: name at least one device, or leave it out")
        self._explicit = None if data_devices is None else [_device(name) for name in data_devices]
        self._parallel_devices: list[torch.device] = []
        self._cluster_environment: ClusterEnvironment | None = None

    @property
    def cluster_environment(self) -> ClusterEnvironment | None:
        """What started this process, as the Trainer found out; it sets it."""
        return self._cluster_environment

    @cluster_environment.setter
    def cluster_environment(self, environment: ClusterEnvironment) -> None:
        """Take over what the Trainer found.

        Args:
            environment: The environment of this process.

        Raises:
            ValueError: The program was started in several processes.
        """
        if was_started_in_several(environment):
            raise ValueError(
                f"strategy={self.strategy_name!r} is one process, and this program was started in"
                " several, by torchrun, srun or another Trainer: each would train all rows by"
                " itself. Start it once, or use strategy='memmap_superbatch_ddp', which trains one"
                " model in all of them"
            )
        self._cluster_environment = environment

    @property
    @override
    def root_device(self) -> torch.device:
        return self._parallel_devices[0] if self._parallel_devices else super().root_device

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The devices of the Trainer; it sets them. The first one is the root device."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        """Take over the devices of the Trainer.

        Args:
            devices: The devices, the root device first.

        Raises:
            ValueError: As of `check_devices`.
        """
        self._parallel_devices = list(devices)
        self.check_devices()

    def check_devices(self) -> None:
        """Check the data devices, now that those of the Trainer are known.

        Raises:
            ValueError: One does not exist on this machine.
        """
        for device in self.data_devices:
            check_device(device)

    @property
    def data_devices(self) -> tuple[torch.device, ...]:
        """The devices that hold shards and serve batches."""
        return tuple(self._parallel_devices if self._explicit is None else self._explicit)

    @property
    def data_topology(self) -> DataTopology:
        """Which devices hold the data; their batches stay apart."""
        return DataTopology(self.data_devices)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        # A loader that was made without a data module.
        if isinstance(dataloader, SuperBatchLoader) and dataloader.device is None:
            dataloader = dataloader.placed(self.data_topology)
        return super().process_dataloader(dataloader)


def was_started_in_several(environment: ClusterEnvironment) -> bool:
    """Whether this process is one of several that were started to train together.

    Lightning finds the environment: an interactive shell of Slurm, for one, is not Slurm's.

    Args:
        environment: As the Trainer has found it.

    Returns:
        True under torchrun, srun and the like with more than one process, and in a process that
        another Trainer started.
    """
    if not isinstance(environment, LightningEnvironment):
        return environment.world_size() > 1
    # This one counts only the processes that it starts itself; those that others started show in
    # its rank. A Trainer that has started processes removes their number at its end, but not the
    # rank.
    return environment.creates_processes_externally and (
        environment.local_rank() > 0 or int(os.environ.get("WORLD_SIZE", "1")) > 1
    )


def _device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"data_devices: {name!r} is no device: {error}") from error
    # "cuda" and "cuda:0" are one device, and are compared.
    if device.type not in ("cpu", "meta") and device.index is None:
        device = torch.device(device.type, 0)
    return device
