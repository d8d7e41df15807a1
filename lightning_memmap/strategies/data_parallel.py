"""``memmap_dp``: a replica of the model on every data device, in one process."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from lightning_memmap._compat.modules import (
    TRANSFER_HOOK,
    run_transfer_hook,
    transfer_hook_except,
)
from lightning_memmap._compat.tensors import after_backward
from lightning_memmap.loading.super_batch import SuperBatch
from lightning_memmap.placement.topology import DataTopology
from lightning_memmap.results.row_log import logged_rows
from lightning_memmap.strategies.common.one_process import OneProcess
from lightning_memmap.strategies.replicas.batches import ReplicaBatches
from lightning_memmap.strategies.replicas.merge_logs import merge_logs
from lightning_memmap.strategies.replicas.merge_outputs import OutputLengths, OutputMerger
from lightning_memmap.strategies.replicas.replicable import check_replicable
from lightning_memmap.strategies.replicas.replicas import Replicas


class DataParallelStrategy(OneProcess):
    """Trains a replica of the model on every data device, in one process: no row ever moves.

    In each step, every data device fetches its batch and its replica computes on it. The module on
    the root device is replica 0, which optimizers, hooks, callbacks and checkpoints see. Replicas
    on the root device share its parameters. Parameters are sent to every other physical device
    before each step, and its gradients are added to the module's. The loss is the mean over
    replicas, weighted by their rows: training equals training on one device with the same global
    batches if the loss is a mean over rows.

    Before each step, replicas receive the module's attributes. Attributes that a step assigns on
    replicas other than 0 are lost. Values that replicas pass to ``self.log`` and to torchmetrics
    are merged once per step.

    Args:
        data_devices: Devices that each hold shards and a replica, repeats allowed; the first must
            be the root device. By default all devices of the Trainer.
        **kwargs: As for Lightning's ``SingleDeviceStrategy``.

    Raises:
        ValueError: A device does not exist, the list is empty, the first is not the root device,
            the Trainer asks for more than one node, or the program was launched in several
            processes; at set-up, the module uses manual optimization, a parameter has no shape yet,
            a metric's state has no ``dist_reduce_fx``, or a compiled module uses CUDA graphs on
            several devices.
        UnsuitableModuleError: At set-up, a submodule was compiled by itself.
    """

    strategy_name = "memmap_dp"

    #: Set by the Trainer for ``sync_batchnorm=True``.
    _layer_sync: Any = None
    # The name of the last step; "" before the first.
    _last_step = ""
    # By name of a step, what is known of its outputs.
    _lengths: dict[str, OutputLengths]

    @override
    def check_devices(self) -> None:
        super().check_devices()
        if self.data_devices[0] != self.root_device:
            raise ValueError(
                f"data_devices={[str(device) for device in self.data_devices]}: the first must be"
                f" the root device, {self.root_device}; pass other devices here or to the Trainer"
            )

    @property
    @override
    def data_topology(self) -> DataTopology:
        """The devices that hold the data; with several replicas, batches are not assembled."""
        topology = super().data_topology
        return topology if self.num_separate_batches == 1 else replace(topology, assemble_on=None)

    @property
    def num_separate_batches(self) -> int:
        """The number of replicas, each of which computes a part of the rows."""
        return len(self.data_devices)

    @override
    def setup(self, trainer: Trainer) -> None:
        module = self.module
        if trainer.state.fn == TrainerFn.FITTING and not module.automatic_optimization:
            raise ValueError(
                "automatic_optimization=False: each replica under memmap_dp would step the"
                " optimizers; train with memmap_superbatch, memmap_superbatch_ddp or ddp"
            )
        check_replicable(module, self.data_devices)
        if self._layer_sync is not None and self.num_separate_batches > 1:
            raise ValueError(
                f"sync_batchnorm=True with {self.num_separate_batches} replicas: each has its own"
                " batch norm; omit it, or use memmap_superbatch, whose batch norm is over all rows"
                " of a step"
            )
        super().setup(trainer)
        # `batch_to_device` runs the module's transfer hooks on the batch of each replica.
        self.overrides.set(module, TRANSFER_HOOK, transfer_hook_except(module, SuperBatch))
        self._last_step = ""
        self._lengths = {}
        if self.num_separate_batches > 1:
            # Lightning calls the steps of a wrapped module through this attribute.
            self.overrides.set(self, "_forward_redirection", self._step)
            self.model = Replicas(module, self.data_devices)

    @override
    def teardown(self) -> None:
        if self.lightning_module is not None:
            self.model = self.lightning_module
        super().teardown()

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        if not isinstance(batch, SuperBatch) or self.num_separate_batches == 1:
            return super().batch_to_device(batch, device, dataloader_idx)

        batches = []
        for part, part_device in zip(batch.batches, self.data_devices, strict=True):
            part = self.precision_plugin.convert_input(part)
            part = run_transfer_hook(self.module, part, dataloader_idx)
            batches.append(super().batch_to_device(part, part_device, dataloader_idx))
        return ReplicaBatches.of_devices(
            batches, batch.num_rows, batch.first_device, self.root_device, batch.weight.by_row
        )

    def _step(
        self, replicas: Replicas, module: Any, name: str, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a step in all replicas. To Lightning it is one call with all rows."""
        if not isinstance(batch, ReplicaBatches):
            batch = ReplicaBatches.split(batch, self.data_devices)
        # Optimizers, averages of weights and hooks change the module between steps without notice,
        # so in training values are always copied.
        replicas.follow_module(with_values=name == "training_step" or name != self._last_step)
        self._last_step = name
        before = self._scheduler_steps()
        contexts: list[AbstractContextManager[None]] = [nullcontext() for _ in self.data_devices]
        if name == "training_step":
            contexts = [self.seeded_replica(*pair) for pair in enumerate(self.data_devices)]
        outputs = replicas.run(name, batch.batches, contexts, *args, **kwargs)
        for scheduler, _ in self._scheduler_steps() - before:
            raise RuntimeError(
                f"a step of the module steps the {type(scheduler).__name__}, as every replica"
                " would: leave it to automatic optimization, or train with memmap_superbatch"
            )
        merge_logs(replicas.logs, batch.row_ranges, module)
        lengths = self._lengths.setdefault(name, OutputLengths())
        merger = OutputMerger(batch.row_ranges, self.root_device, lengths, batch.weights)
        for key in dict.fromkeys(chain(*replicas.logged_rows)):
            values = [rows.get(key) for rows in replicas.logged_rows]
            logged_rows(module)[key] = merger.merge(values, f"[log_rows({key!r})]")
        if name != "training_step":
            return merger.merge(outputs)
        output = merger.training_output(outputs)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, Tensor) and loss.requires_grad:
            # At the end of its backward pass, before hooks that may read gradients.
            loss.register_hook(lambda _: after_backward(replicas.add_gradients))  # type: ignore[no-untyped-call]
        return output

    def _scheduler_steps(self) -> set[tuple[Any, int]]:
        configs = self.lr_scheduler_configs
        return {(c.scheduler, getattr(c.scheduler, "last_epoch", 0)) for c in configs}
