"""The stages of a module: the layers it returns, and their parameters."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_memmap.errors import UnsuitableModuleError, with_article


def module_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a module and its submodules."""
    yield from module.parameters()
    yield from module.buffers()


def stages_of(module: Any) -> list[nn.Module]:
    """Return the stages that the module's method ``stages`` returns."""
    # It may return an nn.ModuleList or nn.Sequential instead of a list.
    stages = list(module.stages())
    for stage in stages:
        if not isinstance(stage, nn.Module):
            raise UnsuitableModuleError(
                f"{type(module).__name__}.stages() returned"
                f" {with_article(type(stage).__name__)}: return modules"
            )
    return stages


def parameters_by_stage(
    module: nn.Module, stages: Sequence[nn.Module]
) -> list[tuple[int | None, str, nn.Parameter]]:
    """Return the stage (None outside of all), the name and the object of each parameter.

    Raises:
        ValueError: Two stages, or a stage and the rest of the module, share a parameter.
    """
    names = {child: f"{name}." for name, child in module.named_modules()}
    staged = [(index, child) for index, stage in enumerate(stages) for child in stage.modules()]
    outside = names.keys() - {child for _, child in staged}
    parameters = [
        (stage, (names.get(child, "(no attribute).") + name).lstrip("."), parameter)
        for stage, child in (*staged, *((None, child) for child in names if child in outside))
        for name, parameter in child.named_parameters(recurse=False)
    ]
    first: dict[nn.Parameter, tuple[int | None, str]] = {}
    for stage, name, parameter in parameters:
        first_stage, first_name = first.setdefault(parameter, (stage, name))
        if first_stage != stage:
            raise ValueError(
                f"{first_name} ({_label(first_stage)}) and {name} ({_label(stage)}) are one"
                " parameter: put the layers that share it into one item of stages(), or untie them"
            )
    return parameters


def _label(stage: int | None) -> str:
    return "outside the stages" if stage is None else f"stage {stage}"
