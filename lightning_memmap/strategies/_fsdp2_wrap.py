"""Sharding a module with FSDP2: values to begin with, units, checkpoints."""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from lightning_memmap._compat.fsdp2 import is_gathered_otherwise
from lightning_memmap._compat.tensors import local_part
from lightning_memmap.errors import UnsuitableModuleError
from lightning_memmap.process_group import broadcast
from lightning_memmap.strategies._base import STEPS
from lightning_memmap.strategies._meta_device import MetaInitializer, post_order

#: They are never called themselves: their items are.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
#: Their running statistics stay float32 in mixed precision, which requires float32 parameters.
_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@torch.no_grad()
def shard_module(
    module: L.LightningModule,
    units: Sequence[nn.Module],
    device: torch.device,
    policy: MixedPrecisionPolicy,
    *,
    reshard_after_forward: bool | int | None,
    **options: Any,
) -> None:
    """Give a module the values of rank 0 on a device, and shard its units, and then itself."""
    for parameter, tied in _names(module).items():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{tied[0]} is a DTensor already: memmap_fsdp2 shards the module itself; omit that"
                " from configure_model, or use Lightning's ModelParallelStrategy"
            )
        if parameter.is_meta and len(tied) > 1:
            raise UnsuitableModuleError(
                f"{' and '.join(tied)}: one parameter on the meta device, which would become"
                f" {len(tied)}; build the modules that share it on the CPU"
            )
    roots = [module] if module.automatic_optimization else _roots_by_hand(module)
    policies = dict.fromkeys([*units, *roots], policy)
    exact = MixedPrecisionPolicy(None, torch.float32, None, False)
    if policy.param_dtype is not None:
        normed = [each for each in module.modules() if isinstance(each, _STATISTICS)]
        policies |= dict.fromkeys(filter(_has_parameters, normed), exact)

    initializer = MetaInitializer(module)
    for each in dict.fromkeys(post_order(module)):
        changed = initializer.initialize(each, device)
        for tensor in (*each.parameters(recurse=False), *each.buffers(recurse=False)):
            # An expanded buffer is written to, and FSDP2 takes no other parameters.
            tensor.data = tensor.data.to(device).contiguous()
            broadcast(tensor, 0)
        for tensor in changed:
            # Of submodules that an initialiser has written again. Shards are those of one value.
            if not isinstance(tensor, DTensor):
                broadcast(tensor, 0)
        if (own := policies.get(each)) is not None:
            # By default FSDP2 keeps what the root gathered, and frees all else.
            reshard = False if own is exact else reshard_after_forward
            fully_shard(each, reshard_after_forward=reshard, mp_policy=own, **options)
            # Before the hook of FSDP2.
            each.register_forward_pre_hook(_gather_again_if_thawed, prepend=True)
    if module in policies:
        for name in STEPS:
            register_fsdp_forward_method(module, name)


def sharded_units(module: nn.Module) -> list[FSDPModule]:
    """Return the module and the submodules that FSDP2 gathers."""
    return [child for child in module.modules() if isinstance(child, FSDPModule)]


def reshard_if_thawed(units: Iterable[Any]) -> None:
    """Free what units have gathered if parameters have been frozen or thawed since."""
    # FSDP2 looks at requires_grad only when it gathers, and roots stay gathered after a forward
    # pass until a backward pass goes through them.
    for unit in filter(is_gathered_otherwise, units):
        unit.reshard()


def _gather_again_if_thawed(unit: nn.Module, _: Any) -> None:
    reshard_if_thawed([unit])


# Units


def choose_units(
    module: nn.Module, classes: Sequence[str | type[nn.Module]] | None, min_parameters: int
) -> list[nn.Module]:
    """The units of a module: those of the classes, or the items of its largest list."""
    if classes is None:
        return without_shared(module, default_units(module, min_parameters))
    return without_shared(module, _modules_of(module, classes))


def default_units(root: nn.Module, min_parameters: int) -> list[nn.Module]:
    """The items of the largest ``ModuleList`` or ``Sequential``, if large enough."""
    # And other modules of the same classes, unless these are torch's own. The largest is the one
    # whose items have the most parameters, without the largest item: around a list of blocks there
    # may be another list, with little beside them.
    best: list[nn.Module] = []
    most = -1
    _, *below = root.modules()
    for child in below:
        if not isinstance(child, (nn.ModuleList, nn.Sequential)):
            continue
        sizes = sorted(map(_num_parameters, child))
        # Of equals the outer one, which comes first.
        if sizes and sum(sizes[:-1]) > most:
            best, most = _called(child), sum(sizes[:-1])
    kinds = {class_of(item) for item in best}
    classes = {kind for kind in kinds if not kind.__module__.startswith("torch.nn.")}
    return [
        unit
        for unit in below
        if (unit in best or class_of(unit) in classes) and _num_parameters(unit) >= min_parameters
    ]


def class_of(module: nn.Module) -> type:
    """Return the class of a module, which is the same once it is sharded."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _called(module: nn.Module) -> list[nn.Module]:
    """The children of a module; of containers that are not called themselves, their items."""
    found = []
    for child in module.children():
        found += _called(child) if isinstance(child, _CONTAINERS) else [child]
    return found


def _modules_of(root: nn.Module, classes: Sequence[str | type[nn.Module]]) -> list[nn.Module]:
    """The modules below ``root`` of classes, or of their names; subclasses count."""
    _, *below = root.modules()
    kinds = [_kinds_of(module) for module in below]
    for wanted in classes:
        if not any(wanted in known for known in kinds):
            candidates = sorted(
                {class_of(each).__name__ for each in filter(_has_parameters, below)}
            )
            raise ValueError(
                f"wrap_classes={list(classes)!r}: no module of {type(root).__name__} is a"
                f" {getattr(wanted, '__qualname__', wanted)};"
                f" choose from {', '.join(candidates) or 'none: it has none'}"
            )
    return [module for module, known in zip(below, kinds, strict=True) if known & {*classes}]


def _kinds_of(module: nn.Module) -> set[Any]:
    """The classes that a module is of, and their names."""
    names = (
        (each, each.__name__, f"{each.__module__}.{each.__qualname__}")
        for each in class_of(module).__mro__
    )
    return {*itertools.chain(*names)}


def _names(root: nn.Module) -> dict[nn.Parameter, list[str]]:
    """All names of each parameter."""
    names = defaultdict(list)
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return names


def without_shared(root: nn.Module, units: Sequence[nn.Module]) -> list[nn.Module]:
    """The units whose parameters no module outside of them uses."""
    names = _names(root)
    return [
        unit
        for unit in units
        if all(len(own) == len(names[parameter]) for parameter, own in _names(unit).items())
    ]


def _roots_by_hand(module: L.LightningModule) -> list[nn.Module]:
    """The root units in manual optimization: the children of the module."""
    # The backward pass is then inside of training_step, where FSDP2 would reduce the gradients of
    # the module itself too late. A metric, or a loss without parameters, has nothing to shard.
    units = without_shared(module, list(filter(_has_parameters, _called(module))))
    found = {parameter for unit in units for parameter in unit.parameters()}
    left = [name for name, parameter in module.named_parameters() if parameter not in found]
    if left:
        raise ValueError(
            f"{', '.join(left)}: under manual optimization memmap_fsdp2 shards each child of"
            f" the {type(module).__name__} by itself, and these parameters belong to none of"
            " them, or to several; put them into one submodule that is called"
        )
    return units


def recompute(module: nn.Module, units: Sequence[nn.Module]) -> None:
    """Let units compute activations again in the backward pass."""
    if not units:
        raise ValueError(
            f"activation_checkpointing=True: the {type(module).__name__} has no units to compute"
            " again; choose some by wrap_classes or a smaller min_unit_parameters"
        )
    for unit in units:
        # It then keeps only its inputs. The names of parameters do not change.
        unit.forward = partial(checkpoint, unit.forward, use_reentrant=False)


# Checkpoints


def shard_like(parameter: Any, value: Any) -> Any:
    """A value on the CPU, sharded like a parameter if it has its shape."""
    if not isinstance(parameter, DTensor) or getattr(value, "shape", None) != parameter.shape:
        return value
    sharded: Any = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    sharded.to_local().copy_(local_part(value, parameter))
    return sharded


def load_optimizers(path: Path, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Load the states in a folder. A parameter without one in it has none afterwards."""
    # Their import takes a while, and other strategies do not need them.
    from torch.distributed.checkpoint import state_dict as sharded_state
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(path)
    places = reader.read_metadata().planner_data.values()
    for name, optimizer in ((f"optimizer_{i}", each) for i, each in enumerate(optimizers)):
        saved = {place[2] for place in places if place[:2] == (name, "state")}
        loaded: dict[str, Any] = sharded_state.get_optimizer_state_dict(module, optimizer)
        loaded["state"] = {key: own for key, own in loaded["state"].items() if key in saved}
        load({name: loaded}, storage_reader=reader)
        options = sharded_state.StateDictOptions(strict=False)
        sharded_state.set_optimizer_state_dict(module, optimizer, loaded, options=options)


def shard_state(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """The state of a plain optimizer, on the CPU, for the sharded parameters of another one."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    by_number = dict(zip(numbers, parameters, strict=False))
    sharded = {
        number: {name: shard_like(by_number[number], value) for name, value in values.items()}
        for number, values in state["state"].items()
        if number in by_number
    }
    return {**state, "state": sharded}
