"""``memmap_dp``: a replica of the model on every data device, in one process."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from lightning_memmap._compat.modules import (
    restore_transfer_hook,
    run_transfer_hook,
    skip_transfer_hook,
)
from lightning_memmap._compat.tensors import after_backward
from lightning_memmap.loading.super_batch import SuperBatch
from lightning_memmap.placement.topology import DataTopology
from lightning_memmap.strategies._base import OneProcess
from lightning_memmap.strategies._replicas import Replicas, check_module
from lightning_memmap.strategies.microbatch import (
    MicroBatches,
    OutputLengths,
    merge_logs,
    training_output,
)


class DataParallelStrategy(OneProcess):
    """Trains a replica of the model on every data device, in one process: no row ever moves.

    In each step, every data device fetches its batch and its replica computes on it. The module on
    the root device is replica 0 and the one that optimizers, hooks, callbacks and checkpoints see.
    Replicas on its physical device share its parameters; every other physical device is sent them
    before each step, and its gradients are added to the module's. The loss is the mean over
    replicas weighted by their rows: training equals that on one device with the same global batches
    where the loss is a mean over rows.

    Before each step, replicas get the attributes that the module has then; what a step assigns to
    attributes of replicas other than 0 is lost. What replicas give to ``self.log`` and to
    torchmetrics is merged once per step.

    Args:
        data_devices: Devices that each hold shards and a replica, repeats allowed; the first must
            be the root device. By default all devices of the Trainer.
        **kwargs: As for Lightning's ``SingleDeviceStrategy``.

    Raises:
        ValueError: A device does not exist, none is given, the first is not the root device, the
            Trainer asks for more than one node, or the program was started in several processes; at
            set-up, the module optimizes by hand, a parameter has no shape yet, a metric's state no
            ``dist_reduce_fx``, or a compiled module has CUDA graphs on several devices.
        UnsuitableModuleError: At set-up, a submodule was compiled by itself.
    """

    strategy_name = "memmap_dp"

    #: Of ``Trainer(sync_batchnorm=True)``, which sets it.
    _layer_sync: Any = None
    # The name of the last step; "" before the first.
    _last = ""
    #: By the name of a step, what is known of its outputs.
    _lengths: dict[str, OutputLengths]

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
    def data_topology(self) -> DataTopology:
        """Which devices hold the data; their batches stay apart where there are several."""
        found = super().data_topology
        return found if self.num_parts == 1 else replace(found, assemble_on=None)

    @property
    def num_parts(self) -> int:
        """Replicas, each of which has a part of the rows."""
        return len(self.data_devices)

    @override
    def setup(self, trainer: Trainer) -> None:
        module = self.module
        if trainer.state.fn == TrainerFn.FITTING and not module.automatic_optimization:
            raise ValueError(
                "automatic_optimization=False: each replica under memmap_dp would step the"
                " optimizers; train with memmap_superbatch, memmap_superbatch_ddp or ddp"
            )
        check_module(module, self.data_devices)
        if self._layer_sync is not None and self.num_parts > 1:
            raise ValueError(
                f"sync_batchnorm=True with {self.num_parts} replicas: memmap_dp computes"
                " batch norm on the rows of each; omit it, use group or layer norm, or"
                " memmap_superbatch, whose batch norm is over all rows of a step"
            )
        super().setup(trainer)
        # `batch_to_device` runs the module's transfer hooks on the batch of each replica.
        skip_transfer_hook(module, SuperBatch)
        self._last = ""
        self._lengths = {}
        if self.num_parts > 1:
            # By this, Lightning runs the steps of a module that is wrapped.
            self.model = Replicas(module, self.data_devices)
            self._forward_redirection = self._step  # type: ignore[assignment]

    @override
    def teardown(self) -> None:
        if self.lightning_module is not None:
            restore_transfer_hook(self.lightning_module)
            self.model = self.lightning_module
        super().teardown()

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        if not isinstance(batch, SuperBatch) or self.num_parts == 1:
            return super().batch_to_device(batch, device, dataloader_idx)

        module = self.module
        batches = []
        for own, own_device in zip(batch.batches, self.data_devices, strict=True):
            own = self.precision_plugin.convert_input(own)
            own = run_transfer_hook(module, own, dataloader_idx)
            batches.append(super().batch_to_device(own, own_device, dataloader_idx))
        return MicroBatches.of_devices(batches, batch.num_rows, batch.first, self.root_device)

    def _scheduler_steps(self) -> set[tuple[Any, int]]:
        found = self.lr_scheduler_configs
        return {(each.scheduler, getattr(each.scheduler, "last_epoch", 0)) for each in found}

    def _step(
        self, replicas: Replicas, module: Any, name: str, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a step of this name in all replicas. To Lightning it is one call with all rows."""
        if not isinstance(batch, MicroBatches):
            batch = MicroBatches.split(batch, self.data_devices)
        # Optimizers, averages of weights and hooks change the module between steps, and nothing
        # announces all of these changes: while it trains, the replicas always follow.
        replicas.pull(with_values=name == "training_step" or name != self._last)
        self._last = name
        before = self._scheduler_steps()
        outputs = replicas.run(name, batch.parts, *args, **kwargs)
        for scheduler, _ in self._scheduler_steps() - before:
            raise RuntimeError(
                f"a step of the module steps the {type(scheduler).__name__}, which every replica"
                " under memmap_dp does: leave it to automatic optimization, or train with"
                " memmap_superbatch, memmap_superbatch_ddp or ddp"
            )
        merge_logs(replicas.logs, batch, module)
        batch.lengths = self._lengths.setdefault(name, OutputLengths())
        if name != "training_step":
            return batch.merge(outputs)
        output = training_output(outputs, batch)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, Tensor) and loss.requires_grad:
            # At the end of its backward pass, before hooks that may read gradients.
            loss.register_hook(lambda _: after_backward(replicas.push_gradients))  # type: ignore[no-untyped-call]
        return output
