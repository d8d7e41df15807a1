"""``memmap_dp``: a replica of the model on every data device, in one process."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memmap._compat.modules import (
    before_transfer,
    restore_before_transfer,
    skip_before_transfer,
)
from lightning_memmap.loading import SuperBatch
from lightning_memmap.strategies.replicas.module import Replicas, check_module
from lightning_memmap.strategies.replicas.proxies import CollectiveActions, ReplicaProxies
from lightning_memmap.strategies.replicas.threads import ReplicaThreads
from lightning_memmap.strategies.scattering.batch import (
    ScatteredBatch,
    scatter,
    weighted_mean,
)
from lightning_memmap.strategies.scattering.logs import StepLog
from lightning_memmap.strategies.scattering.metrics import StepMetrics
from lightning_memmap.strategies.scattering.steps import ScatteredSteps


@dataclass(frozen=True)
class _Run:
    """What exists from set-up on."""

    replicas: Replicas
    threads: ReplicaThreads
    metrics: StepMetrics
    actions: CollectiveActions
    #: The proxies of the Trainer, by replica.
    trainers: list[Any]


class DataParallelStrategy(ScatteredSteps[_Run]):
    """Trains a replica of the model on every data device, in one process: no row ever moves.

    In each step, every data device fetches its batch and its replica computes on it. Gradients are
    added to those of the module on the root device, which is replica 0 and the one that optimizers,
    hooks, callbacks and checkpoints see; its parameters and buffers are copied to the other
    replicas before the next step. The loss is the mean over replicas weighted by their rows:
    training equals that on one device with the same global batches where the loss is a mean over
    rows.

    Replicas are made once. They share the module's plain attributes. What they give to ``self.log``
    and to torchmetrics is merged once per step.

    Args:
        data_devices: Devices that each hold shards and a replica, repeats allowed; the first must
            be the root device. By default all devices of the Trainer.
        accelerator: As for every Lightning strategy.
        checkpoint_io: As for every Lightning strategy.
        precision_plugin: As for every Lightning strategy.

    Raises:
        ValueError: A device does not exist, none is given, the first is not the root device, the
            Trainer asks for more than one node, or the program was started in several processes; at
            set-up, a parameter has no shape yet, or a metric's state no ``dist_reduce_fx``.
        UnsuitableModuleError: At set-up, a submodule was compiled or scripted by itself.
    """

    strategy_name = "memmap_dp"

    # Of the current step.
    _logs: Sequence[StepLog] = ()
    _batch: ScatteredBatch | None = None
    _is_stale = True

    @override
    def check_devices(self) -> None:
        super().check_devices()
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
        if len(self.data_devices) > 1:
            self.refuse_sync_batchnorm(f"{len(self.data_devices)} replicas")
        super().setup(trainer)
        # `batch_to_device` runs the module's transfer hooks on the batch of each replica.
        skip_before_transfer(module, SuperBatch)
        replicas = Replicas(module, self.data_devices)
        threads = ReplicaThreads(self.data_devices)
        actions = CollectiveActions(self, replicas, self._backward_of_all, self._merge)
        proxies = [
            ReplicaProxies(actions, index, partial(threads.barrier, index))
            for index in range(len(self.data_devices))
        ]
        replicas.find_proxy = proxies[0].proxy_of
        for replica, each in zip(replicas.others, proxies[1:], strict=True):
            replica.find_proxy = each.proxy_of
        trainers = [
            each.trainer(trainer, partial(self._log_of, index))
            for index, each in enumerate(proxies)
        ]
        metrics = StepMetrics(module, self.root_device)
        self._run = _Run(replicas, threads, metrics, actions, trainers)

    @override
    def teardown(self) -> None:
        if self._run is not None:
            self._run.threads.close()
        if self.lightning_module is not None:
            restore_before_transfer(self.lightning_module)
        self._run = self._batch = None
        self._logs = ()
        super().teardown()

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        if not isinstance(batch, SuperBatch):
            return super().batch_to_device(batch, device, dataloader_idx)

        batches = []
        for own, own_device in zip(batch.batches, self.data_devices, strict=True):
            own = self.precision_plugin.convert_input(own)
            own = before_transfer(self.module, own, dataloader_idx)
            batches.append(super().batch_to_device(own, own_device, dataloader_idx))
        return ScatteredBatch(batches, batch.num_rows, batch.first, self.root_device)

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
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.module)
        self.precision_plugin.backward(closure_loss, self.module, optimizer, *args, **kwargs)
        # Before the hooks that follow, which may read gradients.
        self.run.replicas.reduce_gradients()
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def scatter(self, batch: Any) -> ScatteredBatch:
        return batch if isinstance(batch, ScatteredBatch) else scatter(batch, self.data_devices)

    @override
    def run_scattered(
        self, name: str, batch: ScatteredBatch, logs: list[StepLog], *args: Any, **kwargs: Any
    ) -> list[Any]:
        run = self.run
        # Optimizers, averages of weights and hooks change the module between steps, and nothing
        # announces all of these changes: the replicas always follow.
        run.replicas.refresh(always_copy=self._is_stale or name == "training_step")
        self._is_stale = False
        self._logs, self._batch = logs, batch
        count = len(batch.batches)
        with run.replicas.step(name, count) as modules:
            for module, trainer in zip(modules, run.trainers, strict=False):
                module.trainer = trainer
            copies = [replica.metrics for replica in run.replicas.others[: count - 1]]
            with run.metrics.copies_in_place(copies), run.actions.sole_steps():
                outputs = run.threads.run(
                    [
                        partial(getattr(module, name), own, *args, **kwargs)
                        for module, own in zip(modules, batch.batches, strict=True)
                    ]
                )
        self._batch = None
        return outputs

    def _log_of(self, index: int) -> StepLog:
        return self._logs[index]

    def _backward_of_all(self, losses: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        run = self.run
        run.actions.check_gradients()
        run.replicas.drop_gradients()
        rows = [log.num_rows for log in self._logs]
        result = self.backward(weighted_mean(losses, rows, self.root_device), *args, **kwargs)
        run.replicas.broadcast_gradients()
        return result

    def _merge(self, values: list[Any]) -> Any:
        # Outside of a step there is one caller.
        return values[0] if self._batch is None else self._batch.merge(values)
