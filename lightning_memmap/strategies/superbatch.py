"""``memmap_superbatch``: all devices hold data, the root device trains."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_memmap.loading import BatchLoader
from lightning_memmap.strategies._base import OneProcess


class SuperBatchStrategy(OneProcess):
    """Trains on the root device from data that all devices hold, in one process.

    A `MemmapDataModule` places its shards on ``data_devices``; each step, every data device fetches
    its batch, and the batches are assembled on the root device, rows in the order of the epoch. The
    model sees one batch of ``batch_size * len(data_devices)`` rows, so that training equals
    training on one device with that batch size.

    On a CPU, ``Trainer(devices=4)`` gives four logical data devices.

    Args:
        data_devices: Devices that hold shards, repeats allowed. By default all devices of the
            Trainer, the root device first.
        root_holds_data: Whether the root device holds shards when ``data_devices`` is not given.
        prefetch: Steps that are prefetched on side streams while one is computed. By default 2
            where the root device is a GPU, and 0 on a CPU.
        **kwargs: As for Lightning's ``SingleDeviceStrategy``.

    Raises:
        ValueError: A device does not exist, no device is left to hold data, ``prefetch`` is below
            0, two options exclude each other, the Trainer asks for more than one node, or the
            program was started in several processes.
    """

    strategy_name = "memmap_superbatch"
    #: Whether devices other than the root device only hold data.
    _trains_alone = True

    def __init__(
        self,
        data_devices: Sequence[str | torch.device] | None = None,
        root_holds_data: bool = True,
        prefetch: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(data_devices, prefetch=prefetch, **kwargs)
        if data_devices is not None and not root_holds_data:
            raise ValueError(
                "root_holds_data=False with data_devices: omit one of them; the devices that"
                " you name are the ones that hold data"
            )
        self._root_holds_data = root_holds_data

    @override
    def process_dataloader(self, dataloader: object) -> object:
        module, count = self.lightning_module, len(self.data_devices)
        is_other = isinstance(dataloader, DataLoader) and not isinstance(dataloader, BatchLoader)
        if is_other and self._trains_alone and count > 1 and module and module.trainer.training:
            rank_zero_warn(
                f"a DataLoader under {self.strategy_name} with {count} data devices: a step has the"
                " rows of its batch, and the other devices do nothing; train from a"
                f" MemmapDataModule, whose steps have {count} times its batch_size, or with"
                " Trainer(devices=1)"
            )
        return super().process_dataloader(dataloader)

    @property
    @override
    def data_devices(self) -> tuple[torch.device, ...]:
        """The devices that hold shards and take batches."""
        devices = super().data_devices
        if devices and not self._root_holds_data and len(devices) < 2:
            raise ValueError(
                f"root_holds_data=False with Trainer(devices={len(devices)}): no device is left"
                " to hold data; use at least 2 devices"
            )
        return devices if self._root_holds_data else devices[1:]
