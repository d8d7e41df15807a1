"""The stages of a pipeline: which process holds which, and how batches go through them."""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning_utilities.core.apply_func import apply_to_collection
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from lightning_memmap.errors import UnsuitableModuleError
from lightning_memmap.strategies._base import module_tensors, stages_given_by
from lightning_memmap.strategies._pipeline_state import broadcast_nested
from lightning_memmap.strategies.microbatch import MicroBatches

#: By name, the schedules of torch.
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}
#: Number of schedules that are kept, each with buffers for all of its micro-batches. One is enough
#: unless shapes differ by more than rows, as of padded text, or parameters are frozen in turn.
_MAX_KEPT = 4

#: Computes the mean loss of the rows of a micro-batch, from its number and the last stage's output.
MicroLoss = Callable[[int, Any], Tensor]
#: Makes the context in which stages and losses run.
Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Layout:
    """A grid of processes: each row is a pipeline, each column holds the same stages."""

    data_parallel_size: int
    pipeline_size: int
    rank: int

    @classmethod
    def of(
        cls, world_size: int, rank: int, data_parallel_size: int | str, pipeline_size: int | str
    ) -> "Layout":
        """``auto`` is what the other size leaves; if both are, there is one pipeline."""
        data, pipeline = data_parallel_size, pipeline_size
        if isinstance(data, str):
            data = 1 if isinstance(pipeline, str) else world_size // pipeline
        if isinstance(pipeline, str):
            pipeline = world_size // data
        if data * pipeline != world_size or data < 1:
            raise ValueError(
                f"data_parallel_size={data_parallel_size} x pipeline_parallel_size={pipeline_size}"
                f" does not make {world_size} processes (devices x num_nodes): choose sizes that"
                " multiply to it, or leave one at 'auto'"
            )
        return cls(data, pipeline, rank)

    @property
    def data_parallel_rank(self) -> int:
        """Index of this process's pipeline."""
        return self.rank // self.pipeline_size

    @property
    def pipeline_rank(self) -> int:
        """Rank of this process within its pipeline."""
        return self.rank % self.pipeline_size


def check_schedule(schedule: str, num_microbatches: int, num_processes: int) -> None:
    """Refuse a number of micro-batches that a schedule cannot run."""
    num = num_microbatches
    if num < 1:
        raise ValueError(f"num_microbatches={num}: at least 1")
    if schedule == "1f1b" and num < num_processes:
        raise ValueError(
            f"num_microbatches={num}: schedule='1f1b' needs at least as many as"
            f" pipeline_parallel_size={num_processes}; use more, or schedule='gpipe'"
        )
    if schedule == "interleaved" and num % max(1, num // num_processes):
        raise ValueError(
            f"num_microbatches={num}: schedule='interleaved' runs them in"
            f" {num // num_processes} equal rounds; use a multiple of"
            f" pipeline_parallel_size={num_processes}"
        )


class _Stage(nn.Module):
    """Modules one after the other, in the context of a precision plugin, such as autocast."""

    def __init__(self, children: Sequence[nn.Module], context: Context) -> None:
        super().__init__()
        self.chain = nn.ModuleList(children)
        self._context = context

    def forward(self, *args: Any) -> Any:
        """The output of the last module."""
        with self._context():
            for child in self.chain:
                output = child(*args)
                args = output if isinstance(output, tuple) else (output,)
        return output


def cut_module(
    module: L.LightningModule, num_processes: int, interleaved: bool, context: Context
) -> list[nn.Module]:
    """The stages of a schedule, from those of the module: stage ``i`` is process ``i % P``'s."""
    stages = _stages_of(module)
    if len(stages) < num_processes or (interleaved and len(stages) % num_processes):
        needed = "a multiple of" if interleaved else "at least"
        raise ValueError(
            f"{type(module).__name__}.stages() gives {len(stages)} stages for"
            f" {num_processes} processes of a pipeline: their number must be {needed}"
            " pipeline_parallel_size"
        )
    _check_parameters(module, stages)
    num = len(stages) if interleaved else num_processes
    bounds = [len(stages) * index // num for index in range(num + 1)]
    return [_Stage(stages[first:last], context) for first, last in itertools.pairwise(bounds)]


def keep_local(
    module: Any, stages: Sequence[Any], layout: Layout, device: torch.device
) -> dict[int, nn.Module]:
    """Move the stages of this process to its device, and return them by index."""
    # The parameters and buffers of all others go to the meta device: they have a name and a shape
    # but no memory, and every process sees those of the whole module in the same order. What is
    # outside of all stages, such as metrics, is on every process.
    split = (layout.pipeline_rank, layout.pipeline_size, len(stages))
    before = getattr(module, "pipeline_split", None)
    if before not in (None, split):
        raise ValueError(
            f"{type(module).__name__} was cut before, and this process holds the stages"
            f" of rank {before[0]} of {before[1]} only: make a new module and load a"
            " checkpoint into it"
        )
    rank, size = layout.pipeline_rank, layout.pipeline_size
    local = {index: stage for index, stage in enumerate(stages) if index % size == rank}
    if before is None:
        for stage in local.values():
            # If a tensor of it is on the meta device, all are reset by reset_parameters.
            _materialize_distributed_module(stage, device)
        kept = {id(tensor) for stage in local.values() for tensor in module_tensors(stage)}
        with _same_parameters():
            for index, stage in enumerate(stages):
                if index not in local:
                    stage._apply(lambda t: t if id(t) in kept else t.to("meta"))
    module.pipeline_split = split
    for each in (module, *local.values()):
        # What `to` is made of, which would refuse what is on the meta device.
        each._apply(lambda t: t if t.is_meta else t.to(device))
    # Lightning has no public way to set the attribute without moving parameters.
    _update_properties(module, device=device)
    return local


@contextmanager
def _same_parameters() -> Iterator[None]:
    """Let `Module._apply` keep parameters the same objects, and tied ones tied."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _stages_of(module: L.LightningModule) -> list[nn.Module]:
    for name, what in (
        ("stages", "stages() -> list[nn.Module], the consecutive modules of forward"),
        ("loss", "loss(output, batch) -> Tensor, the mean loss over the rows of a batch"),
    ):
        if not callable(getattr(module, name, None)):
            raise UnsuitableModuleError(
                f"memmap_pipeline: {type(module).__name__} needs a method {what}"
            )
    return stages_given_by(module)


def _check_parameters(module: L.LightningModule, stages: Sequence[nn.Module]) -> None:
    names = {id(p): name for name, p in module.named_parameters()}
    aliases = {(id(p), name) for name, p in module.named_parameters(remove_duplicate=False)}
    first: dict[int, int] = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            if id(parameter) not in names:
                raise ValueError(
                    f"stage {index} has a parameter {name!r} that {type(module).__name__} does"
                    " not have, so that no checkpoint would contain it: keep the module that it"
                    " belongs to as an attribute"
                )
            other = first.setdefault(id(parameter), index)
            if other != index:
                called = sorted(alias for of, alias in aliases if of == id(parameter))
                raise ValueError(
                    f"stages {other} and {index} share the parameter {' = '.join(called)}:"
                    " memmap_pipeline holds each parameter on one process; untie them, or put the"
                    " modules that share it into one stage"
                )
    if outside := [name for of, name in names.items() if of not in first]:
        raise ValueError(
            f"no stage has the parameters {', '.join(map(repr, outside))} of"
            f" {type(module).__name__}: put the modules that they belong to into a stage"
        )


class StagePipeline:
    """Runs batches through the stages of all processes of a pipeline; all call each method."""

    # The batch of the process with the first stage is computed; of the others only the shape is
    # used. Micro-batches have the shape of those of the largest batch so far: a smaller batch, such
    # as the last of an epoch, is filled up with copies of rows, which no loss or output includes.

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        num_stages: int,
        schedule: str,
        num_microbatches: int,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._stages = stages
        self._num_stages = num_stages
        self._schedule = schedule
        self._num = num_microbatches
        self._group = group
        self._device = device
        self._runs: OrderedDict[tuple[Hashable, Hashable], _Run] = OrderedDict()
        self._loss: MicroLoss | None = None
        self._has_last = num_stages - 1 in stages
        # Instead of labels, the number of each micro-batch, by which its loss finds it.
        self._numbers = torch.arange(num_microbatches) if self._has_last else None
        # The global rank of the process with the last stage.
        self._last = dist.get_global_rank(group, dist.get_world_size(group) - 1)

    def train(
        self,
        args: Sequence[Tensor],
        num_rows: int,
        batch: Any,
        loss: Callable[[Any, Any], Tensor],
        frozen: Hashable,
    ) -> Tensor:
        """Forward and backward pass of a batch; gradients are added to those of the parameters."""
        run = self._run(args, num_rows, frozen)
        losses: list[Tensor] = []
        if self._has_last:
            parts = MicroBatches.split_padded(batch, self._num, num_rows, run.padded_rows)

            def weighted(index: int, output: Any) -> Tensor:
                count = parts.rows[index]
                # Of a micro-batch without rows, a copy of one, with weight 0.
                own = [_first_rows(each, count or 1) for each in (output, parts.parts[index])]
                return loss(*own) * (count / num_rows)

            self._loss = weighted
        try:
            # The backward pass must not run under autocast; the stages enter it themselves.
            with torch.autocast(self._device.type, enabled=False):
                run.schedule.step(
                    *self._padded(args, num_rows, run),
                    target=self._numbers,
                    losses=losses if self._has_last else None,
                    return_outputs=False,
                )
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

    def evaluate(self, args: Sequence[Tensor], num_rows: int) -> Any:
        """The output of the last stage on every process, without gradients."""
        run = self._run(args, num_rows, None)
        # The schedule reuses its buffers, which must not be tensors of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            output = run.schedule.eval(*self._padded(args, num_rows, run), target=self._numbers)
            if self._has_last:
                size = run.padded_rows
                rows = MicroBatches.split_padded(args, self._num, num_rows, size)
                output = rows.merge(
                    [
                        apply_to_collection(output, Tensor, lambda t, i=i: t[i * size :][:size])
                        for i in range(self._num)
                    ]
                )
            return broadcast_nested(output, self._last, self._group, self._device)

    def close(self) -> None:
        """Drop all schedules and their buffers."""
        self._runs.clear()

    def _padded(self, args: Sequence[Tensor], num_rows: int, run: "_Run") -> list[Tensor]:
        """The rows of all micro-batches one after the other, on the first process."""
        if 0 not in self._stages:
            return []
        if num_rows == self._num * run.padded_rows:
            return list(args)
        parts = MicroBatches.split_padded(list(args), self._num, num_rows, run.padded_rows).parts
        return [torch.cat(columns) for columns in zip(*parts, strict=True)]

    def _run(self, args: Sequence[Tensor], num_rows: int, frozen: Hashable) -> "_Run":
        """The schedule of a batch; of an evaluation, for which nothing is frozen, any."""
        shapes = (
            tuple((arg.shape[1:], arg.dtype) for arg in args),
            torch.is_autocast_enabled(self._device.type),
            torch.get_default_dtype(),
        )
        key: tuple[Hashable, Hashable] = (shapes, frozen)
        if frozen is None:
            key = next((known for known in self._runs if known[0] == shapes), key)
        size = -(-num_rows // self._num)
        if key not in self._runs or self._runs[key].padded_rows < size:
            self._runs.pop(key, None)
            if len(self._runs) == _MAX_KEPT:
                self._runs.popitem(last=False)
            self._runs[key] = _Run(self._make(), size)
        self._runs.move_to_end(key)
        return self._runs[key]

    def _make(self) -> Any:
        stages = [
            _ScheduledStage(stage, index, self._num_stages, self._device, group=self._group)
            for index, stage in sorted(self._stages.items())
        ]
        return SCHEDULES[self._schedule](
            stages if self._schedule == "interleaved" else stages[0],
            self._num,
            loss_fn=self._micro_loss,
            # The losses are weighted by their rows instead.
            scale_grads=False,
        )

    def _micro_loss(self, output: Any, index: Tensor) -> Tensor:
        if self._loss is None:
            # An evaluation calls this as well.
            return torch.zeros(())
        return self._loss(int(index), output)


@dataclass
class _Run:
    """A schedule for one shape of micro-batches, and what is known of its loss."""

    schedule: Any
    padded_rows: int
    loss_dtype: torch.dtype | None = None


class _ScheduledStage(PipelineStage):
    """A stage whose first call leaves no trace."""

    # To find the shapes of outputs, torch calls each stage once by `_compute_outputs`, all but the
    # first with uninitialised memory, and cleans up after their backward pass.

    _before: Sequence[Tensor] = ()

    def _compute_outputs(self, *args: Tensor, module: nn.Module, **kwargs: Any) -> Any:
        self._before = [buffer.clone() for buffer in module.buffers()]
        with torch.no_grad():
            for arg in () if self.is_first else args:
                arg.zero_()
        return super()._compute_outputs(*args, module=module, **kwargs)

    def _post_metadata_inference_cleanup(self) -> None:
        super()._post_metadata_inference_cleanup()
        with torch.no_grad():
            for buffer, value in zip(self.submod.buffers(), self._before, strict=True):
                buffer.copy_(value)
        self._before = ()


def _first_rows(batch: Any, num_rows: int) -> Any:
    """The first rows of any nesting; tensors without dimensions and other values stay."""

    def first(leaf: Any) -> Any:
        return leaf[:num_rows] if leaf.ndim else leaf

    return apply_to_collection(batch, (Tensor, TensorDictBase), first)
