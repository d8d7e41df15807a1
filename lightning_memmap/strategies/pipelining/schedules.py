"""The schedules of a pipeline: one for each shape of batch, made at the first such batch."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from lightning_memmap.process_group import broadcast
from lightning_memmap.strategies.pipelining.microbatches import MicroBatches

#: By name, the schedules of torch.
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}
#: Number of shapes whose schedules, with their buffers, are kept.
_MAX_KEPT = 16

#: Computes the loss of a micro-batch from its index and the output of the last stage.
MicroLoss = Callable[[int, Any], Tensor]


@dataclass(frozen=True)
class PipelineOptions:
    """How batches go through a pipeline.

    Args:
        schedule: ``gpipe``, ``1f1b`` or ``interleaved``.
        num_microbatches: Micro-batches per batch.
        num_processes: Processes per pipeline.

    Raises:
        ValueError: An unknown schedule, or a number of micro-batches that it cannot run.
    """

    schedule: str
    num_microbatches: int
    num_processes: int

    def __post_init__(self) -> None:
        check_schedule(self.schedule)
        num, processes = self.num_microbatches, self.num_processes
        if num < 1:
            raise ValueError(f"num_microbatches={num}: at least 1")
        if self.schedule == "1f1b" and num < processes:
            raise ValueError(
                f"num_microbatches={num}: schedule='1f1b' needs at least as many as"
                f" pipeline_parallel_size={processes}; use more, or schedule='gpipe'"
            )
        if self.schedule == "interleaved" and num % max(1, num // processes):
            raise ValueError(
                f"num_microbatches={num}: schedule='interleaved' runs them in"
                f" {num // processes} equal rounds; use a multiple of"
                f" pipeline_parallel_size={processes}"
            )

    @property
    def is_interleaved(self) -> bool:
        """Whether a process holds several stages that are not neighbours."""
        return self.schedule == "interleaved"


def check_schedule(name: str) -> None:
    """Refuse an unknown schedule.

    Args:
        name: Name of the schedule.

    Raises:
        ValueError: It is not one of `SCHEDULES`.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule={name!r}: choose one of {', '.join(SCHEDULES)}")


class Pipeline:
    """Runs batches through the stages of all processes of a pipeline.

    All processes of the group must call `train` and `forward` together, with batches of the same
    shape. The batch of the process with the first stage is computed; of the others only the shape
    is used.

    Args:
        stages: The stages of this process, by index.
        num_stages: Stages of the pipeline.
        options: How batches go through it.
        group: The processes of the pipeline.
        device: The device of this process.
        context: Makes the context in which stages and losses run, such as autocast.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        num_stages: int,
        options: PipelineOptions,
        group: dist.ProcessGroup,
        device: torch.device,
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._stages = stages
        self._num_stages = num_stages
        self._options = options
        self._group = group
        self._device = device
        self._context = context
        self._runs: OrderedDict[Hashable, _ShapeRun] = OrderedDict()
        self._loss: MicroLoss | None = None

    def train(
        self, args: Sequence[Tensor], rows: MicroBatches, loss: MicroLoss, frozen: Hashable
    ) -> Tensor:
        """Forward and backward pass of a batch; gradients are added to those of the parameters.

        Args:
            args: The inputs of the first stage, with ``rows.num_rows`` rows each, on the device of
                this process.
            rows: Which rows are in which micro-batch.
            loss: Called on the process with the last stage, for each micro-batch.
            frozen: Identifies which parameters of the pipeline are frozen.

        Returns:
            The sum of the losses, of shape (), on the device of each process. It is summed in
            float64, and has the dtype of the losses.
        """
        run = self._run(args, rows, frozen)
        losses: list[Tensor] = []
        self._loss = loss
        try:
            # The backward pass must not run under autocast; the stages enter it themselves.
            with torch.autocast(self._device.type, enabled=False):
                run.step(args, rows, losses)
        finally:
            self._loss = None
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for each in losses:
            total += each.detach()
        dist.broadcast(total, self._last, group=self._group)
        if run.loss_dtype is None:
            dtypes = [losses[0].dtype if losses else None]
            dist.broadcast_object_list(dtypes, self._last, self._group, self._device)
            run.loss_dtype = dtypes[0]
        return total.to(run.loss_dtype)

    def forward(self, args: Sequence[Tensor], rows: MicroBatches) -> Any:
        """Forward pass of a batch without gradients.

        Args:
            args: As for `train`.
            rows: As for `train`.

        Returns:
            The output of the last stage, with ``rows.num_rows`` rows, on the device of each
            process.
        """
        run = self._run(args, rows, None)
        # The schedule reuses its buffers, which must not be tensors of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            output = rows.unpad(run.step(args, rows, None))
            if run.outputs is None:
                described: list[Any] = [apply_to_collection(output, Tensor, _describe)]
                dist.broadcast_object_list(described, self._last, self._group, self._device)
                run.outputs = described
            if self._num_stages - 1 not in self._stages:
                output = apply_to_collection(run.outputs[0], Tensor, self._receiver, rows.num_rows)
            return apply_to_collection(output, Tensor, self._broadcast)

    def close(self) -> None:
        """Drop all schedules and their buffers."""
        self._runs.clear()

    def _receiver(self, like: Tensor, num_rows: int) -> Tensor:
        return torch.empty((num_rows, *like.shape[1:]), dtype=like.dtype, device=self._device)

    def _broadcast(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        broadcast(tensor, self._last, self._group)
        return tensor

    @property
    def _last(self) -> int:
        """The global rank of the process with the last stage."""
        return dist.get_global_rank(self._group, dist.get_world_size(self._group) - 1)

    def _run(self, args: Sequence[Tensor], rows: MicroBatches, frozen: Hashable) -> "_ShapeRun":
        shapes = tuple((rows.size, arg.shape[1:], arg.dtype) for arg in args)
        dtypes = (torch.is_autocast_enabled(self._device.type), torch.get_default_dtype())
        key = (shapes, dtypes, frozen)
        if key not in self._runs:
            if len(self._runs) == _MAX_KEPT:
                self._runs.popitem(last=False)
            self._runs[key] = self._make(is_training=frozen is not None)
        self._runs.move_to_end(key)
        return self._runs[key]

    def _make(self, is_training: bool) -> "_ShapeRun":
        stages = [
            PipelineStage(
                _ScheduledStage(stage, index, self._context),
                index,
                self._num_stages,
                self._device,
                group=self._group,
            )
            for index, stage in sorted(self._stages.items())
        ]
        schedule = SCHEDULES[self._options.schedule](
            stages if self._options.is_interleaved else stages[0],
            self._options.num_microbatches,
            loss_fn=self._micro_loss if is_training else None,
            # The losses are weighted by their rows instead.
            scale_grads=False,
        )
        return _ShapeRun(schedule, 0 in self._stages, self._num_stages - 1 in self._stages)

    def _micro_loss(self, output: Any, index: Tensor) -> Tensor:
        assert self._loss is not None
        with self._context():
            return self._loss(int(index), output)


class _ShapeRun:
    """A schedule for one shape of batch.

    Attributes:
        outputs: The description of what the last stage returns, in a list; None until known.
        loss_dtype: The dtype of the losses; None until known.
    """

    def __init__(self, schedule: Any, has_first: bool, has_last: bool) -> None:
        self._schedule = schedule
        self._has_first = has_first
        self._has_last = has_last
        self.outputs: list[Any] | None = None
        self.loss_dtype: torch.dtype | None = None

    def step(self, args: Sequence[Tensor], rows: MicroBatches, losses: list[Tensor] | None) -> Any:
        inputs = [rows.pad(arg) for arg in args] if self._has_first else []
        if losses is None or not self._has_last:
            return self._schedule.step(*inputs)
        # Instead of labels, the index of each micro-batch, from which its loss finds its rows.
        return self._schedule.step(*inputs, target=torch.arange(rows.num), losses=losses)


class _ScheduledStage(nn.Module):
    """A stage as a schedule calls it.

    Before the first micro-batch torch calls each stage once to find the shapes of its outputs, and
    all but the first stage with uninitialised memory. The effect of that call on running
    statistics is undone.
    """

    def __init__(
        self, stage: nn.Module, index: int, context: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        super().__init__()
        self._stage = stage
        self._index = index
        self._context = context
        self._calls = 0
        self._before: list[Tensor] = []

    def forward(self, *args: Tensor) -> Any:
        stage = self._stage
        self._calls += 1
        if self._calls == 1:
            self._before = [buffer.clone() for buffer in stage.buffers()]
            if self._index:
                with torch.no_grad():
                    for arg in args:
                        arg.zero_()
        elif self._before:
            with torch.no_grad():
                for buffer, value in zip(stage.buffers(), self._before, strict=True):
                    buffer.copy_(value)
            self._before = []
        with self._context():
            return stage(*args)


def _describe(tensor: Tensor) -> Tensor:
    """A tensor without memory, with the row shape and dtype of another one."""
    return torch.empty((0, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")


@contextmanager
def without_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[list[Tensor | None]]:
    """Clear gradients for a backward pass, and restore them afterwards.

    Yields:
        A list, into which the new gradients of the parameters are put at the end of the context:
        one per parameter, None where it has none.
    """
    before = [parameter.grad for parameter in parameters]
    new: list[Tensor | None] = []
    for parameter in parameters:
        parameter.grad = None
    try:
        yield new
    finally:
        new += [parameter.grad for parameter in parameters]
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
