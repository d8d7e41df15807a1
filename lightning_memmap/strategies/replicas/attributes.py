"""The plain attributes of replicas: which follow the module, and which a replica keeps."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Number
from types import MethodType
from typing import Any, NamedTuple

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_memmap._compat.modules import MODULE_DICTS


class Assignment(NamedTuple):
    """An attribute of a module and its value; `MISSING` where it was deleted."""

    module: nn.Module
    name: str
    value: Any


#: The value of an attribute that was deleted.
MISSING = object()
#: Containers within each other in which references are found. They may hold themselves.
_MAX_DEPTH = 4


class Assignments:
    """Finds what was assigned to a module's attributes outside of its steps.

    What hooks and callbacks assign is for all replicas. What a step assigns, such as a hidden
    state of its rows, each replica keeps for itself, as each process does under DDP.
    """

    def __init__(self) -> None:
        self._seen: dict[nn.Module, dict[str, Any]] = {}

    def since_last_step(self, modules: Iterable[nn.Module]) -> Iterator[Assignment]:
        """What was assigned since `note_step`.

        Args:
            modules: The modules to search, without their submodules.

        Yields:
            Each attribute that has another value than then, or was deleted; for new modules, all of
            their attributes. Parameters, buffers and submodules are left out.
        """
        for module in modules:
            seen, attributes = self._seen.get(module, {}), vars(module)
            for name, value in attributes.items():
                if seen.get(name, MISSING) is not value and name not in MODULE_DICTS:
                    yield Assignment(module, name, value)
            for name in seen.keys() - attributes.keys():
                yield Assignment(module, name, MISSING)

    def note_step(self, modules: Iterable[nn.Module]) -> None:
        """Note the attributes at the end of a step of all replicas.

        Args:
            modules: The modules, as for `since_last_step`; all others are forgotten.
        """
        self._seen = {module: dict(vars(module)) for module in modules}


def map_references(value: Any, replace: Callable[[Any], Any], depth: int = _MAX_DEPTH) -> Any:
    """Replace what a value refers to.

    That is the value itself, an item of a list, tuple or dict, the target of a weak reference, or
    the owner of a bound method.

    Args:
        value: An attribute of a module.
        replace: Returns the replacement of an object, or the object itself.
        depth: The most lists, tuples and dicts within each other that are searched.

    Returns:
        The same object where nothing is replaced, otherwise a new one.
    """
    if type(value) in (list, tuple) and depth:
        items = [map_references(item, replace, depth - 1) for item in value]
        same = all(new is old for new, old in zip(items, value, strict=True))
        return value if same else type(value)(items)
    if type(value) is dict and depth:
        pairs = {key: map_references(item, replace, depth - 1) for key, item in value.items()}
        return value if all(pairs[key] is value[key] for key in value) else pairs
    if isinstance(value, weakref.ref):
        target = value()
        mapped = replace(target)
        return value if mapped is target else weakref.ref(mapped)
    if isinstance(value, MethodType):
        owner = replace(value.__self__)
        return value if owner is value.__self__ else MethodType(value.__func__, owner)
    return replace(value)


class NumberCheck:
    """Warns once for each attribute to which the replicas' steps assigned different numbers.

    A sum or count that a step keeps in an attribute is over all rows on one device, and over the
    rows of replica 0 under ``memmap_dp``.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()

    def check(self, name: str, before: dict[str, Any], modules: Sequence[nn.Module]) -> None:
        """Compare what a step assigned.

        Args:
            name: Name of the step.
            before: The attributes of the module before the step.
            modules: The module, and its replicas that ran the step.
        """
        for attribute, value in vars(modules[0]).items():
            if attribute in self._known or before.get(attribute, MISSING) is value:
                continue
            values: list[Any] = [vars(module).get(attribute) for module in modules]
            if all(isinstance(value, Number) for value in values):
                differs = len(set(map(repr, values))) > 1  # Two NaN are the same here.
            elif all(isinstance(value, Tensor) and value.ndim == 0 for value in values):
                # Only once, since reading a number from a GPU waits for it.
                self._known.add(attribute)
                differs = len({repr(value.item()) for value in values}) > 1
            else:
                continue
            if differs:
                self._known.add(attribute)
                rank_zero_warn(
                    f"{name} assigned a different number to self.{attribute} in each replica, and"
                    " hooks and callbacks see that of replica 0, which is from its own rows alone."
                    " For all rows, use self.log or a torchmetrics metric, append to a list, or"
                    " train with memmap_superbatch"
                )
