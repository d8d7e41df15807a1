"""Shards a module with FSDP2: which submodules are units, and how each is initialised."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_memmap.errors import UnsuitableModuleError
from lightning_memmap.process_group import broadcast

#: Their forward pass reads the parameters of their children directly.
_WHOLE = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
#: They are never called themselves: their items are.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
#: Their running statistics stay float32 in mixed precision, which requires float32 parameters.
STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
)


def post_order(root: nn.Module) -> Iterator[nn.Module]:
    """Every module once, children before their parents, in the order of registration.

    Args:
        root: The module to search.

    Yields:
        The modules; ``root`` is the last one.
    """
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        if module not in seen:
            seen.add(module)
            for child in module.children():
                yield from visit(child)
            yield module

    return visit(root)


def own_tensors(module: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers of a module, without those of its children.

    Yields:
        The parameters, and then the buffers.
    """
    return itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))


def modules_of_classes(
    root: nn.Module, classes: Sequence[str | type[nn.Module]], argument: str
) -> list[nn.Module]:
    """The modules below ``root`` of the given classes.

    Args:
        root: The module to search; it is never returned itself.
        classes: Classes, or their names, with or without their Python module. Subclasses count.
        argument: Name of the argument that gave the classes, for the error.

    Returns:
        The modules, bottom up.

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
                f" {_name(wanted)}; choose from {', '.join(candidates) or 'none: it has none'}"
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
    """The smallest modules below ``root`` with enough parameters.

    The parameters of units inside of a module do not count for it. Containers that are never
    called, and modules inside of those that read the parameters of their children directly, are no
    units.

    Args:
        root: The module to search; it is never returned itself.
        min_parameters: Minimum number of parameters of a unit.

    Returns:
        The modules, bottom up.
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
    """The units whose parameters no module outside of them uses.

    Tied parameters are left to the unit that contains all modules that share them.

    Args:
        root: The module that contains the units.
        units: Modules below ``root``.

    Returns:
        Those units, in the same order.
    """
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
    """The outermost modules below ``module`` that are called.

    Args:
        module: The module to search.

    Returns:
        Its children, or their items where these are containers, however deep.
    """
    found = []
    for child in module.children():
        found += roots(child) if isinstance(child, _CONTAINERS) else [child]
    return found


def check_materialisable(root: nn.Module) -> None:
    """Check that modules on the meta device can be initialised.

    Args:
        root: The module, on any device.

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
            " that initialises the module's own parameters and buffers; define it, or build the"
            " module on the CPU"
        )
    names = defaultdict(list)
    for name, parameter in root.named_parameters(remove_duplicate=False):
        if parameter.is_meta:
            names[parameter].append(name)
    for tied in names.values():
        if len(tied) > 1:
            raise UnsuitableModuleError(
                f"{' and '.join(tied)}: one parameter on the meta device, which would become"
                f" {len(tied)}; build the modules that share it on the CPU"
            )


@torch.no_grad()
def shard(
    root: nn.Module,
    device: torch.device,
    fully_shard: dict[nn.Module, Callable[[nn.Module], Any]],
) -> None:
    """Initialise each module with the values of rank 0, and shard the units.

    At any time, only one unit, and what belongs to the units around it, is whole on the device. All
    ranks must call it, with modules of the same structure.

    Args:
        root: The module, on any device, the meta device included.
        device: The device of this process.
        fully_shard: For each unit, the function that shards it.

    Raises:
        UnsuitableModuleError: A module on the meta device cannot be initialised; see
            `check_materialisable`.
    """
    check_materialisable(root)
    for module in post_order(root):
        if any(tensor.is_meta for tensor in own_tensors(module)):
            module.to_empty(device=device, recurse=False)
            reset: Any = module.reset_parameters
            reset()
        for tensor in own_tensors(module):
            tensor.data = tensor.data.to(device)
            broadcast(tensor, 0)
        if module in fully_shard:
            fully_shard[module](module)


def recompute(module: nn.Module) -> None:
    """Let a module compute its forward pass again in the backward pass.

    It then keeps only the inputs of the forward pass. The names of parameters do not change.

    Args:
        module: The module, whose ``forward`` is replaced.
    """
    forward: Any = partial(checkpoint, module.forward, use_reentrant=False)
    module.forward = forward
