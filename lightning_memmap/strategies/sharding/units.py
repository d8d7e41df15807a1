"""Which modules FSDP2 shards as units, each of which is gathered and freed as a whole."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import lightning as L
from torch import nn
from torch.distributed.fsdp import FSDPModule

#: Containers that are never called themselves: their items are.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def choose_units(
    module: nn.Module, classes: Sequence[str | type[nn.Module]] | None, min_parameters: int
) -> list[nn.Module]:
    """Return the modules of some classes, or else the default units."""
    if classes is None:
        return without_shared(module, default_units(module, min_parameters))
    return without_shared(module, _modules_of(module, classes))


def default_units(root: nn.Module, min_parameters: int) -> list[nn.Module]:
    """Return the items of the largest ``ModuleList`` or ``Sequential``, if large enough.

    Other modules of the same classes are units too, except for torch's own classes. The largest
    list is the one whose items have the most parameters, without its largest item: a list with one
    large item may only be a wrapper around the list of blocks.
    """
    items: list[nn.Module] = []
    largest = -1
    _, *descendants = root.modules()
    for child in descendants:
        if not isinstance(child, (nn.ModuleList, nn.Sequential)):
            continue
        sizes = sorted(map(_num_parameters, child))
        # If two are equal, the outer one is used, which comes first.
        if sizes and sum(sizes[:-1]) > largest:
            items = _called_children(child)
            largest = sum(sizes[:-1])
    kinds = {class_of(item) for item in items}
    classes = {kind for kind in kinds if not kind.__module__.startswith("torch.nn.")}
    return [
        unit
        for unit in descendants
        if (unit in items or class_of(unit) in classes) and _num_parameters(unit) >= min_parameters
    ]


def manual_roots(module: L.LightningModule) -> list[nn.Module]:
    """Return the root units under manual optimization: the children of the module."""
    # The backward pass is then inside of training_step, where FSDP2 would reduce the gradients of
    # the module itself too late. A metric, or a loss without parameters, has nothing to shard.
    units = without_shared(module, list(filter(has_parameters, _called_children(module))))
    in_units = {parameter for unit in units for parameter in unit.parameters()}
    missing = [name for name, parameter in module.named_parameters() if parameter not in in_units]
    if missing:
        raise ValueError(
            f"{', '.join(missing)}: under manual optimization memmap_fsdp2 shards each child of"
            f" the {type(module).__name__} by itself, and these parameters belong to no"
            " child, or to several; put them into one submodule that is called"
        )
    return units


def without_shared(root: nn.Module, units: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the units whose parameters no module outside of them uses."""
    names = parameter_names(root)
    return [
        unit
        for unit in units
        if all(
            len(own_names) == len(names[parameter])
            for parameter, own_names in parameter_names(unit).items()
        )
    ]


def parameter_names(root: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return all names of each parameter."""
    names = defaultdict(list)
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return names


def has_parameters(module: nn.Module) -> bool:
    """Return whether a module or a submodule of it has a parameter."""
    return next(module.parameters(), None) is not None


def class_of(module: nn.Module) -> type:
    """Return the class of a module, also after FSDP2 has changed it."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _called_children(module: nn.Module) -> list[nn.Module]:
    """Return the children of a module, or the items of those that are containers."""
    called = []
    for child in module.children():
        called += _called_children(child) if isinstance(child, _CONTAINERS) else [child]
    return called


def _modules_of(root: nn.Module, classes: Sequence[str | type[nn.Module]]) -> list[nn.Module]:
    """Return the modules below ``root`` of some classes, or of their names; subclasses count."""
    _, *descendants = root.modules()
    keys = [_class_keys(module) for module in descendants]
    for wanted_class in classes:
        if not any(wanted_class in module_keys for module_keys in keys):
            candidates = {
                class_of(module).__name__ for module in descendants if has_parameters(module)
            }
            raise ValueError(
                f"wrap_classes={list(classes)!r}: no module of {type(root).__name__} is a"
                f" {getattr(wanted_class, '__qualname__', wanted_class)};"
                f" choose from {', '.join(sorted(candidates)) or '(no module has parameters)'}"
            )
    return [
        module
        for module, module_keys in zip(descendants, keys, strict=True)
        if module_keys & {*classes}
    ]


def _class_keys(module: nn.Module) -> set[Any]:
    """Return the classes that a module is an instance of, and their names."""
    keys = (
        (kind, kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
        for kind in class_of(module).__mro__
    )
    return {*itertools.chain(*keys)}
