"""``memmap_model_parallel``: the layers of one model over several devices, in one process."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_memmap._compat.loops import view_of_trainer
from lightning_memmap.costs import Cluster, Costs, Workload
from lightning_memmap.loading.streams import has_streams
from lightning_memmap.placement import check_device
from lightning_memmap.strategies._microbatch_streams import MicroBatchStreams, NoStreams
from lightning_memmap.strategies._stages import Stage, connect, find_stages, place
from lightning_memmap.strategies.in_parts.records import StepLog, StepMetrics
from lightning_memmap.strategies.in_parts.shares import Shares, deal
from lightning_memmap.strategies.in_parts.steps import StepsInParts
from lightning_memmap.strategies.superbatch import SuperBatchStrategy


class LocalModelParallelStrategy(StepsInParts, SuperBatchStrategy):
    """Trains one model whose layers are on several devices, in one process.

    The Trainer's devices hold a stage of the model each; the first, the root device, is given the
    super-batches, which are those of ``memmap_superbatch``. Activations move from stage to stage
    by themselves, and what the last layer returns comes back to the root device, so that a
    ``training_step`` such as ``loss(self.net(x), y)`` stays as it is.

    With several micro-batches, the step of the module is called with a part of the rows at a
    time; on GPUs the stages then work side by side, as in GPipe (Huang et al., 2019). The loss is
    the mean over micro-batches weighted by their rows, and there is one backward pass.

    Args:
        layers: Name of the ``nn.Sequential`` or ``nn.ModuleList`` in the module that is cut into
            stages. By default its only attribute that is an ``nn.Sequential``. A module may name
            its stages itself; see `lightning_memmap.strategies._stages.find_stages`.
        num_microbatches: Parts of a step.
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
        #: The stages of the model, while it is set up.
        self.stages: list[Stage] = []
        self._hooks: list[RemovableHandle] = []
        self._metrics: StepMetrics | None = None
        self._streams = NoStreams()
        self._view: Any = None
        self._log = StepLog(0)

    @override
    def setup(self, trainer: Trainer) -> None:
        if self.num_microbatches > 1 and not self.module.automatic_optimization:
            raise ValueError(
                f"num_microbatches={self.num_microbatches} with automatic_optimization=False: the"
                " training_step would step the optimizers once for each micro-batch; use"
                " num_microbatches=1"
            )
        for device in self.parallel_devices:
            check_device(device)
        self._metrics = StepMetrics(self.module, self.root_device)
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            # Lightning has moved what optimizers begin with to the root device.
            for optimizer in self.optimizers:
                optimizer.load_state_dict(optimizer.state_dict())

    @override
    def model_to_device(self) -> None:
        self.stages = find_stages(self.module, self.parallel_devices, self._layers)
        place(self.module, self.stages)
        self._hooks = connect(self.stages)
        if self.divides_steps and has_streams(self.root_device):
            self._streams = MicroBatchStreams(self.root_device)
            self._hooks += self._streams.connect(self.stages)

    @override
    def teardown(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.stages, self._metrics, self._view = [], [], None, None
        self._streams = NoStreams()
        super().teardown()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # An optimizer puts each tensor where its parameter is; Lightning would move them on.
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    @property
    @override
    def divides_steps(self) -> bool:
        return self.num_microbatches > 1

    @override
    def share(self, batch: Any) -> Shares:
        return deal(batch, [self.root_device] * self.num_microbatches)

    @override
    def run_parts(
        self, name: str, shares: Shares, logs: list[StepLog], *args: Any, **kwargs: Any
    ) -> list[Any]:
        assert self._metrics is not None
        step = getattr(self.module, name)
        if self._view is None:
            self._view = view_of_trainer(self.module.trainer, lambda: self._log)
        self.module.trainer = self._view
        outputs = []
        with self._metrics.copies_in_place([]), self._streams.step():
            for part, self._log in zip(shares.parts, logs, strict=True):
                with self._streams.microbatch():
                    outputs.append(step(part, *args, **kwargs))
        return outputs

    @classmethod
    def costs(cls, work: Workload, cluster: Cluster, num_rows: int) -> Costs:
        """Stages of equal size; as by default the whole batch is one micro-batch, so that one
        device computes at a time. Super-batches are assembled on the first device."""
        moved = work.assembled_bytes(num_rows, cluster.size)
        return Costs.of(
            work,
            num_rows=num_rows,
            step_s=work.fixed_s
            + cluster.compute_s(work, num_rows, busy=1)
            + moved / cluster.bandwidth,
            moved_bytes=moved,
            state_share=1 / cluster.size,
            activation_share=1 / cluster.size,
            num_row_devices=cluster.size,
            effort=3,
            obstacle=cluster.one_node,
            note="equal stages, one computes at a time; activations between them not counted",
        )
