"""Shards a module with FSDP2: which of its modules are units, and how each gets its values."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_memmap.errors import UnsuitableModuleError

#: Their forward reads the parameters of their children directly.
_WHOLE = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
#: Nobody calls them: their items are called.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
#: Their running statistics stay float32 in mixed precision, and torch then wants their parameters
#: in float32 too.
STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
)


def post_order(root: nn.Module) -> Iterator[nn.Module]:
    """Every module once, children before their parents, in the order of their names."""
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        if module not in seen:
            seen.add(module)
            for child in module.children():
                yield from visit(child)
            yield module

    return visit(root)


def own_tensors(module: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers of a module, without those of its children."""
    return itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))


def modules_of_classes(
    root: nn.Module, classes: Sequence[str | type[nn.Module]], argument: str
) -> list[nn.Module]:
    """The modules below ``root`` of the given classes.

    Args:
        root: Is none of them itself.
        classes: Classes, or their names: plain or with their module.
        argument: What the classes were given as, for the error.

    Raises:
        ValueError: A class matches no module.
    """
    below = [module for module in post_order(root) if module is not root]
    found = set()
    for wanted in classes:
        matches = [module for module in below if _is_of(module, wanted)]
        if not matches:
            candidates = sorted(
                {type(m).__name__ for m in below if next(m.parameters(), None) is not None}
            )
            raise ValueError(
                f"{argument}={list(classes)!r}: no module of {type(root).__name__} is a"
                f" {_name(wanted)}; choose from {', '.join(candidates) or 'none: it has no parts'}"
            )
        found.update(matches)
    return [module for module in below if module in found]


def _name(wanted: str | type[nn.Module]) -> str:
    return wanted if isinstance(wanted, str) else wanted.__qualname__


def _is_of(module: nn.Module, wanted: str | type[nn.Module]) -> bool:
    if not isinstance(wanted, str):
        return isinstance(module, wanted)
    names = ((cls.__name__, f"{cls.__module__}.{cls.__qualname__}") for cls in type(module).__mro__)
    return wanted in itertools.chain(*names)


def modules_of_size(root: nn.Module, min_parameters: int) -> list[nn.Module]:
    """The smallest modules below ``root`` that have enough parameters, not counting those of the
    units inside them; bottom up.

    Args:
        root: Is none of them itself.
        min_parameters: Parameters of a unit, at least.
    """
    units: list[nn.Module] = []
    left: dict[nn.Module, int] = {}
    whole = {inner for module in root.modules() if isinstance(module, _WHOLE)
             for inner in module.modules() if inner is not module}  # fmt: skip
    for module in post_order(root):
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        left[module] = own + sum(left[child] for child in module.children())
        callable_alone = module is not root and module not in whole
        if (
            callable_alone
            and not isinstance(module, _CONTAINERS)
            and left[module] >= min_parameters
        ):
            units.append(module)
            left[module] = 0
    return units


def without_shared(root: nn.Module, units: Sequence[nn.Module]) -> list[nn.Module]:
    """The units whose parameters are used by nobody else. Tied parameters are left to the unit
    that holds all modules that they are tied in."""
    names = defaultdict(list)
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    prefixes = {module: f"{name}." for name, module in root.named_modules()}
    return [
        unit
        for unit in units
        if all(
            name.startswith(prefixes[unit])
            for parameter in unit.parameters()
            for name in names[parameter]
        )
    ]


def roots(module: nn.Module) -> list[nn.Module]:
    """The outermost modules below ``module`` that are called: its children, or the items of those
    that are containers."""
    found = []
    for child in module.children():
        found += roots(child) if isinstance(child, _CONTAINERS) else [child]
    return found


def check_materialisable(root: nn.Module) -> None:
    """Whether modules on the meta device can be given values.

    Raises:
        UnsuitableModuleError: One has no ``reset_parameters``, or two share a parameter.
    """
    missing = sorted(
        {
            type(module).__name__
            for module in root.modules()
            if any(tensor.is_meta for tensor in own_tensors(module))
            and not callable(getattr(module, "reset_parameters", None))
        }
    )
    if missing:
        raise UnsuitableModuleError(
            f"{', '.join(missing)}: on the meta device, and without a method reset_parameters()"
            " that gives the module's own parameters and buffers their values; define it, or"
            " build the module on the CPU"
        )
    names = defaultdict(list)
    for name, parameter in root.named_parameters(remove_duplicate=False):
        if parameter.is_meta:
            names[parameter].append(name)
    for tied in names.values():
        if len(tied) > 1:
            raise UnsuitableModuleError(
                f"{' and '.join(tied)}: one parameter on the meta device, and it would become"
                f" {len(tied)}; build the modules that share it on the CPU"
            )


@torch.no_grad()
def shard(
    root: nn.Module,
    device: torch.device,
    fully_shard: dict[nn.Module, Callable[[nn.Module], Any]],
) -> None:
    """Give each module its values, which are those of rank 0, and shard the units.

    No more than one unit, and what is left to the units around it, is whole on the device at a
    time. All ranks call it, and have modules of the same structure.

    Args:
        root: Its modules are on any device, the meta device included.
        device: Where they go.
        fully_shard: What shards each unit.
    """
    check_materialisable(root)
    for module in post_order(root):
        if any(tensor.is_meta for tensor in own_tensors(module)):
            module.to_empty(device=device, recurse=False)
            reset: Any = module.reset_parameters
            reset()
        for tensor in own_tensors(module):
            tensor.data = tensor.data.to(device)
            _take_from_rank_0(tensor)
        if module in fully_shard:
            fully_shard[module](module)


def _take_from_rank_0(tensor: Tensor) -> None:
    contiguous = tensor.detach().contiguous()
    dist.broadcast(contiguous, src=0)
    tensor.copy_(contiguous)


def recompute(module: nn.Module) -> None:
    """Let a module keep nothing of its forward pass but its inputs, and compute it again in the
    backward pass. Names of parameters stay as they are."""
    forward: Any = partial(checkpoint, module.forward, use_reentrant=False)
    module.forward = forward
