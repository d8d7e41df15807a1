"""Strategies of one process on one machine."""

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import SingleDeviceStrategy
from typing_extensions import override

from lightning_memmap.placement.topology import check_device
from lightning_memmap.strategies.common.base import MemmapStrategy
from lightning_memmap.strategies.common.weighted_loss import WeightedLoss


class OneNode(MemmapStrategy, SingleDeviceStrategy):
    """A strategy on one machine, one of whose devices is the root device of this process."""

    #: Parts of error messages: what the strategy does, and what to do on several machines.
    runs_how: ClassVar[str]
    advice: ClassVar[str]
    # The Trainer sets these.
    cluster_environment: ClusterEnvironment | None = None
    parallel_devices: Sequence[torch.device] = ()
    num_nodes = 1

    @property
    @override
    def root_device(self) -> torch.device:
        return self.parallel_devices[0] if self.parallel_devices else super().root_device

    def check_devices(self) -> None:
        """Check the devices, once the Trainer has set its own."""

    # The Trainer calls it once everything else is set. It calls no public hook then.
    @override
    def _configure_launcher(self) -> None:
        if self.num_nodes != 1:
            raise ValueError(
                f"num_nodes={self.num_nodes}: {self.strategy_name} {self.runs_how} on one"
                f" machine; {self.advice}"
            )
        if self._is_one_of_several():
            raise ValueError(
                f"strategy={self.strategy_name!r} {self.runs_how}, but the program was launched"
                " in several processes (torchrun, srun or an earlier Trainer). Start it once;"
                f" {self.advice}"
            )
        self.check_devices()
        super()._configure_launcher()

    def _is_one_of_several(self) -> bool:
        """Return whether this process is one of several that were launched to train together."""
        environment = self.cluster_environment
        assert environment is not None
        # An earlier Trainer has left its process group, in which this process would block.
        if dist.is_initialized() and dist.get_world_size() > 1:
            return True
        if not isinstance(environment, LightningEnvironment):
            # Lightning detects the environment: an interactive shell of Slurm isn't Slurm's.
            return environment.world_size() > 1
        # LightningEnvironment counts only processes that it starts itself. Others show in its rank.
        # A Trainer that has started processes removes their number at its end, but not the rank.
        return environment.creates_processes_externally and (
            environment.local_rank() > 0 or int(os.environ.get("WORLD_SIZE", "1")) > 1
        )


class OneProcess(WeightedLoss, OneNode):
    """A strategy of one process whose data devices are the Trainer's devices, or a list of them."""

    runs_how = "runs in a single process"
    advice = (
        "use strategy='memmap_superbatch_ddp', or Lightning's ddp, which trains one model in all"
        " processes; or, after another Trainer, call torch.distributed.destroy_process_group() and"
        " continue on rank 0"
    )

    def __init__(
        self,
        data_devices: Sequence[str | torch.device] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if data_devices is not None and (isinstance(data_devices, str) or not data_devices):
            raise ValueError(
                f"data_devices={data_devices!r}: pass a list of at least one device, or omit it"
            )
        self._chosen_devices = (
            None if data_devices is None else [_device(name) for name in data_devices]
        )

    @override
    def check_devices(self) -> None:
        for device in self.data_devices:
            check_device(device)

    @property
    @override
    def data_devices(self) -> tuple[torch.device, ...]:
        """The devices that hold shards and serve batches."""
        return tuple(
            self.parallel_devices if self._chosen_devices is None else self._chosen_devices
        )


def _device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"data_devices: {name!r} isn't a device: {error}") from error
    # "cuda" and "cuda:0" are one device, and devices are compared.
    if device.type not in ("cpu", "meta") and device.index is None:
        device = torch.device(device.type, 0)
    return device
