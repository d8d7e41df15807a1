"""The schedules of a pipeline: one for each shape of batch, made when it is first met."""

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

from lightning_memmap.strategies.pipelining.microbatches import MicroBatches

#: By name, the schedule of torch.
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}
#: Shapes of batches whose schedules, and buffers, are kept.
_MAX_KEPT = 16

#: The loss of a micro-batch, by its number and the output of the last stage.
MicroLoss = Callable[[int, Any], Tensor]


@dataclass(frozen=True)
class PipelineOptions:
    """How batches go through a pipeline.

    Args:
        schedule: ``gpipe``, ``1f1b`` or ``interleaved``.
        num_microbatches: Micro-batches of each batch.
        num_processes: Processes of a pipeline.

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
        """Whether a process holds several stages that do not follow each other."""
        return self.schedule == "interleaved"


def check_schedule(name: str) -> None:
    """Refuse an unknown schedule.

    Raises:
        ValueError: It is not one of `SCHEDULES`.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule={name!r}: choose one of {', '.join(SCHEDULES)}")


class Pipeline:
    """Runs batches through the stages of all processes of a pipeline.

    All processes of the group must call `train` and `forward` together, with batches of the same
    shape. Those that hold the first stage put their batch in; the others' is looked at for its
    shape alone.

    Args:
        parts: The stages of this process, by number.
        num_parts: Stages of the pipeline.
        options: How batches go through it.
        group: The processes of the pipeline.
        device: Of this process.
        context: Makes the context in which stages and losses run, such as autocast.
    """

    def __init__(
        self,
        parts: Mapping[int, nn.Module],
        num_parts: int,
        options: PipelineOptions,
        group: dist.ProcessGroup,
        device: torch.device,
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._parts = parts
        self._num_parts = num_parts
        self._options = options
        self._group = group
        self._device = device
        self._context = context
        self._kept: OrderedDict[Hashable, _Run] = OrderedDict()
        self._loss: MicroLoss | None = None

    def train(
        self, args: Sequence[Tensor], rows: MicroBatches, loss: MicroLoss, frozen: Hashable
    ) -> Tensor:
        """Forward and backward pass of a batch; gradients are added to those of the parameters.

        Args:
            args: What the first stage is given, with ``rows.num_rows`` rows each.
            rows: How the rows are dealt.
            loss: Called on the process of the last stage, for each micro-batch.
            frozen: Differs where other parameters of the pipeline are frozen.

        Returns:
            The sum of the losses, without dimensions, on all processes. It is summed in float64,
            and has the dtype of the losses.
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

        Returns:
            What the last stage returned, with ``rows.num_rows`` rows, on all processes.
        """
        run = self._run(args, rows, None)
        # Buffers that are used again must not be tensors of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            output = rows.restore(run.step(args, rows, None))
            if run.outputs is None:
                described: list[Any] = [apply_to_collection(output, Tensor, _Like.of)]
                dist.broadcast_object_list(described, self._last, self._group, self._device)
                run.outputs = described
            if self._num_parts - 1 not in self._parts:
                output = apply_to_collection(
                    run.outputs[0], _Like, lambda like: like.make(rows.num_rows, self._device)
                )
            return apply_to_collection(output, Tensor, self._broadcast)

    def _broadcast(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        dist.broadcast(tensor, self._last, group=self._group)
        return tensor

    @property
    def _last(self) -> int:
        """The global rank of the process that holds the last stage."""
        return dist.get_global_rank(self._group, dist.get_world_size(self._group) - 1)

    def _run(self, args: Sequence[Tensor], rows: MicroBatches, frozen: Hashable) -> "_Run":
        shapes = tuple((rows.size, arg.shape[1:], arg.dtype) for arg in args)
        dtypes = (torch.is_autocast_enabled(self._device.type), torch.get_default_dtype())
        key = (shapes, dtypes, frozen)
        if key not in self._kept:
            if len(self._kept) == _MAX_KEPT:
                self._kept.popitem(last=False)
            self._kept[key] = self._make(is_training=frozen is not None)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _make(self, is_training: bool) -> "_Run":
        stages = [
            PipelineStage(
                _Stage(part, number, self._context),
                number,
                self._num_parts,
                self._device,
                group=self._group,
            )
            for number, part in sorted(self._parts.items())
        ]
        schedule = SCHEDULES[self._options.schedule](
            stages if self._options.is_interleaved else stages[0],
            self._options.num_microbatches,
            loss_fn=self._micro_loss if is_training else None,
            # The losses are weighed by their rows instead.
            scale_grads=False,
        )
        return _Run(schedule, 0 in self._parts, self._num_parts - 1 in self._parts)

    def _micro_loss(self, output: Any, index: Tensor) -> Tensor:
        assert self._loss is not None
        with self._context():
            return self._loss(int(index), output)


class _Run:
    """A schedule for one shape of batch.

    Attributes:
        outputs: What the last stage returns, described; a list of one once that is known.
        loss_dtype: The dtype of the losses, once that is known.
    """

    def __init__(self, schedule: Any, has_first: bool, has_last: bool) -> None:
        self._schedule = schedule
        self._has_first = has_first
        self._has_last = has_last
        self.outputs: list[Any] | None = None
        self.loss_dtype: torch.dtype | None = None

    def step(self, args: Sequence[Tensor], rows: MicroBatches, losses: list[Tensor] | None) -> Any:
        inputs = [rows.lay_out(arg) for arg in args] if self._has_first else []
        if losses is None or not self._has_last:
            return self._schedule.step(*inputs)
        # Not the labels, but the number of each micro-batch: its loss is told which rows it has.
        return self._schedule.step(*inputs, target=torch.arange(rows.num), losses=losses)


class _Stage(nn.Module):
    """A stage as a schedule calls it.

    Before the first micro-batch torch calls each stage once, to learn what it returns, and all but
    the first one with memory that nobody has written. What that call does to running statistics
    is undone.
    """

    def __init__(
        self, part: nn.Module, number: int, context: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        super().__init__()
        self._part = part
        self._number = number
        self._context = context
        self._calls = 0
        self._before: list[Tensor] = []

    def forward(self, *args: Tensor) -> Any:
        part = self._part
        self._calls += 1
        if self._calls == 1:
            self._before = [buffer.clone() for buffer in part.buffers()]
            if self._number:
                with torch.no_grad():
                    for arg in args:
                        arg.zero_()
        elif self._before:
            with torch.no_grad():
                for buffer, value in zip(part.buffers(), self._before, strict=True):
                    buffer.copy_(value)
            self._before = []
        with self._context():
            return part(*args)


@dataclass(frozen=True)
class _Like:
    """What must be known of a tensor to receive one like it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "_Like":
        return cls(tuple(tensor.shape[1:]), tensor.dtype)

    def make(self, num_rows: int, device: torch.device) -> Tensor:
        return torch.empty((num_rows, *self.shape), dtype=self.dtype, device=device)


@contextmanager
def without_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[list[Tensor | None]]:
    """Let a backward pass find no gradients, and put back what was there.

    Yields:
        A list that is empty, and after the context the new gradients of the parameters.
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
