"""The stages of a module: which ones each process of a pipeline holds."""

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_memmap._compat.modules import materialize, set_device_attribute
from lightning_memmap.errors import UnsuitableModuleError, with_article
from lightning_memmap.strategies.pipelining.groups import Layout


class Chain(nn.Module):
    """Modules one after the other: a tuple that one returns is the arguments of the next.

    Args:
        children: The modules, at least one.
    """

    def __init__(self, children: Sequence[nn.Module]) -> None:
        super().__init__()
        self.chain = nn.ModuleList(children)

    def forward(self, *args: Any) -> Any:
        """The output of the last module.

        Args:
            args: What the first module is called with.
        """
        for child in self.chain:
            output = child(*args)
            args = output if isinstance(output, tuple) else (output,)
        return output


class Stages:
    """The stages of a LightningModule, one or several for each process of a pipeline.

    After `keep_local`, the stages of this process are on its device, and the parameters and
    buffers of all others are on the meta device: they have a name and a shape but no memory, so
    that every process sees the parameters of the whole module in the same order.

    Args:
        module: Has ``stages()``, the consecutive modules whose composition is its forward.
        num_processes: Processes of the pipeline.
        interleaved: Stage ``i`` belongs to process ``i % num_processes``, so that a process may
            hold several. Otherwise neighbouring stages are joined to one stage per process.

    Attributes:
        stages: The stages of the schedule, in order.

    Raises:
        UnsuitableModuleError: The module has no ``stages()``, or it returns something other than
            modules.
        ValueError: There are fewer stages than processes, or the number of interleaved stages is
            not a multiple of theirs; two stages share a parameter; or a parameter is in no stage,
            or not in the module.
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
            bounds = [len(stages) * rank // num_processes for rank in range(num_processes + 1)]
            stages = [
                Chain(stages[first:last]) if last - first > 1 else stages[first]
                for first, last in itertools.pairwise(bounds)
            ]
        self.stages: list[nn.Module] = stages

    def owner(self, stage: int) -> int:
        """The rank within the pipeline of the process that holds a stage.

        Args:
            stage: Index of the stage.

        Returns:
            The rank, below the number of processes of the pipeline.
        """
        return stage % self._num_processes

    def local(self, rank: int) -> dict[int, nn.Module]:
        """The stages of a process.

        Args:
            rank: Rank of the process within the pipeline.

        Returns:
            The stages, by index in the whole pipeline.
        """
        return {i: stage for i, stage in enumerate(self.stages) if self.owner(i) == rank}

    def keep_local(self, rank: int, device: torch.device) -> dict[int, nn.Module]:
        """Keep the stages of one process on a device, and drop the memory of all others.

        Whatever is outside of all stages, such as metrics, is on every process. Modules of the
        local stages that are on the meta device are materialised and reset.

        Args:
            rank: Rank of this process within the pipeline.
            device: The device of this process.

        Returns:
            The local stages, by index.

        Raises:
            ValueError: The module was cut before, for another rank or another pipeline.
        """
        split = (rank, self._num_processes, len(self.stages))
        before = getattr(self._module, "pipeline_split", None)
        if before not in (None, split):
            raise ValueError(
                f"{type(self._module).__name__} was cut before, and this process holds the stages"
                f" of rank {before[0]} of {before[1]} only: make a new module and load a"
                " checkpoint into it"
            )
        self._module.pipeline_split = split  # type: ignore[assignment]
        local = self.local(rank)
        if before is None:
            for stage in local.values():
                materialize(stage, device)
        kept = {id(t) for stage in local.values() for t in module_tensors(stage)}
        meta: dict[int, Tensor] = {}
        for index, stage in enumerate(self.stages):
            if index not in local:
                for submodule in stage.modules():
                    _drop(submodule, kept, meta)
        _move(self._module, device)
        for stage in local.values():
            stage.to(device)
        set_device_attribute(self._module, device)
        return local

    def owners(self) -> dict[int, int]:
        """Which process holds each parameter and buffer.

        Returns:
            By the ``id`` of each parameter and buffer of the stages, the rank within the pipeline.
        """
        owners: dict[int, int] = {}
        for index, stage in enumerate(self.stages):
            for tensor in module_tensors(stage):
                owners.setdefault(id(tensor), self.owner(index))
        return owners


def _stages_of(module: L.LightningModule) -> list[nn.Module]:
    for name, what in (
        ("stages", "stages() -> list[nn.Module], the consecutive modules of forward"),
        ("loss", "loss(output, batch) -> Tensor, the mean loss over the rows of a batch"),
    ):
        if not callable(getattr(module, name, None)):
            raise UnsuitableModuleError(
                f"memmap_pipeline: {type(module).__name__} needs a method {what}"
            )
    # It may be an nn.ModuleList or nn.Sequential instead of a list.
    stages = list(module.stages())  # type: ignore[operator]
    for stage in stages:
        if not isinstance(stage, nn.Module):
            raise UnsuitableModuleError(
                f"{type(module).__name__}.stages() gave {with_article(type(stage).__name__)}:"
                " give modules"
            )
    if not stages:
        raise ValueError(f"{type(module).__name__}.stages() gave no stage: give at least one")
    return stages


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


def train_fields(module: L.LightningModule | None, layout: Layout) -> frozenset[str] | None:
    """The fields of the training rows that a process needs.

    Args:
        module: The module, which may name them in ``input_fields`` and ``loss_fields``.
        layout: The grid of processes, and this process in it.

    Returns:
        Their names; None for all.

    Raises:
        TypeError: The module names only some of them, or not as a tuple.
    """
    inputs, loss = (getattr(module, name, None) for name in ("input_fields", "loss_fields"))
    if inputs is None and loss is None:
        return None
    for name, fields in (("input_fields", inputs), ("loss_fields", loss)):
        if isinstance(fields, str) or not isinstance(fields, Collection):
            raise TypeError(
                f"{type(module).__name__}.{name}={fields!r}: give both input_fields and"
                " loss_fields as tuples of names of fields, or neither"
            )
    if layout.pipeline_size == 1:
        return None
    # In every schedule the first process has the first stage, and the last one the last.
    needed: dict[int, Any] = {0: inputs, layout.pipeline_size - 1: loss}
    return frozenset(needed.get(layout.pipeline_rank, ()))


def module_tensors(module: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers of a module.

    Args:
        module: The module, submodules included.

    Yields:
        The parameters, each once, and then the buffers.
    """
    yield from module.parameters()
    yield from module.buffers()


def _drop(module: nn.Module, kept: Iterable[int], meta: dict[int, Tensor]) -> None:
    """Move a module's own tensors to the meta device, except those kept. Tied ones stay tied."""
    for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
        if id(parameter) not in kept and not parameter.is_meta:
            if id(parameter) not in meta:
                empty: Any = parameter.detach().to("meta")
                # The old one is kept alive, so that no other tensor can get its id.
                meta[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
                meta[-id(parameter)] = parameter
            setattr(module, name, meta[id(parameter)])
    for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
        if id(buffer) not in kept and not buffer.is_meta:
            setattr(module, name, buffer.to("meta"))


def _move(module: nn.Module, device: torch.device) -> None:
    """`nn.Module.to` for all tensors that are not on the meta device, which it would refuse."""
    if not any(tensor.is_meta for tensor in module_tensors(module)):
        module.to(device)
        return
    for child in module.children():
        _move(child, device)
    for name, buffer in list(module.named_buffers(recurse=False)):
        if not buffer.is_meta:
            setattr(module, name, buffer.to(device))
