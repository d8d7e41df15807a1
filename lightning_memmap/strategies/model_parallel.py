"""``memmap_model_parallel``: the layers of one model over several devices, in one process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_memmap.placement import check_device
from lightning_memmap.strategies._base import module_tensors
from lightning_memmap.strategies.superbatch import SuperBatchStrategy


@dataclass(frozen=True)
class Stage:
    """The layers on one device."""

    device: torch.device
    names: tuple[str, ...]
    layers: tuple[nn.Module, ...]

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters of its layers."""
        return _parameter_bytes(self.layers)


class LocalModelParallelStrategy(SuperBatchStrategy):
    """Trains one model whose layers are divided among several devices, in one process.

    Each of the Trainer's devices holds a stage of the model; the first, the root device, receives
    the super-batches, which are those of ``memmap_superbatch``. Activations move from stage to
    stage by themselves, and what the last layer returns comes back to the root device, so that a
    ``training_step`` such as ``loss(self.net(x), y)`` stays as it is.

    Args:
        layers: Name of the ``nn.Sequential`` or ``nn.ModuleList`` in the module that is cut into
            stages, so that the one with most parameter bytes has as few as possible. By default
            its only attribute that is an ``nn.Sequential``. A module may name its stages itself, in
            an attribute or method ``model_parallel_stages``: for each device a submodule, or its
            name, or a list of them.
        **kwargs: As for ``memmap_superbatch``.

    Raises:
        ValueError: As for ``memmap_superbatch``; at set-up, there is nothing to cut, there are
            fewer layers than devices, the stages that the module names are not one for each device,
            or two stages share a layer or a parameter.
    """

    strategy_name = "memmap_model_parallel"
    _trains_alone = False

    def __init__(self, layers: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._layers = layers
        self._stages: list[Stage] = []
        self._hooks: list[RemovableHandle] = []

    @property
    def stages(self) -> list[Stage]:
        """The stages of the model, from set-up to teardown; elsewhere none."""
        return self._stages

    @override
    def setup(self, trainer: Trainer) -> None:
        for device in self.parallel_devices:
            check_device(device)
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            # Lightning has moved the initial state of optimizers to the root device.
            for optimizer in self.optimizers:
                optimizer.load_state_dict(optimizer.state_dict())

    @override
    def model_to_device(self) -> None:
        self._stages = find_stages(self.module, self.parallel_devices, self._layers)
        move_stages(self.module, self._stages)
        self._hooks = connect_stages(self._stages)

    @override
    def teardown(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._stages = []
        self._hooks = []
        super().teardown()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # An optimizer loads each tensor to the device of its parameter; Lightning would move it.
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)


def find_stages(
    module: nn.Module, devices: Sequence[torch.device], layers: str | None = None
) -> list[Stage]:
    """Find the stages of a module: those that it names itself, or an even cut of its layers."""
    given = getattr(module, "model_parallel_stages", None)
    if given is not None and layers is not None:
        raise ValueError(
            f"layers={layers!r}: the module names its model_parallel_stages itself; leave out one"
            " of the two"
        )
    if given is not None:
        cut = _named_stages(module, given() if callable(given) else given, len(devices))
    else:
        name, sequence = _find_sequence(module, layers)
        # A layer that occurs twice counts twice.
        children = sequence._modules.items()
        found = [(f"{name}.{key}", layer) for key, layer in children if layer is not None]
        if len(found) < len(devices):
            raise ValueError(
                f"{name} has {len(found)} layers for {len(devices)} devices: use at most"
                f" Trainer(devices={len(found)}), or name model_parallel_stages"
            )
        bounds = even_cut([_parameter_bytes([layer]) for _, layer in found], len(devices))
        cut = [found[start:stop] for start, stop in pairwise(bounds)]
    _check_disjoint(module, cut)
    return [
        Stage(device, tuple(name for name, _ in stage), tuple(layer for _, layer in stage))
        for device, stage in zip(devices, cut, strict=True)
    ]


def even_cut(loads: Sequence[int], num_stages: int) -> list[int]:
    """Cut a sequence into contiguous stages so that the largest sum is as small as possible."""
    sums = [0, *accumulate(loads)]

    @cache
    def best(stop: int, num: int) -> tuple[int, list[int]]:
        """The smallest largest sum of the first items in a number of stages, and its bounds."""
        if num == 1:
            return sums[stop], [0, stop]
        cuts = ((start, *best(start, num - 1)) for start in range(num - 1, stop))
        return min((max(most, sums[stop] - sums[start]), [*b, stop]) for start, most, b in cuts)

    return best(len(loads), num_stages)[1]


def move_stages(module: Any, stages: Sequence[Stage]) -> None:
    """Move each stage to its device and the rest of the module to the first one."""
    root = stages[0].device
    layers = [(layer, stage.device) for stage in stages for layer in stage.layers]
    staged = {id(tensor) for layer, _ in layers for tensor in module_tensors(layer)}
    # What `to` is made of; and Lightning has no public way to set the attribute without it.
    module._apply(lambda tensor: tensor if id(tensor) in staged else tensor.to(root))
    _update_properties(module, device=root)
    for layer, device in layers:
        layer.to(device)


def connect_stages(stages: Sequence[Stage]) -> list[RemovableHandle]:
    """Move tensors between stages whenever layers are called."""
    handles = [
        layer.register_forward_pre_hook(partial(_move_inputs, stage.device), with_kwargs=True)
        for stage in stages
        for layer in dict.fromkeys(stage.layers)
    ]
    root = stages[0].device
    handles.append(
        stages[-1]
        .layers[-1]
        .register_forward_hook(lambda layer, arguments, output: move_data_to_device(output, root))
    )
    return handles


def _move_inputs(device: torch.device, layer: nn.Module, args: Any, kwargs: Any) -> Any:
    return move_data_to_device(args, device), move_data_to_device(kwargs, device)


def _named_stages(
    module: nn.Module, given: Any, num_devices: int
) -> list[list[tuple[str, nn.Module]]]:
    stages = list(given)
    if len(stages) != num_devices:
        raise ValueError(
            f"model_parallel_stages names {len(stages)} stages for {num_devices} devices: there"
            f" must be one for each; use Trainer(devices={len(stages)})"
        )
    names = {child: name for name, child in module.named_modules()}
    cut = []
    for index, stage in enumerate(stages):
        items = stage if isinstance(stage, (list, tuple)) else [stage]
        layers = []
        for item in items:
            try:
                layer = module.get_submodule(item) if isinstance(item, str) else item
            except AttributeError:
                layer = None
            if not isinstance(layer, nn.Module) or not names.get(layer):
                raise ValueError(
                    f"model_parallel_stages: {item!r} in stage {index} is not in the module;"
                    " give submodules of it, or their names"
                )
            layers.append((names[layer], layer))
        if not layers:
            raise ValueError(f"model_parallel_stages: stage {index} has no layers")
        cut.append(layers)
    return cut


def _find_sequence(module: nn.Module, layers: str | None) -> tuple[str, nn.Module]:
    if layers is not None:
        try:
            sequence = module.get_submodule(layers)
        except AttributeError:
            sequence = None
        if not isinstance(sequence, (nn.Sequential, nn.ModuleList)):
            raise ValueError(
                f"layers={layers!r}: the module has no nn.Sequential or nn.ModuleList of that name"
            )
        return layers, sequence
    found = {n: child for n, child in module.named_children() if isinstance(child, nn.Sequential)}
    if len(found) != 1:
        raise ValueError(
            f"the module has {len(found)} attributes that are an nn.Sequential {list(found)}, and"
            " one is needed to cut it: choose one with LocalModelParallelStrategy(layers=NAME), or"
            " name model_parallel_stages in the module"
        )
    return next(iter(found.items()))


def _check_disjoint(module: nn.Module, cut: list[list[tuple[str, nn.Module]]]) -> None:
    """Check that no parameter is in two stages, or both in a stage and outside."""
    inside = {child for stage in cut for _, layer in stage for child in layer.modules()}
    found: list[tuple[int | None, str, nn.Parameter]] = [
        (index, f"{name}.{own}", parameter)
        for index, stage in enumerate(cut)
        for name, layer in stage
        for own, parameter in layer.named_parameters()
    ]
    found += [
        (None, f"{name}.{own}".lstrip("."), parameter)
        for name, child in module.named_modules()
        if child not in inside
        for own, parameter in child.named_parameters(recurse=False)
    ]
    owners: dict[nn.Parameter, tuple[int | None, str]] = {}
    for index, name, parameter in found:
        other, other_name = owners.setdefault(parameter, (index, name))
        if other != index:
            raise ValueError(
                f"{other_name} ({_stage_name(other)}) and {name} ({_stage_name(index)}) are one"
                " parameter, which can only be on one device: put both layers into one stage with"
                " model_parallel_stages, or untie them"
            )


def _stage_name(index: int | None) -> str:
    return "outside the stages, on the root device" if index is None else f"stage {index}"


def _parameter_bytes(layers: Sequence[nn.Module]) -> int:
    return sum(p.nbytes for p in nn.ModuleList(layers).parameters())
