"""``memmap_dp``: a replica of the model on every data device, in one process."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import override

from lightning_memmap._compat.loops import make_trainer_proxy
from lightning_memmap.loading import SuperBatch
from lightning_memmap.placement import DataTopology
from lightning_memmap.strategies._replicas import Replicas, check_module, run_replicas
from lightning_memmap.strategies.microbatch import (
    MicroBatches,
    PartLog,
    StepsInParts,
    counted_in_copies,
)


class DataParallelStrategy(StepsInParts):
    """Trains a replica of the model on every data device, in one process: no row ever moves.

    In each step, every data device fetches its batch and its replica computes on it. The module on
    the root device is replica 0 and the one that optimizers, hooks, callbacks and checkpoints see.
    Replicas on its physical device share its parameters; every other physical device is sent them
    before each step, and its gradients are added to the module's. The loss is the mean over
    replicas weighted by their rows: training equals that on one device with the same global batches
    where the loss is a mean over rows.

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
            set-up, the module optimizes by hand, a parameter has no shape yet, a metric's state no
            ``dist_reduce_fx``, or a compiled module has CUDA graphs on several devices.
        UnsuitableModuleError: At set-up, a submodule was compiled or scripted by itself.
    """

    strategy_name = "memmap_dp"

    _replicas: Replicas | None = None
    _threads: ThreadPoolExecutor | None = None
    # Of the current step.
    _logs: list[PartLog]
    _trainers: list[Any]
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

    @property
    @override
    def num_parts(self) -> int:
        return len(self.data_devices)

    @property
    @override
    def data_topology(self) -> DataTopology:
        """Which devices hold the data; their batches stay apart where there are several."""
        return super().data_topology if self.num_parts == 1 else DataTopology(self.data_devices)

    @override
    def setup(self, trainer: Trainer) -> None:
        module = self.module
        if trainer.state.fn == TrainerFn.FITTING and not module.automatic_optimization:
            raise ValueError(
                "automatic_optimization=False: each replica under memmap_dp would step the"
                " optimizers; train with memmap_superbatch, memmap_superbatch_ddp or ddp"
            )
        check_module(module, self.data_devices)
        self.refuse_sync_batchnorm("replicas")
        super().setup(trainer)
        # `batch_to_device` runs the module's transfer hooks on the batch of each replica.
        own: Any = type(module)._on_before_batch_transfer

        def before_transfer(batch: Any, dataloader_idx: int = 0) -> Any:
            return batch if isinstance(batch, SuperBatch) else own(module, batch, dataloader_idx)

        module._on_before_batch_transfer = before_transfer  # type: ignore[method-assign]
        self._replicas = Replicas(module, self.data_devices)
        self._threads = ThreadPoolExecutor(self.num_parts, "replica")
        self._trainers = [
            make_trainer_proxy(trainer, partial(self._log_of, index))
            for index in range(self.num_parts)
        ]

    @override
    def teardown(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
        if self.lightning_module is not None:
            vars(self.lightning_module).pop("_on_before_batch_transfer", None)
        self._replicas = self._threads = None
        self._logs = self._trainers = []
        super().teardown()

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        if not isinstance(batch, SuperBatch) or self.num_parts == 1:
            return super().batch_to_device(batch, device, dataloader_idx)

        module: Any = self.module
        batches = []
        for own, own_device in zip(batch.batches, self.data_devices, strict=True):
            own = self.precision_plugin.convert_input(own)
            own = type(module)._on_before_batch_transfer(module, own, dataloader_idx)
            batches.append(super().batch_to_device(own, own_device, dataloader_idx))
        return MicroBatches.of_devices(batches, batch.num_rows, batch.first, self.root_device)

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
        assert self._replicas is not None
        self._replicas.push_gradients()
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def split(self, batch: Any) -> MicroBatches:
        if isinstance(batch, MicroBatches):
            return batch
        return MicroBatches.split(batch, self.num_parts, devices=self.data_devices)

    @override
    def run_parts(
        self, name: str, batch: MicroBatches, logs: list[PartLog], *args: Any, **kwargs: Any
    ) -> list[Any]:
        replicas, count = self._replicas, len(batch.parts)
        assert replicas is not None
        assert self._threads is not None
        # Optimizers, averages of weights and hooks change the module between steps, and nothing
        # announces all of these changes: while it trains, the replicas always follow.
        replicas.pull(with_values=self._is_stale or name == "training_step")
        self._is_stale, self._logs = False, logs
        modules, before = replicas.modules(count), dict(vars(self.module))
        for module, trainer in zip(modules, self._trainers, strict=False):
            module.trainer = trainer
        with counted_in_copies(self.module, replicas.metrics[:count]), self._no_other_steps():
            outputs = run_replicas(
                [
                    partial(getattr(module, name), own, *args, **kwargs)
                    for module, own in zip(modules, batch.parts, strict=True)
                ],
                self.data_devices,
                self._threads,
            )
        replicas.end_step(name, before, count)
        return outputs

    @contextmanager
    def _no_other_steps(self) -> Iterator[None]:
        """Refuse, within the context, steps that each replica would make of what there is once.

        Raises:
            RuntimeError: A replica steps an optimizer of the module's parameters, or a scheduler.
        """
        parameters = set(map(id, self.module.parameters()))

        def check(optimizer: Optimizer, *_: Any) -> None:
            owned = (id(p) for group in optimizer.param_groups for p in group["params"])
            if not parameters.isdisjoint(owned):
                raise self._stepped(optimizer)

        schedulers: list[Any] = [config.scheduler for config in self.lr_scheduler_configs]
        counts = [getattr(scheduler, "last_epoch", 0) for scheduler in schedulers]
        handle = register_optimizer_step_pre_hook(check)
        try:
            yield
        finally:
            handle.remove()
        for scheduler, count in zip(schedulers, counts, strict=True):
            if getattr(scheduler, "last_epoch", 0) != count:
                raise self._stepped(scheduler)

    def _stepped(self, stepped: object) -> RuntimeError:
        return RuntimeError(
            f"a step of the module steps the {type(stepped).__name__}, which every replica under"
            " memmap_dp does: leave it to automatic optimization, or train with memmap_superbatch,"
            " memmap_superbatch_ddp or ddp"
        )

    def _log_of(self, index: int) -> PartLog:
        return self._logs[index]
