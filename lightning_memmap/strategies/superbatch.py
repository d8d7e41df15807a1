"""``memmap_superbatch``: all devices hold data, the root device trains."""

from collections.abc import Sequence

import lightning as L
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_memmap._compat.optimization import (
    run_steps_as_ever,
    run_steps_by,
    skip_unused_hooks,
)
from lightning_memmap.loading import BatchLoader
from lightning_memmap.strategies._assembly import SuperBatchAssembly
from lightning_memmap.strategies._cuda_graph import make_graph
from lightning_memmap.strategies._devices import LocalDevices
from lightning_memmap.strategies._graph import GraphedStep, check_step


class SuperBatchStrategy(SuperBatchAssembly, LocalDevices):
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
        prefetch: Coming steps that are made ready on side streams while one is computed. By default
            2 where the root device is a GPU, and 0 on a CPU.
        cuda_graph: Experimental, as it has not run on a GPU: capture the whole training step, the
            optimizer's included, as a CUDA graph, and replay it for all steps of that shape; see
            `lightning_memmap.strategies._graph`.
        skip_unused_hooks: Leave out the hooks of an optimizer step if neither the module nor a
            callback overrides any of them. Otherwise, and where gradient clipping, accumulation, a
            profiler or a precision other than ``32-true`` and the like takes part in the step, all
            hooks are called as usual. Training is the same bit for bit; a step of a tiny model
            takes about a quarter less time.
        accelerator: As for every Lightning strategy.
        checkpoint_io: As for every Lightning strategy.
        precision_plugin: As for every Lightning strategy.

    Raises:
        ValueError: A device does not exist, no device is left to hold data, ``prefetch`` is below
            0, two options exclude each other, the Trainer asks for more than one node, or the
            program was started in several processes; at set-up, a step that cannot be a graph.
    """

    strategy_name = "memmap_superbatch"
    #: Whether devices other than the root device only hold data.
    _trains_alone = True

    def __init__(
        self,
        data_devices: Sequence[str | torch.device] | None = None,
        root_holds_data: bool = True,
        prefetch: int | None = None,
        cuda_graph: bool = False,
        skip_unused_hooks: bool = False,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            data_devices, accelerator, checkpoint_io, precision_plugin, prefetch=prefetch
        )
        if data_devices is not None and not root_holds_data:
            raise ValueError(
                "root_holds_data=False with data_devices: leave one of them out; the devices that"
                " you name are the ones that hold data"
            )
        if cuda_graph and skip_unused_hooks:
            raise ValueError(
                "cuda_graph=True with skip_unused_hooks=True: leave one of them out; a step that"
                " is replayed calls no hooks inside at all"
            )
        self._root_holds_data = root_holds_data
        self._cuda_graph = cuda_graph
        self._skip_unused_hooks = skip_unused_hooks

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

    @override
    def setup(self, trainer: L.Trainer) -> None:
        graph = make_graph(self.root_device) if self._cuda_graph else None
        super().setup(trainer)
        if self._skip_unused_hooks:
            skip_unused_hooks(trainer)
        if graph is not None and trainer.state.fn == TrainerFn.FITTING:
            module = self.lightning_module
            assert module is not None
            check_step(trainer, module, self)
            run_steps_by(trainer, GraphedStep(trainer, module, self.optimizers[0], graph).run)

    @override
    def teardown(self) -> None:
        if self._cuda_graph and self.lightning_module is not None:
            # This also frees the graph and its memory.
            run_steps_as_ever(self.lightning_module.trainer)
        super().teardown()

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
