"""``memmap_model_parallel``: the layers of one model over several devices, in one process."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_memmap._compat.modules import apply_to_tensors, set_device_attribute
from lightning_memmap.loading.device_streams import current, has_streams
from lightning_memmap.strategies.common.one_process import OneProcess
from lightning_memmap.strategies.common.stages import module_tensors, parameters_by_stage, stages_of

#: A device, and the layers on it.
Stage = tuple[torch.device, list[nn.Module]]


class LocalModelParallelStrategy(OneProcess):
    """Trains one model whose layers are divided among several devices, in one process.

    Each of the Trainer's devices holds a stage of the model; the first, the root device, receives
    the super-batches, as under ``memmap_superbatch``. Activations are copied from stage to stage,
    and the output of the last layer is copied to the root device, so a ``training_step`` such as
    ``loss(self.net(x), y)`` stays as it is.

    The layers are those that the module's method ``stages`` returns, as for ``memmap_pipeline``, or
    else the items of its only attribute that is an ``nn.Sequential``. They are cut so that the
    largest stage has as few bytes of parameters as possible. To bound the memory of activations,
    use smaller batches and ``Trainer(accumulate_grad_batches=...)``.

    Args:
        data_devices: Devices that hold shards, as for ``memmap_superbatch``.
        **kwargs: As for Lightning's ``SingleDeviceStrategy``.

    Raises:
        ValueError: As for ``memmap_superbatch``; at set-up, there is nothing to cut, there are
            fewer layers than devices, or two stages share a layer or a parameter.
    """

    strategy_name = "memmap_model_parallel"
    _hooks: Sequence[RemovableHandle] = ()

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            # Lightning has moved the initial state of optimizers to the root device.
            for optimizer in self.optimizers:
                optimizer.load_state_dict(optimizer.state_dict())

    @override
    def model_to_device(self) -> None:
        stages = cut_into_stages(self.module, self.parallel_devices)
        move_stages(self.module, stages)
        self._hooks = [*self._connect(stages)]

    def _connect(self, stages: Sequence[Stage]) -> Iterator[RemovableHandle]:
        """Copy the inputs of layers to their device, and the last output to the first device."""
        # A layer without parameters may be in several stages.
        by_layer = {layer: device for device, layers in stages for layer in layers}
        for layer, device in by_layer.items():
            move = partial(_move_inputs, device)
            yield layer.register_forward_pre_hook(move, with_kwargs=True)
            if has_streams(device):
                # Custom kernels, such as Triton's, run on the current device, and tensors created
                # on "cuda" are placed there.
                self.overrides.set(layer, "forward", partial(_forward_on, device, layer.forward))
        move_output = partial(move_data_to_device, device=stages[0][0])
        yield stages[-1][1][-1].register_forward_hook(lambda *call: move_output(call[2]))

    @override
    def teardown(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = ()
        super().teardown()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # An optimizer loads each tensor to the device of its parameter; Lightning would move it.
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)


def cut_into_stages(module: nn.Module, devices: Sequence[torch.device]) -> list[Stage]:
    """Cut the layers of a module into one stage per device, in their order."""
    name, groups = _layer_groups(module)
    if len(groups) < len(devices):
        groups = [[layer] for group in groups for layer in group]
    if len(groups) < len(devices):
        raise ValueError(
            f"{name} has {len(groups)} layers for {len(devices)} devices: use at most"
            f" Trainer(devices={len(groups)}), or divide it into more"
        )
    loads = [sum(p.nbytes for p in nn.ModuleList(group).parameters()) for group in groups]
    bounds = balanced_bounds(loads, len(devices))
    layers = [list(chain(*groups[start:stop])) for start, stop in pairwise(bounds)]
    parameters_by_stage(module, [*map(nn.ModuleList, layers)])
    return list(zip(devices, layers, strict=True))


def balanced_bounds(loads: Sequence[int], num_stages: int) -> list[int]:
    """Cut a sequence into contiguous stages so that the largest sum is as small as possible."""
    sums = [0, *accumulate(loads)]

    @cache
    def best(stop: int, num: int) -> tuple[int, list[int]]:
        """Return the smallest largest sum of ``loads[:stop]`` in ``num`` stages, and its bounds."""
        if num == 1:
            return sums[stop], [0, stop]
        cuts = ((start, *best(start, num - 1)) for start in range(num - 1, stop))
        return min(
            (max(largest, sums[stop] - sums[start]), [*bounds, stop])
            for start, largest, bounds in cuts
        )

    return best(len(loads), num_stages)[1]


def move_stages(module: Any, stages: Sequence[Stage]) -> None:
    """Move each stage to its device and the rest of the module to the first one."""
    root = stages[0][0]
    layers = [(layer, device) for device, stage in stages for layer in stage]
    staged = {id(tensor) for layer, _ in layers for tensor in module_tensors(layer)}
    apply_to_tensors(module, lambda tensor: tensor if id(tensor) in staged else tensor.to(root))
    set_device_attribute(module, root)
    for layer, device in layers:
        layer.to(device)


def _forward_on(device: torch.device, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a layer's forward with a device as the current one."""
    with current(device):
        return forward(*args, **kwargs)


def _move_inputs(device: torch.device, layer: nn.Module, args: Any, kwargs: Any) -> Any:
    return move_data_to_device(args, device), move_data_to_device(kwargs, device)


def _layer_groups(module: nn.Module) -> tuple[str, list[list[nn.Module]]]:
    """Return the name of the object to cut, and its layers in groups that may stay together."""
    if callable(getattr(module, "stages", None)):
        children = set(module.modules())
        # A stage such as `self.net[:2]` is made by the call: its children are in the module.
        stages = stages_of(module)
        groups = [[stage] if stage in children else [*stage.children()] for stage in stages]
        if not all(groups) or not children.issuperset(chain(*groups)):
            raise ValueError(
                f"{type(module).__name__}.stages() returned modules that are not among its"
                " submodules, or an empty one: return its own layers, or slices of an nn.Sequential"
            )
        return "stages()", groups
    sequences = {
        name: child for name, child in module.named_children() if isinstance(child, nn.Sequential)
    }
    if len(sequences) != 1:
        raise ValueError(
            f"the module has {len(sequences)} attributes that are an nn.Sequential"
            f" {list(sequences)}, and one is needed: define stages(), which returns the layers"
        )
    ((name, sequence),) = sequences.items()
    return name, [[layer] for layer in sequence]
