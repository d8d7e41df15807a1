"""Which devices hold the data, and where super-batches are assembled."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from typing_extensions import override

from lightning_memmap.loading.batches import BatchLoader
from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.loading.super_batch import SuperBatch
from lightning_memmap.loading.variable_rows import Padded
from lightning_memmap.placement.topology import DataTopology, topology_of
from lightning_memmap.schema.fields import RowList
from lightning_memmap.schema.structure import Masked
from lightning_memmap.strategies.common.seeded_steps import SeededSteps


class DataDevices(SeededSteps):
    """A strategy whose super-batches are assembled on the root device before its steps."""

    #: Processes of the run that hold data on a device of this process.
    processes_per_device = 1
    _has_transfer_hooks = True

    @property
    def data_devices(self) -> tuple[torch.device, ...]:
        """The devices of this process that hold shards and serve batches."""
        return (self.root_device,)

    @property
    def module(self) -> LightningModule:
        """The module that is trained."""
        assert self.lightning_module is not None, "the Trainer has not set up this strategy"
        return self.lightning_module

    @property
    def data_topology(self) -> DataTopology:
        """The devices that hold the data, and the root device, on which batches are assembled."""
        return topology_of(self, self.data_devices)

    def sum_over_processes(self, number: Tensor) -> Tensor:
        """Add up a number in place over the data-parallel processes. All ranks must call it."""
        return number

    @override
    def process_dataloader(self, dataloader: object) -> object:
        owners = self.module, getattr(self.module.trainer, "datamodule", None)
        names = "transfer_batch_to_device", "on_after_batch_transfer"
        self._has_transfer_hooks = any(is_overridden(n, owner) for owner in owners for n in names)
        # A loader made without a data module, or without a Trainer, has no devices yet.
        if isinstance(dataloader, BatchLoader):
            dataloader = dataloader.loader
        if isinstance(dataloader, SuperBatchLoader):
            topology = self.data_topology
            num_devices = topology.num_global_data_devices
            expected = dataloader.batch_size * num_devices
            if dataloader.global_batch != expected:
                rank_zero_warn(
                    f"this loader, made without the Trainer, has {dataloader.global_batch} rows per"
                    f" step, but {self.strategy_name} with {num_devices} data devices should have"
                    f" {expected}: pass datamodule= to the Trainer instead"
                )
            if dataloader.device is None:
                dataloader = dataloader.on_device_of(topology)
        return super().process_dataloader(dataloader)

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        # A super-batch that isn't assembled is from a loader made without the data module.
        if isinstance(batch, SuperBatch):
            batch = batch.to(device or self.root_device)
        # Lightning takes about 20 us per step to find that there is nothing to move.
        if not self._has_transfer_hooks and _is_on(batch, device or self.root_device):
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)


def _is_on(batch: Any, device: torch.device) -> bool:
    """Return whether a batch of plain containers has only text, and tensors on a device."""
    if isinstance(batch, Tensor):
        return batch.device == device
    if type(batch) in (dict, list, tuple, Padded, Masked, RowList):
        children = batch.values() if type(batch) is dict else batch
        return all(_is_on(child, device) for child in children)
    return isinstance(batch, (str, bytes))
