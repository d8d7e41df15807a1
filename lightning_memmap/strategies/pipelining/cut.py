"""Cutting a module into the stages of a pipeline, of which a process keeps its own."""

from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_memmap._compat.modules import (
    apply_to_tensors,
    explain_missing_memory,
    same_parameters,
    set_device_attribute,
)
from lightning_memmap.errors import UnsuitableModuleError
from lightning_memmap.strategies.common.meta_device import MetaInitializer, post_order
from lightning_memmap.strategies.common.split_rows import even_ranges
from lightning_memmap.strategies.common.stages import module_tensors, parameters_by_stage, stages_of


class _Stage(nn.Module):
    """Consecutive modules, run in the context of a precision plugin, such as autocast."""

    def __init__(self, children: Sequence[nn.Module], context: Any) -> None:
        super().__init__()
        self.chain = nn.ModuleList(children)
        self._context = context

    def forward(self, *args: Any) -> Any:
        """Return the output of the last module."""
        with self._context():
            for child in self.chain:
                output = child(*args)
                args = output if isinstance(output, tuple) else (output,)
        # Only contiguous tensors can be sent.
        return apply_to_collection(output, Tensor, Tensor.contiguous)


def cut_module(
    module: L.LightningModule, num_processes: int, interleaved: bool, context: Any
) -> list[nn.Module]:
    """Merge the module's stages into the schedule's: process ``i % P`` runs stage ``i``."""
    stages = _checked_stages(module)
    if len(stages) < num_processes or (interleaved and len(stages) % num_processes):
        needed = "a multiple of" if interleaved else "at least"
        raise ValueError(
            f"{type(module).__name__}.stages() returns {len(stages)} stages for {num_processes}"
            f" processes of a pipeline: return {needed} {num_processes}"
        )
    _check_parameters(module, stages)
    ranges = even_ranges(len(stages), len(stages) if interleaved else num_processes)
    return [_Stage(stages[indices.start : indices.stop], context) for indices in ranges]


def keep_local(
    module: Any, stages: Sequence[Any], rank: int, size: int, device: torch.device
) -> dict[int, nn.Module]:
    """Move the stages of this process to its device, and all others to the meta device.

    Parameters and buffers on the meta device have a name and a shape but no memory, so every
    process sees the names of the whole module in one order. Modules outside of all stages, such as
    metrics, are on every process.

    Returns:
        The stages of this process, by index.
    """
    split = (rank, size, len(stages))
    before = getattr(module, "pipeline_split", None)
    if before not in (None, split):
        raise ValueError(_missing_stages(module, *before[:2]))
    local = {index: stage for index, stage in enumerate(stages) if index % size == rank}
    if before is None:
        _drop_remote(module, stages, local, device)
        # Other strategies move the module, even in their teardown.
        explain_missing_memory(module, _missing_stages(module, rank, size))
    module.pipeline_split = split
    for root in (module, *local.values()):
        # `to` would raise for tensors on the meta device. Expanded tensors can't be written to.
        apply_to_tensors(root, lambda t: t if t.is_meta else t.to(device).contiguous())
    set_device_attribute(module, device)
    return local


def _missing_stages(module: nn.Module, rank: int, size: int) -> str:
    return (
        f"{type(module).__name__} was cut by memmap_pipeline, and this process holds only the"
        f" stages of rank {rank} of {size}: load a checkpoint into a new module"
    )


def _drop_remote(
    module: Any, stages: Sequence[Any], local: Mapping[int, nn.Module], device: torch.device
) -> None:
    """Initialise what this process has, and move everything else to the meta device."""
    local_modules = {child for stage in local.values() for child in stage.modules()}
    remote_modules = {child for stage in stages for child in stage.modules()} - local_modules
    initializer = MetaInitializer(module)
    for child in dict.fromkeys(post_order(module)):
        if child not in remote_modules:
            initializer.initialize(child, device)
    kept = {id(tensor) for stage in local.values() for tensor in module_tensors(stage)}
    with same_parameters():
        for index, stage in enumerate(stages):
            if index not in local:
                apply_to_tensors(stage, lambda t: t if id(t) in kept else t.to("meta"))


def _checked_stages(module: L.LightningModule) -> list[nn.Module]:
    for name, signature in (
        ("stages", "stages() -> list[nn.Module], the consecutive modules of forward"),
        ("loss", "loss(output, batch) -> Tensor, the mean loss over the rows of a batch"),
    ):
        if not callable(getattr(module, name, None)):
            raise UnsuitableModuleError(
                f"memmap_pipeline: {type(module).__name__} needs a method {signature}"
            )
    return stages_of(module)


def _check_parameters(module: L.LightningModule, stages: Sequence[nn.Module]) -> None:
    """Check that each parameter of the module is in a stage, and the reverse."""
    parameters = set(module.parameters())
    for stage, name, parameter in parameters_by_stage(module, stages):
        if parameter not in parameters:
            raise ValueError(
                f"stage {stage} has a parameter {name!r} that isn't in {type(module).__name__}, and"
                " in no checkpoint: keep the module that it belongs to as an attribute"
            )
        if stage is None:
            raise ValueError(
                f"no stage has the parameter {name!r} of {type(module).__name__}: put the module"
                " that it belongs to into a stage"
            )
