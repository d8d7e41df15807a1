"""The plain attributes of replicas: which follow the module, and which a replica keeps."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Number
from types import MethodType
from typing import Any, NamedTuple

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_memmap._compat.modules import PARTS


class Assignment(NamedTuple):
    """An attribute of a module, and its value; `MISSING` where it was deleted."""

    module: nn.Module
    name: str
    value: Any


#: Stands for an attribute that is no longer there.
MISSING = object()


class Assignments:
    """Finds what was assigned to a module's attributes outside of its steps.

    What hooks and callbacks assign is for all replicas. What a step assigns each replica keeps for
    itself, such as a hidden state of its own rows: as under DDP, where each process does.
    """

    def __init__(self) -> None:
        self._seen: dict[nn.Module, dict[str, Any]] = {}

    def since_last_step(self, modules: Iterable[nn.Module]) -> Iterator[Assignment]:
        """What was assigned since `note_step`; for modules that are new, all that they have."""
        for module in modules:
            seen, attributes = self._seen.get(module, {}), vars(module)
            for name, value in attributes.items():
                if seen.get(name, MISSING) is not value and name not in PARTS:
                    yield Assignment(module, name, value)
            for name in seen.keys() - attributes.keys():
                yield Assignment(module, name, MISSING)

    def note_step(self, modules: Iterable[nn.Module]) -> None:
        """A step of all replicas has ended, whatever it has assigned."""
        self._seen = {module: dict(vars(module)) for module in modules}


def map_value(value: Any, stand_in: Callable[[Any], Any]) -> Any:
    """A value with the stand-ins of what it refers to: itself, or as an item of a list, tuple or
    dict, the target of a weak reference or the owner of a bound method.

    Args:
        value: What a module has as an attribute.
        stand_in: Gives the stand-in for an object; the object itself where there is none.

    Returns:
        The same object where it refers to nothing that has a stand-in.
    """
    if type(value) in (list, tuple):
        items = [_map_item(item, stand_in) for item in value]
        same = all(new is old for new, old in zip(items, value, strict=True))
        return value if same else type(value)(items)
    if type(value) is dict:
        pairs = {key: _map_item(item, stand_in) for key, item in value.items()}
        return value if all(pairs[key] is value[key] for key in value) else pairs
    return _map_item(value, stand_in)


def _map_item(value: Any, stand_in: Callable[[Any], Any]) -> Any:
    if isinstance(value, weakref.ref):
        target = value()
        mapped = stand_in(target)
        return value if mapped is target else weakref.ref(mapped)
    if isinstance(value, MethodType):
        owner = stand_in(value.__self__)
        return value if owner is value.__self__ else MethodType(value.__func__, owner)
    return stand_in(value)


class NumberCheck:
    """Warns once for each attribute to which the replicas' steps have assigned other numbers.

    Sums and counts kept in attributes are of all rows on one device, and of the rows of replica 0
    under ``memmap_dp``.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()

    def check(self, name: str, before: dict[str, Any], modules: Sequence[nn.Module]) -> None:
        """Compare what a step has assigned.

        Args:
            name: Name of the step.
            before: The attributes of the module before the step.
            modules: The module and its replicas.
        """
        for attribute, value in vars(modules[0]).items():
            if attribute in self._known or before.get(attribute, MISSING) is value:
                continue
            values = [vars(module).get(attribute) for module in modules]
            if all(isinstance(value, Number) for value in values):
                differs = any(value != values[0] for value in values)
            elif all(isinstance(value, Tensor) and value.ndim == 0 for value in values):
                # Once: to read a number from a GPU is to wait for it.
                self._known.add(attribute)
                differs = len({value.item() for value in values}) > 1  # type: ignore[union-attr]
            else:
                continue
            if differs:
                self._known.add(attribute)
                rank_zero_warn(
                    f"{name} has assigned another number to self.{attribute} in each replica, and"
                    " hooks and callbacks see that of replica 0, which is of its own rows alone."
                    " For all rows, use self.log or a torchmetrics metric, append to a list, or"
                    " train with memmap_superbatch"
                )
