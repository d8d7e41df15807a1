"""``memmap_model_parallel``: the layers of one model over several devices, in one process."""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_memmap._compat.modules import apply_to_tensors, set_device_attribute
from lightning_memmap._compat.tensors import scale_all
from lightning_memmap.errors import check_integer
from lightning_memmap.loading.device_streams import current, has_streams
from lightning_memmap.strategies._base import module_tensors, parameters_by_stage, stages_given_by
from lightning_memmap.strategies.microbatch import (
    MicroBatches,
    OutputLengths,
    PartLog,
    gradients_apart,
    logged_in,
    loss_of,
    merge_logs,
    training_output,
)
from lightning_memmap.strategies.superbatch import SuperBatchStrategy

#: A device, and the layers on it.
Stage = tuple[torch.device, list[nn.Module]]


class LocalModelParallelStrategy(SuperBatchStrategy):
    """Trains one model whose layers are divided among several devices, in one process.

    Each of the Trainer's devices holds a stage of the model; the first, the root device, receives
    the super-batches, which are those of ``memmap_superbatch``. Activations move from stage to
    stage by themselves, and what the last layer returns comes back to the root device, so that a
    ``training_step`` such as ``loss(self.net(x), y)`` stays as it is.

    The layers are what the module's method ``stages`` returns, as for ``memmap_pipeline``, or else
    those of its only attribute that is an ``nn.Sequential``. They are cut so that the stage with
    most parameter bytes has as few as possible.

    Args:
        num_microbatches: Parts that each training step's rows are divided into. The backward pass
            of each runs before the next part, so that activations of one part are kept at a time.
            The loss is the mean over parts, weighted by their rows.
        **kwargs: As for ``memmap_superbatch``.

    Raises:
        ValueError: As for ``memmap_superbatch``; ``num_microbatches`` is below 1, or above it with
            manual optimization or ``16-mixed``; at set-up, there is nothing to cut, there are
            fewer layers than devices, or two stages share a layer or a parameter.
    """

    strategy_name = "memmap_model_parallel"
    _trains_alone = False
    _hooks: "Sequence[RemovableHandle | _OnDevice]" = ()

    def __init__(self, num_microbatches: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_parts = check_integer("num_microbatches", num_microbatches, 1)
        self._lengths = OutputLengths()

    @override
    def setup(self, trainer: Trainer) -> None:
        plugin = self.precision_plugin
        is_scaled = isinstance(plugin, MixedPrecision) and plugin.scaler is not None
        by_hand = not self.module.automatic_optimization
        if self.num_parts > 1 and (by_hand or is_scaled):
            wrong = "automatic_optimization=False" if by_hand else "precision='16-mixed'"
            raise ValueError(
                f"num_microbatches={self.num_parts} with {wrong}: the backward pass runs"
                " inside the step, before the loss is scaled or used; omit one of the two"
            )
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            # Lightning has moved the initial state of optimizers to the root device.
            for optimizer in self.optimizers:
                optimizer.load_state_dict(optimizer.state_dict())

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self.num_parts == 1:
            return super().training_step(batch, *args, **kwargs)
        module, trained = self.module, 0
        parts = MicroBatches.split(batch, [self.root_device] * self.num_parts)
        parts.lengths = self._lengths
        logs, outputs = [PartLog() for _ in parts.rows], list[Any]()
        with gradients_apart(list(module.parameters())) as grads:
            for part, rows, log in zip(parts.parts, parts.rows, logs, strict=True):
                with logged_in(module, log):
                    output = super().training_step(part, *args, **kwargs)
                loss = output.get("loss") if isinstance(output, Mapping) else output
                if isinstance(loss, Tensor):
                    (loss * (rows / parts.num_rows)).backward()  # type: ignore[no-untyped-call]
                    trained += rows
                outputs.append(apply_to_collection(output, Tensor, Tensor.detach))
        merge_logs(logs, parts, module)
        if 0 < trained < parts.num_rows:
            # The mean is over the rows of the parts that gave a loss.
            scale_all(list(grads.values()), parts.num_rows / trained)
        whole = training_output(outputs, parts)
        if isinstance(whole, Mapping) and "loss" in whole:
            return {**whole, "loss": loss_of(whole["loss"], grads)}
        return loss_of(whole, grads) if isinstance(whole, Tensor) else whole

    @override
    def model_to_device(self) -> None:
        stages = find_stages(self.module, self.parallel_devices)
        move_stages(self.module, stages)
        self._hooks = connect_stages(stages)

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


def find_stages(module: nn.Module, devices: Sequence[torch.device]) -> list[Stage]:
    """Cut the layers of a module evenly, in their order."""
    name, groups = _find_layers(module)
    if len(groups) < len(devices):
        groups = [[layer] for group in groups for layer in group]
    if len(groups) < len(devices):
        raise ValueError(
            f"{name} has {len(groups)} layers for {len(devices)} devices: use at most"
            f" Trainer(devices={len(groups)}), or divide it into more"
        )
    loads = [sum(p.nbytes for p in nn.ModuleList(group).parameters()) for group in groups]
    bounds = even_cut(loads, len(devices))
    cut = [list(chain(*groups[start:stop])) for start, stop in pairwise(bounds)]
    parameters_by_stage(module, [*map(nn.ModuleList, cut)])
    return list(zip(devices, cut, strict=True))


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
    root = stages[0][0]
    layers = [(layer, device) for device, own in stages for layer in own]
    staged = {id(tensor) for layer, _ in layers for tensor in module_tensors(layer)}
    # What `to` is made of; and Lightning has no public way to set the attribute without it.
    apply_to_tensors(module, lambda tensor: tensor if id(tensor) in staged else tensor.to(root))
    set_device_attribute(module, root)
    for layer, device in layers:
        layer.to(device)


def connect_stages(stages: Sequence[Stage]) -> "list[RemovableHandle | _OnDevice]":
    """Move tensors between stages whenever layers are called, and run each on its device."""
    handles: list[RemovableHandle | _OnDevice] = []
    # A layer without parameters may be in several stages.
    for layer, device in {layer: device for device, layers in stages for layer in layers}.items():
        move = partial(_move_inputs, device)
        handles.append(layer.register_forward_pre_hook(move, with_kwargs=True))
        if has_streams(device):
            handles.append(_OnDevice(layer, device))
    (root, _), (_, last) = stages[0], stages[-1]
    handles.append(
        last[-1].register_forward_hook(
            lambda layer, arguments, output: move_data_to_device(output, root)
        )
    )
    return handles


class _OnDevice:
    """Lets a device be the current one while a layer computes, until `remove` is called."""

    # Kernels that are written by hand, as of Triton, run on the current device, and so do tensors
    # that are made without a device in "cuda".

    def __init__(self, layer: nn.Module, device: torch.device) -> None:
        self._layer = layer
        # An attribute of the instance takes the place of the method of its class.
        self._before = vars(layer).get("forward")
        layer.forward = partial(_forward_on, device, layer, self._before)

    def remove(self) -> None:
        """Give the layer the forward that it had before."""
        del self._layer.forward
        if self._before is not None:
            self._layer.forward = self._before


def _forward_on(
    device: torch.device, layer: nn.Module, forward: Any, *args: Any, **kwargs: Any
) -> Any:
    """Call a forward, or that of the layer's class, with a device as the current one."""
    with current(device):
        return (forward or partial(type(layer).forward, layer))(*args, **kwargs)


def _move_inputs(device: torch.device, layer: nn.Module, args: Any, kwargs: Any) -> Any:
    return move_data_to_device(args, device), move_data_to_device(kwargs, device)


def _find_layers(module: nn.Module) -> tuple[str, list[list[nn.Module]]]:
    """What is to be cut: its name, and its layers, some of which stay together."""
    if callable(getattr(module, "stages", None)):
        known = set(module.modules())
        # A stage such as `self.net[:2]` is made by the call: its children are in the module.
        given = stages_given_by(module)
        stages = [[each] if each in known else [*each.children()] for each in given]
        if not all(stages) or not known.issuperset(chain(*stages)):
            raise ValueError(
                f"{type(module).__name__}.stages() gave modules that it does not have as attributes"
                " or in them, or an empty one: give its own layers, or slices of an nn.Sequential"
            )
        return "stages()", stages
    found = {n: child for n, child in module.named_children() if isinstance(child, nn.Sequential)}
    if len(found) != 1:
        raise ValueError(
            f"the module has {len(found)} attributes that are an nn.Sequential {list(found)}, and"
            " one is needed to cut it: give it a method stages() that returns its layers in their"
            " order"
        )
    ((name, sequence),) = found.items()
    return name, [[layer] for layer in sequence]
