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
from lightning_memmap.costs import Cluster, Costs, Workload
from lightning_memmap.loading import DeviceLoader, SuperBatch, SuperBatchLoader
from lightning_memmap.strategies._devices import LocalDevices
from lightning_memmap.strategies.in_parts.manual import ActsOnce, StandIns
from lightning_memmap.strategies.in_parts.records import StepLog, StepMetrics
from lightning_memmap.strategies.in_parts.replicas import Replicas, check_module
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
        # Of each replica: the Trainer that it is given.
        self._trainers: list[Any] = []
        self._logs: list[StepLog] = []
        self._shares: Shares | None = None
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
        self._replicas = replicas = Replicas(module, self.data_devices)
        self._workers = workers = Workers(self.data_devices)
        self._metrics = StepMetrics(module, self.root_device)
        self._acts = acts = ActsOnce(self, replicas, self._backward_of_all, self._join)
        stand_ins = [
            StandIns(acts, index, partial(workers.meet, index))
            for index in range(len(self.data_devices))
        ]
        self._trainers = [
            each.trainer(trainer, partial(self._log_of, index))
            for index, each in enumerate(stand_ins)
        ]
        replicas.stand_in = stand_ins[0].of
        for twin, each in zip(replicas.twins, stand_ins[1:], strict=True):
            twin.stand_in = each.of

    @override
    def teardown(self) -> None:
        if self._workers is not None:
            self._workers.close()
        if self.lightning_module is not None:
            end_diversion(self.lightning_module)
        self._replicas = self._workers = self._metrics = self._shares = None
        self._logs, self._trainers = [], []
        super().teardown()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if isinstance(dataloader, DeviceLoader):
            dataloader = dataloader.loader
        if isinstance(dataloader, SuperBatchLoader) and dataloader.transforms_super_batches:
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
        # The module may have changed in many ways since the last step: optimizers, averages of
        # weights, hooks. Nothing tells of all of them, so replicas always follow.
        self._replicas.refresh(always_copy=self._is_stale or name == "training_step")
        self._is_stale = False
        self._logs, self._shares = logs, shares
        count = len(shares.parts)
        with self._replicas.step(name, count) as modules:
            for module, trainer in zip(modules, self._trainers, strict=False):
                module.trainer = trainer
            with self._metrics.copies_in_place(self._replicas.twins[: count - 1]):
                outputs = self._workers.run(
                    [
                        partial(getattr(module, name), part, *args, **kwargs)
                        for module, part in zip(modules, shares.parts, strict=True)
                    ]
                )
        self._shares = None
        return outputs

    def _log_of(self, index: int) -> StepLog:
        return self._logs[index]

    def _backward_of_all(self, losses: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        assert self._replicas is not None
        self._acts.check_gradients()
        self._replicas.drop_gradients()
        rows = [log.num_rows for log in self._logs]
        result = self.backward(weighted_mean(losses, rows, self.root_device), *args, **kwargs)
        self._replicas.copy_gradients()
        return result

    def _join(self, values: list[Any]) -> Any:
        # Outside of a step there is one caller.
        return values[0] if self._shares is None else self._shares.join(values)

    @classmethod
    def costs(cls, work: Workload, cluster: Cluster, num_rows: int) -> Costs:
        """A replica on every device. The root device receives the gradients of all others, and
        sends them the parameters, one after the other."""
        rows = num_rows / cluster.size
        moved = (cluster.size - 1) * (work.gradient_bytes + work.parameter_bytes)
        return Costs.of(
            work,
            num_rows=rows,
            step_s=work.fixed_s
            + cluster.compute_s(work, rows, busy=cluster.devices)
            + moved / cluster.bandwidth,
            moved_bytes=moved,
            num_row_devices=cluster.size,
            obstacle=cluster.one_node,
        )
