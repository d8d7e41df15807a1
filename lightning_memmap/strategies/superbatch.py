"""``memmap_superbatch``: all devices hold data, the root device trains."""

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_memmap.loading.batches import BatchLoader
from lightning_memmap.strategies.common.one_process import OneProcess


class SuperBatchStrategy(OneProcess):
    """Trains on the root device from data that all devices hold, in one process.

    A `MemmapDataModule` places its shards on ``data_devices``. In each step, every data device
    fetches its batch, and the batches are assembled on the root device, with rows in the order of
    the epoch. The model sees one batch of ``batch_size * len(data_devices)`` rows, so training
    equals training on one device with that batch size.

    On a CPU, ``Trainer(devices=4)`` gives four logical data devices.

    Args:
        data_devices: Devices that hold shards, with or without the root device, repeats allowed. By
            default all devices of the Trainer, the root device first.
        **kwargs: As for Lightning's ``SingleDeviceStrategy``.

    Raises:
        ValueError: A device does not exist, the list is empty, the Trainer asks for more than one
            node, or the program was launched in several processes.
    """

    strategy_name = "memmap_superbatch"
    _has_noted_idle_devices = False

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.training:
            self._note_idle_devices()

    def _note_idle_devices(self) -> None:
        """Log once that only the first of the Trainer's GPUs computes."""
        idle = {device for device in self.data_devices if device.type != "cpu"}
        idle.discard(self.root_device)
        if self._chosen_devices is None and idle and not self._has_noted_idle_devices:
            self._has_noted_idle_devices = True
            rank_zero_info(
                f"{self.strategy_name}: the model trains on {self.root_device}, and the"
                f" {len(idle)} other devices only hold data. To compute on all of them, use"
                " strategy='memmap_superbatch_ddp'"
            )

    @override
    def process_dataloader(self, dataloader: object) -> object:
        count = len(self.data_devices)
        is_torch = isinstance(dataloader, DataLoader) and not isinstance(dataloader, BatchLoader)
        if is_torch and count > 1 and self.module.trainer.training:
            rank_zero_warn(
                f"a DataLoader under {self.strategy_name} with {count} data devices: each step has"
                " only the rows of its batch, and the other devices are idle. Train from a"
                f" MemmapDataModule, whose steps have {count} times its batch_size, or with"
                " Trainer(devices=1)"
            )
        return super().process_dataloader(dataloader)
