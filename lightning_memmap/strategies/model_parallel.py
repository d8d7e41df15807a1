"""``memmap_model_parallel``: the layers of one model over several devices, in one process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_memmap._compat.loops import make_trainer_proxy
from lightning_memmap.placement import check_device
from lightning_memmap.strategies.model_stages.cut import (
    Stage,
    connect_stages,
    find_stages,
    move_stages,
)
from lightning_memmap.strategies.scattering.batch import ScatteredBatch, scatter
from lightning_memmap.strategies.scattering.logs import StepLog
from lightning_memmap.strategies.scattering.metrics import StepMetrics
from lightning_memmap.strategies.scattering.steps import ScatteredSteps
from lightning_memmap.strategies.superbatch import SuperBatchStrategy


@dataclass(frozen=True)
class _Run:
    """What exists from set-up on."""

    stages: list[Stage]
    hooks: list[RemovableHandle]
    metrics: StepMetrics
    #: The proxy of the Trainer for micro-batches.
    trainer: Any


class LocalModelParallelStrategy(ScatteredSteps[_Run], SuperBatchStrategy):
    """Trains one model whose layers are divided among several devices, in one process.

    Each of the Trainer's devices holds a stage of the model; the first, the root device, receives
    the super-batches, which are those of ``memmap_superbatch``. Activations move from stage to
    stage by themselves, and what the last layer returns comes back to the root device, so that a
    ``training_step`` such as ``loss(self.net(x), y)`` stays as it is.

    With several micro-batches, the step of the module is called once for each. The loss is the mean
    over micro-batches weighted by their rows, and there is one backward pass.

    Args:
        layers: Name of the ``nn.Sequential`` or ``nn.ModuleList`` in the module that is cut into
            stages. By default its only attribute that is an ``nn.Sequential``. A module may name
            its stages itself; see `lightning_memmap.strategies.model_stages.cut.find_stages`.
        num_microbatches: Micro-batches of a step.
        data_devices: Devices that hold shards, repeats allowed. By default all devices of the
            Trainer.
        root_holds_data: Whether the root device holds shards when ``data_devices`` is not given.
        prefetch: As for ``memmap_superbatch``.
        accelerator: As for every Lightning strategy.
        checkpoint_io: As for every Lightning strategy.
        precision_plugin: As for every Lightning strategy.

    Raises:
        ValueError: ``num_microbatches`` is below 1, or as for ``memmap_superbatch``; at set-up,
            where the module cannot be cut, see `find_stages`, or optimizes by hand and
            ``num_microbatches`` is above 1.
    """

    strategy_name = "memmap_model_parallel"
    _trains_alone = False

    def __init__(
        self,
        layers: str | None = None,
        num_microbatches: int = 1,
        data_devices: Sequence[str | torch.device] | None = None,
        root_holds_data: bool = True,
        prefetch: int | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        if num_microbatches < 1:
            raise ValueError(f"num_microbatches={num_microbatches}: at least 1, the whole batch")
        super().__init__(
            data_devices,
            root_holds_data,
            prefetch=prefetch,
            accelerator=accelerator,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._layers = layers
        self.num_microbatches = num_microbatches
        # Of the current micro-batch.
        self._log = StepLog(0)

    @property
    def stages(self) -> list[Stage]:
        """The stages of the model, from set-up to teardown; elsewhere none."""
        return [] if self._run is None else self._run.stages

    @override
    def setup(self, trainer: Trainer) -> None:
        if self.num_microbatches > 1 and not self.module.automatic_optimization:
            raise ValueError(
                f"num_microbatches={self.num_microbatches} with automatic_optimization=False: the"
                " training_step would step the optimizers once for each micro-batch; use"
                " num_microbatches=1"
            )
        self.refuse_sync_batchnorm(f"num_microbatches={self.num_microbatches}")
        for device in self.parallel_devices:
            check_device(device)
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            # Lightning has moved the initial state of optimizers to the root device.
            for optimizer in self.optimizers:
                optimizer.load_state_dict(optimizer.state_dict())

    @override
    def model_to_device(self) -> None:
        module = self.module
        stages = find_stages(module, self.parallel_devices, self._layers)
        move_stages(module, stages)
        self._run = _Run(
            stages,
            connect_stages(stages),
            StepMetrics(module, self.root_device),
            make_trainer_proxy(module.trainer, lambda: self._log),
        )

    @override
    def teardown(self) -> None:
        for hook in [] if self._run is None else self._run.hooks:
            hook.remove()
        self._run = None
        super().teardown()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # An optimizer loads each tensor to the device of its parameter; Lightning would move it.
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    @property
    @override
    def scatters(self) -> bool:
        return self.num_microbatches > 1

    @override
    def scatter(self, batch: Any) -> ScatteredBatch:
        return scatter(batch, [self.root_device] * self.num_microbatches)

    @override
    def run_scattered(
        self, name: str, batch: ScatteredBatch, logs: list[StepLog], *args: Any, **kwargs: Any
    ) -> list[Any]:
        run, step = self.run, getattr(self.module, name)
        self.module.trainer = run.trainer
        outputs = []
        with run.metrics.copies_in_place([]):
            for own, self._log in zip(batch.batches, logs, strict=True):
                outputs.append(step(own, *args, **kwargs))
        return outputs
