"""``memmap_dp``: a replica of the model on every data device, in one process."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memmap._compat.modules import before_transfer, divert_batches, end_diversion
from lightning_memmap.loading import AssembledLoader, SuperBatch, ZippedLoader
from lightning_memmap.strategies._devices import LocalDevices
from lightning_memmap.strategies.in_parts.manual import ReplicaTrainers
from lightning_memmap.strategies.in_parts.records import StepLog, StepMetrics
from lightning_memmap.strategies.in_parts.replicas import Replicas, Twin, check_module
from lightning_memmap.strategies.in_parts.shares import Shares, deal, share, weighted_mean
from lightning_memmap.strategies.in_parts.steps import StepsInParts
from lightning_memmap.strategies.in_parts.workers import Workers


class DataParallelStrategy(StepsInParts):
    """Trains a replica of the model on every data device, in one process: no row ever moves.

    Each step, every data device takes its batch and its replica computes on it. Gradients are
    added to those of the root device's module, which is replica 0 and the one that optimizers,
    hooks, callbacks and checkpoints see; its parameters and buffers are copied to the replicas
    before the next step. The loss is the mean over replicas weighted by their rows, so that
    training equals one device with the same global batches where the loss is a mean over rows.

    Replicas are made once. They share the module's plain attributes; what ``self.log`` and
    torchmetrics are given by each is merged once per step.

    Args:
        data_devices: Devices that hold shards and a replica each, repeats allowed; the first must
            be the root device. By default all devices of the Trainer.
        accelerator: As for every Lightning strategy.
        checkpoint_io: As for every Lightning strategy.
        precision_plugin: As for every Lightning strategy.

    Raises:
        ValueError: A device does not exist, the first is not the root device, or the Trainer asks
            for more than one node.
    """

    strategy_name = "memmap_dp"

    def __init__(
        self,
        data_devices: Sequence[str | torch.device] | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(data_devices, accelerator, checkpoint_io, precision_plugin)
        self._replicas: Replicas | None = None
        self._workers: Workers | None = None
        self._metrics: StepMetrics | None = None
        self._logs: list[StepLog] = []
        self._views: list[Any] = []
        self._is_stale = True

    @property
    @override
    def parallel_devices(self) -> list[torch.device]:
        """The devices of the Trainer; it sets them. The first one is the root device."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        LocalDevices.parallel_devices.fset(self, devices)  # type: ignore[attr-defined]
        if self.data_devices[0] != self.root_device:
            raise ValueError(
                f"data_devices={[str(device) for device in self.data_devices]}: the first must be"
                f" the root device, {self.root_device}, which holds the module; name it first, or"
                " give the Trainer other devices"
            )

    @override
    def setup(self, trainer: Trainer) -> None:
        module = self.module
        check_module(module)
        super().setup(trainer)
        # Where each replica's batch is handed to the module's transfer hooks: `batch_to_device`.
        divert_batches(module, SuperBatch)
        self._replicas = Replicas(module, self.data_devices)
        self._workers = Workers(self.data_devices)
        self._metrics = StepMetrics(module, self.root_device)
        self._logs, self._views = [], []

    @override
    def teardown(self) -> None:
        if self._workers is not None:
            self._workers.close()
        if self.lightning_module is not None:
            end_diversion(self.lightning_module)
        self._replicas = self._workers = self._metrics = None
        self._logs, self._views = [], []
        super().teardown()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if isinstance(dataloader, AssembledLoader):
            dataloader = dataloader.loader
        if isinstance(dataloader, ZippedLoader) and dataloader.transforms_super_batches:
            # Its batches are dealt to the replicas, as those of any other loader.
            return dataloader.to(self.root_device)
        return super().process_dataloader(dataloader)

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        if not isinstance(batch, SuperBatch):
            return super().batch_to_device(batch, device, dataloader_idx)

        def place(part: Any, index: int) -> Any:
            part = self.precision_plugin.convert_input(part)
            part = before_transfer(self.module, part, dataloader_idx)
            return super(DataParallelStrategy, self).batch_to_device(
                part, self.data_devices[index], dataloader_idx
            )

        return share(batch, place, self.root_device)

    @override
    def on_validation_start(self) -> None:
        self._is_stale = True

    @override
    def on_test_start(self) -> None:
        self._is_stale = True

    @override
    def on_predict_start(self) -> None:
        self._is_stale = True

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        assert self._replicas is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.module)
        self.precision_plugin.backward(closure_loss, self.module, optimizer, *args, **kwargs)
        # Before the hooks that follow a backward, which look at gradients.
        self._replicas.add_gradients()
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def share(self, batch: Any) -> Shares:
        return batch if isinstance(batch, Shares) else deal(batch, self.data_devices)

    @override
    def run_parts(
        self, name: str, shares: Shares, logs: list[StepLog], *args: Any, **kwargs: Any
    ) -> list[Any]:
        assert self._replicas is not None
        assert self._workers is not None
        assert self._metrics is not None
        # The module may have changed in many ways since the last training step: optimizers,
        # averages of weights, hooks. Nothing tells of all of them, so replicas always follow.
        if self._is_stale or name == "training_step":
            self._replicas.refresh()
            self._is_stale = False
        modules = self._replicas.modules[: len(shares.parts)]
        self._logs = logs
        for module, view in zip(modules, self._trainers(), strict=False):
            module.trainer = view
        with self._metrics.copies_in_place(self._replicas.twins[: len(modules) - 1]):
            return self._workers.run(
                [
                    partial(getattr(module, name), part, *args, **kwargs)
                    for module, part in zip(modules, shares.parts, strict=True)
                ]
            )

    def _trainers(self) -> list[Any]:
        """What each replica is given for the Trainer."""
        assert self._replicas is not None
        assert self._workers is not None
        if not self._views:
            maker = ReplicaTrainers(
                self, self._backward_of_all, self._check_gradients, self._replicas.copy_out
            )
            twins: list[Twin | None] = [None, *self._replicas.twins]
            modules = self._replicas.modules
            self._views = [
                maker.make(
                    self.module.trainer,
                    modules[i],
                    twin,
                    partial(self._log_of, i),
                    partial(self._workers.meet, i),
                )
                for i, twin in enumerate(twins)
            ]
        return self._views

    def _log_of(self, index: int) -> StepLog:
        return self._logs[index]

    def _backward_of_all(self, losses: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        rows = [log.num_rows for log in self._logs]
        return self.backward(weighted_mean(losses, rows, self.root_device), *args, **kwargs)

    def _check_gradients(self) -> None:
        assert self._replicas is not None
        if self._replicas.have_gradients:
            raise RuntimeError(
                "a replica has gradients that self.manual_backward did not make: under memmap_dp"
                " call self.manual_backward(loss) and not loss.backward(), which knows nothing of"
                " the other replicas"
            )
