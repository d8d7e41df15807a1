"""Which consecutive parts of a module each process of a pipeline holds, and which it does not."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_memmap._compat.modules import materialize, tell_device
from lightning_memmap.errors import UnsuitableModuleError


class Chain(nn.Module):
    """Modules one after the other: a tuple that one returns is the arguments of the next.

    Args:
        parts: The modules.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *args: Any) -> Any:
        """What the last module returns."""
        for part in self.parts:
            output = part(*args)
            args = output if isinstance(output, tuple) else (output,)
        return output


class Stages:
    """The stages of a LightningModule, cut into one part or several for each process.

    After `hold`, the stages of this process are on its device, and the parameters and buffers of
    all others are on the meta device: they have a name, a shape and no memory, so that every
    process sees the parameters of the whole module, in the same order.

    Args:
        module: Has ``stages()``, the consecutive parts whose composition is its forward.
        num_processes: Processes of the pipeline.
        interleaved: Deal the stages to the processes in turn, so that a process may hold several
            that do not follow each other. Otherwise neighbours are joined to one stage a process.

    Attributes:
        parts: What runs as one stage of the schedule, in order.

    Raises:
        UnsuitableModuleError: The module has no ``stages()``, or it returns something else than
            modules.
        ValueError: There are fewer stages than processes, or interleaved ones are no multiple of
            them; two stages share a parameter; or a parameter is in no stage, or not in the module.
    """

    def __init__(self, module: L.LightningModule, num_processes: int, interleaved: bool) -> None:
        self._module = module
        self._num_processes = num_processes
        stages = _stages_of(module)
        if len(stages) < num_processes or (interleaved and len(stages) % num_processes):
            needed = "a multiple of" if interleaved else "at least"
            raise ValueError(
                f"{type(module).__name__}.stages() gives {len(stages)} stages for"
                f" {num_processes} processes of a pipeline: their number must be {needed}"
                " pipeline_parallel_size"
            )
        _check_parameters(module, stages)
        if not interleaved:
            bounds = [len(stages) * place // num_processes for place in range(num_processes + 1)]
            stages = [
                Chain(stages[first:last]) if last - first > 1 else stages[first]
                for first, last in itertools.pairwise(bounds)
            ]
        self.parts: list[nn.Module] = stages

    def owner(self, part: int) -> int:
        """The rank within the pipeline of the process that holds a part."""
        return part % self._num_processes

    def held(self, rank: int) -> dict[int, nn.Module]:
        """The parts that a process holds, by their number."""
        return {i: part for i, part in enumerate(self.parts) if self.owner(i) == rank}

    def hold(self, rank: int, device: torch.device) -> None:
        """Leave the parts of one process in this process, on its device, and no others.

        What is outside of all stages, such as metrics, is on every process. Parts of the held ones
        that are on the meta device get memory, and are reset.

        Raises:
            ValueError: The module was cut before, for another place in a pipeline.
        """
        place = (rank, self._num_processes, len(self.parts))
        before = getattr(self._module, "pipeline_place", None)
        if before not in (None, place):
            raise ValueError(
                f"{type(self._module).__name__} was cut before, and this process holds the stages"
                f" of rank {before[0]} of {before[1]} only: make a new module and load a"
                " checkpoint into it"
            )
        self._module.pipeline_place = place  # type: ignore[assignment]
        held = self.held(rank)
        if before is None:
            for part in held.values():
                materialize(part, device)
        kept = {id(t) for part in held.values() for t in _tensors(part)}
        meta: dict[int, Tensor] = {}
        for number, part in enumerate(self.parts):
            if number not in held:
                for submodule in part.modules():
                    _drop(submodule, kept, meta)
        _move(self._module, device)
        for part in held.values():
            part.to(device)
        tell_device(self._module, device)

    def owners(self) -> dict[int, int]:
        """By the ``id`` of each parameter and buffer of the stages, the rank that holds it."""
        owners: dict[int, int] = {}
        for number, part in enumerate(self.parts):
            for tensor in _tensors(part):
                owners.setdefault(id(tensor), self.owner(number))
        return owners


def has_meta_parameters(module: nn.Module) -> bool:
    """Whether some parameter has no memory."""
    return any(parameter.is_meta for parameter in module.parameters())


def _stages_of(module: L.LightningModule) -> list[nn.Module]:
    for name, what in (
        ("stages", "stages() -> list[nn.Module], the consecutive parts of forward"),
        ("loss", "loss(output, batch) -> Tensor, the mean loss over the rows of a batch"),
    ):
        if not callable(getattr(module, name, None)):
            raise UnsuitableModuleError(
                f"memmap_pipeline: {type(module).__name__} needs a method {what}"
            )
    # An nn.ModuleList or nn.Sequential is as good as a list.
    stages = list(module.stages())  # type: ignore[operator]
    for stage in stages:
        if not isinstance(stage, nn.Module):
            raise UnsuitableModuleError(
                f"{type(module).__name__}.stages() gave a {type(stage).__name__}: give modules"
            )
    if not stages:
        raise ValueError(f"{type(module).__name__}.stages() gave no stage: give at least one")
    return stages


def _check_parameters(module: L.LightningModule, stages: Sequence[nn.Module]) -> None:
    names = {id(p): name for name, p in module.named_parameters()}
    aliases = {(id(p), name) for name, p in module.named_parameters(remove_duplicate=False)}
    first: dict[int, int] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            if id(parameter) not in names:
                raise ValueError(
                    f"stage {number} has a parameter {name!r} that {type(module).__name__} has"
                    " not, so that no checkpoint would hold it: keep the module that it belongs to"
                    " as an attribute"
                )
            other = first.setdefault(id(parameter), number)
            if other != number:
                called = sorted(alias for of, alias in aliases if of == id(parameter))
                raise ValueError(
                    f"stages {other} and {number} share the parameter {' = '.join(called)}:"
                    " memmap_pipeline holds each parameter on one process; untie them, or put the"
                    " modules that share it into one stage"
                )
    if outside := [name for of, name in names.items() if of not in first]:
        raise ValueError(
            f"no stage has the parameters {', '.join(map(repr, outside))} of"
            f" {type(module).__name__}: put the modules that they belong to into a stage"
        )


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _drop(module: nn.Module, kept: Iterable[int], meta: dict[int, Tensor]) -> None:
    """Put the module's own tensors on the meta device. Those that are one stay one."""
    for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
        if id(parameter) not in kept and not parameter.is_meta:
            if id(parameter) not in meta:
                empty: Any = parameter.detach().to("meta")
                # The old one is kept as well, so that no other tensor is given its id.
                meta[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
                meta[-id(parameter)] = parameter
            setattr(module, name, meta[id(parameter)])
    for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
        if id(buffer) not in kept and not buffer.is_meta:
            setattr(module, name, buffer.to("meta"))


def _move(module: nn.Module, device: torch.device) -> None:
    """`nn.Module.to`, which refuses modules with parts on the meta device, for the other parts."""
    if not any(tensor.is_meta for tensor in _tensors(module)):
        module.to(device)
        return
    for child in module.children():
        _move(child, device)
    for name, buffer in list(module.named_buffers(recurse=False)):
        if not buffer.is_meta:
            setattr(module, name, buffer.to(device))
