"""The stages of a pipeline, how batches go through them, and what processes exchange."""

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memmap._compat.modules import apply_to_tensors, set_device_attribute
from lightning_memmap._compat.tensors import copy_all, flatten, take_buckets, unflatten
from lightning_memmap.errors import UnsuitableModuleError
from lightning_memmap.process_group import broadcast
from lightning_memmap.strategies._base import module_tensors, parameters_by_stage, stages_given_by
from lightning_memmap.strategies._meta_device import MetaInitializer, post_order
from lightning_memmap.strategies.microbatch import MicroBatches

#: By name, the classes of schedules of ``torch.distributed.pipelining``.
SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
}
#: Number of schedules that are kept, each with buffers for all of its micro-batches. One is enough
#: unless shapes differ by more than rows, as of padded text, or parameters are frozen in turn.
_MAX_KEPT = 4
#: Gradients are averaged over processes in tensors of about this size.
_BUCKET_BYTES = 25 * 2**20


def check_schedule(schedule: str, num_microbatches: int, num_processes: int) -> None:
    """Raise for a number of micro-batches that a schedule cannot run."""
    num, rounds = num_microbatches, max(1, num_microbatches // num_processes)
    if schedule == "1f1b" and num < num_processes:
        needed = f"at least {num_processes}"
    elif schedule == "interleaved" and num % rounds:
        needed = f"a multiple of {num_processes}"
    else:
        return
    raise ValueError(
        f"num_microbatches={num}: schedule={schedule!r} with {num_processes} processes in a"
        f" pipeline needs {needed}"
    )


class _Stage(nn.Module):
    """Modules one after the other, in the context of a precision plugin, such as autocast."""

    def __init__(self, children: Sequence[nn.Module], context: Any) -> None:
        super().__init__()
        self.chain = nn.ModuleList(children)
        self._context = context

    def forward(self, *args: Any) -> Any:
        """The output of the last module."""
        with self._context():
            for child in self.chain:
                output = child(*args)
                args = output if isinstance(output, tuple) else (output,)
        # Nothing else can be sent.
        return apply_to_collection(output, Tensor, Tensor.contiguous)


def cut_module(
    module: L.LightningModule, num_processes: int, interleaved: bool, context: Any
) -> list[nn.Module]:
    """The stages of a schedule, from those of the module: stage ``i`` is process ``i % P``'s."""
    stages = _stages_of(module)
    if len(stages) < num_processes or (interleaved and len(stages) % num_processes):
        needed = "a multiple of" if interleaved else "at least"
        raise ValueError(
            f"{type(module).__name__}.stages() gives {len(stages)} stages for"
            f" {num_processes} processes of a pipeline: their number must be {needed}"
            f" {num_processes}"
        )
    _check_parameters(module, stages)
    places = _consecutive(len(stages), len(stages) if interleaved else num_processes)
    return [_Stage(stages[own.start : own.stop], context) for own in places]


def keep_local(
    module: Any, stages: Sequence[Any], rank: int, size: int, device: torch.device
) -> dict[int, nn.Module]:
    """Move the stages of this process to its device, and return them by index."""
    # The parameters and buffers of all others go to the meta device: they have a name and a shape
    # but no memory, and every process sees those of the whole module in the same order. What is
    # outside of all stages, such as metrics, is on every process.
    split = (rank, size, len(stages))
    before = getattr(module, "pipeline_split", None)
    if before not in (None, split):
        raise ValueError(
            f"{type(module).__name__} was cut before, and this process holds the stages"
            f" of rank {before[0]} of {before[1]} only: make a new module and load a"
            " checkpoint into it"
        )
    local = {index: stage for index, stage in enumerate(stages) if index % size == rank}
    if before is None:
        own = {each for stage in local.values() for each in stage.modules()}
        remote = {each for stage in stages for each in stage.modules()} - own
        initializer = MetaInitializer(module)
        with _same_parameters():
            for each in dict.fromkeys(post_order(module)):
                if each not in remote:
                    initializer.initialize(each, device)
        kept = {id(tensor) for stage in local.values() for tensor in module_tensors(stage)}
        with _same_parameters():
            for index, stage in enumerate(stages):
                if index not in local:
                    apply_to_tensors(stage, lambda t: t if id(t) in kept else t.to("meta"))
    module.pipeline_split = split
    for each in (module, *local.values()):
        # What `to` is made of, which would refuse what is on the meta device. What is expanded
        # could not be written to.
        apply_to_tensors(each, lambda t: t if t.is_meta else t.to(device).contiguous())
    # Lightning has no public way to set the attribute without moving parameters.
    set_device_attribute(module, device)
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
    known = set(module.parameters())
    for place, name, parameter in parameters_by_stage(module, stages):
        if parameter not in known:
            raise ValueError(
                f"stage {place} has a parameter {name!r} that {type(module).__name__} does not"
                " have, so that no checkpoint would contain it: keep the module that it belongs to"
                " as an attribute"
            )
        if place is None:
            raise ValueError(
                f"no stage has the parameter {name!r} of {type(module).__name__}: put the module"
                " that it belongs to into a stage"
            )


@dataclass(eq=False)
class StagePipeline:
    """Runs batches through the stages of all processes of a pipeline; all call each method."""

    # The batch of the process with the first stage is computed; of the others only the shape is
    # used. Micro-batches have the shape of those of the largest batch so far: a smaller batch, such
    # as the last of an epoch, is filled up with copies of rows, which no loss or output includes.

    module: nn.Module
    #: Those of this process, by index.
    stages: Mapping[int, nn.Module]
    num_stages: int
    schedule: str
    num_microbatches: int
    group: dist.ProcessGroup
    device: torch.device

    def __post_init__(self) -> None:
        #: By shapes and what is frozen, a schedule and the rows of its micro-batches.
        self._runs: dict[Hashable, tuple[Any, int]] = {}
        #: Known after the first training step of each schedule that is made.
        self._loss_dtype: torch.dtype | None = None
        #: The mean loss of a micro-batch, of its number and output.
        self._loss: Callable[[int, Any], Tensor] | None = None
        self._has_last = self.num_stages - 1 in self.stages
        # Instead of labels, the number of each micro-batch, by which its loss finds it.
        self._numbers = torch.arange(self.num_microbatches) if self._has_last else None
        # The global rank of the process with the last stage.
        self._last = dist.get_global_rank(self.group, dist.get_world_size(self.group) - 1)

    def train(
        self, args: Sequence[Tensor], num_rows: int, batch: Any, loss: Callable[[Any, Any], Tensor]
    ) -> Tensor:
        """Forward and backward pass of a batch, whose gradients are added; its loss."""
        schedule, length = self._run(args, num_rows)
        places = _consecutive(num_rows, self.num_microbatches)
        losses: list[Tensor] = []
        if self._has_last:
            parts = MicroBatches.split(batch, [self.device] * len(places), places)

            def weighted(index: int, output: Any) -> Tensor:
                rows = parts.rows[index]
                own = apply_to_collection(output, Tensor, lambda leaf: leaf[: max(1, rows)])
                return loss(own, parts.parts[index]) * (rows / num_rows)

            self._loss = weighted
        try:
            # The backward pass must not run under autocast; the stages enter it themselves.
            with torch.autocast(self.device.type, enabled=False):
                schedule.step(
                    *self._padded(args, places, length),
                    target=self._numbers,
                    losses=losses if self._has_last else None,
                    return_outputs=False,
                )
        finally:
            self._loss = None
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        total = sum((each.detach() for each in losses), zero)
        dist.broadcast(total, self._last, group=self.group)
        if self._loss_dtype is None:
            found = [losses[0].dtype if losses else None]
            dist.broadcast_object_list(found, self._last, self.group, self.device)
            self._loss_dtype = found[0]
        return total.to(self._loss_dtype)

    def evaluate(self, args: Sequence[Tensor], num_rows: int) -> Any:
        """The output of the last stage on every process, without gradients."""
        schedule, length = self._run(args, num_rows)
        places = _consecutive(num_rows, self.num_microbatches)
        output = schedule.eval(*self._padded(args, places, length), target=self._numbers)
        if self._has_last and num_rows < length * len(places):
            rows = [n * length + row for n, own in enumerate(places) for row in range(len(own))]
            output = apply_to_collection(output, Tensor, lambda leaf: leaf[rows])
        return broadcast_nested(output, self._last, self.group, self.device)

    def _padded(self, args: Sequence[Tensor], places: list[range], length: int) -> list[Tensor]:
        """The rows of all micro-batches one after the other, on the first process."""
        if 0 not in self.stages:
            return []
        filled = [own or range(1) for own in places]
        rows = [own[min(row, len(own) - 1)] for own in filled for row in range(length)]
        return [arg[rows] if len(rows) > len(arg) else arg for arg in args]

    def _run(self, args: Sequence[Tensor], num_rows: int) -> tuple[Any, int]:
        """The schedule of a batch, and the rows of its micro-batches."""
        key = (
            tuple((arg.shape[1:], arg.dtype) for arg in args),
            torch.is_autocast_enabled(self.device.type),
            torch.get_default_dtype(),
            # Of all stages: the processes make their schedules together.
            tuple(parameter.requires_grad for parameter in self.module.parameters()),
        )
        size = -(-num_rows // self.num_microbatches)
        if key not in self._runs or self._runs[key][1] < size:
            if len(self._runs) == _MAX_KEPT:
                self._runs.clear()
            self._runs[key] = (self._make(), size)
        return self._runs[key]

    def _make(self) -> Any:
        from lightning_memmap.strategies._scheduled_stage import ScheduledStage, schedule_class

        self._loss_dtype = None
        stages = [
            ScheduledStage(stage, index, self.num_stages, self.device, group=self.group)
            for index, stage in sorted(self.stages.items())
        ]
        return schedule_class(SCHEDULES[self.schedule])(
            stages if self.schedule == "interleaved" else stages[0],
            self.num_microbatches,
            loss_fn=self._micro_loss,
            # The losses are weighted by their rows instead.
            scale_grads=False,
        )

    def _micro_loss(self, output: Any, index: Tensor) -> Tensor:
        if self._loss is None:
            # An evaluation calls this as well.
            return torch.zeros(())
        return self._loss(int(index), output)


def _consecutive(num_rows: int, num_parts: int) -> list[range]:
    bounds = [num_rows * index // num_parts for index in range(num_parts + 1)]
    return [range(*each) for each in itertools.pairwise(bounds)]


# What processes exchange outside of a schedule


def broadcast_nested(
    value: Any,
    source: int,
    group: dist.ProcessGroup,
    device: torch.device,
    keep: Callable[[Tensor], Any] = Tensor.detach,
) -> Any:
    """Broadcast any nesting of tensors and other values, tensor by tensor."""
    tensors: list[Tensor] = []
    described = [None]
    if dist.get_rank() == source:
        apply_to_collection(value, Tensor, tensors.append)
        described = [apply_to_collection(value, Tensor, lambda tensor: tensor.to("meta"))]
    dist.broadcast_object_list(described, source, group, device)
    given = iter(tensors)

    def bring(like: Tensor) -> Any:
        mine = next(given, None)
        tensor = torch.empty_like(like, device=device) if mine is None else mine.to(device)
        broadcast(tensor, source, group)
        return keep(tensor)

    return apply_to_collection(described[0], Tensor, bring)


def average_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average the gradient of each parameter over the processes of a group, which all call this."""
    size = dist.get_world_size(group)
    if size == 1:
        return
    for bucket in take_buckets(parameters, _BUCKET_BYTES):
        missing = [index for index, parameter in enumerate(bucket) if parameter.grad is None]
        # One number per parameter: on how many processes it has a gradient.
        counts = bucket[0].detach().new_ones(len(bucket))
        for index in missing:
            counts[index] = 0
            bucket[index].grad = torch.zeros_like(bucket[index])
        grads: list[Any] = [parameter.grad for parameter in bucket]
        # Divided before the sum, which in float16 might be infinite.
        flat = flatten([counts, *grads]).div_(size)
        dist.all_reduce(flat, group=group)
        counts, *means = unflatten(flat, [counts, *grads])
        copy_all(grads, means)
        # The program waits for the device only where a gradient is missing.
        for index in missing:
            if counts[index] == 0:
                bucket[index].grad = None


def gathered(
    own: Mapping[Any, Any], group: dist.ProcessGroup, device: torch.device
) -> dict[Any, Any]:
    """What all processes of a group have, on its first process; on others nothing."""
    first, *others = dist.get_process_group_ranks(group)
    is_first = dist.get_rank() == first
    whole = dict(own) if is_first else {}
    # Tensors come one by one, to the CPU; what several processes have, the first of them gives.
    for rank in others:
        found = broadcast_nested(
            own, rank, group, device, Tensor.cpu if is_first else lambda _: None
        )
        whole = {**found, **whole} if is_first else {}
    return whole


def module_state(
    module: nn.Module, group: dist.ProcessGroup, device: torch.device
) -> dict[str, Any]:
    """The state of a whole module on the first process of its pipeline, in the module's order."""
    state = module.state_dict()
    remote = _remote(state)
    own = {name: value for name, value in state.items() if name not in remote}
    whole = gathered(own, group, device)
    return {name: whole[name] for name in state} if whole else {}


def _remote(state: Mapping[str, Any]) -> set[str]:
    """The names of what other processes of the pipeline have."""
    return {name for name, t in state.items() if isinstance(t, Tensor) and t.is_meta}


def local_weights(module: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of a whole module, as a process loads them that has only some stages."""
    remote = _remote(module.state_dict())
    return {
        name: torch.empty_like(value, device="meta") if name in remote else value
        for name, value in weights.items()
    }


def local_state(optimizer: Optimizer, state: Mapping[int, Any]) -> dict[int, Any]:
    """The state of an optimizer for those of its parameters that this process has."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    return {
        index: value
        for index, value in state.items()
        if index < len(parameters) and not parameters[index].is_meta
    }
