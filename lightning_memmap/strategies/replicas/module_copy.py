"""A copy of a module's layers for one more replica, which follows the module from step to step."""

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from operator import is_
from types import MethodType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_memmap._compat.dynamo import compiler_context, original_function
from lightning_memmap._compat.modules import set_own_device_attribute
from lightning_memmap.strategies.common.base import STEPS

#: Nested containers in which references are found. They may contain themselves.
_MAX_DEPTH = 4
#: Types of attributes without references to layers or tensors, which most attributes have.
_PLAIN = {bool, int, float, str, type(None), set, OrderedDict}
#: The methods that Lightning compiles.
_COMPILED = ("forward", *STEPS)
#: The ``__dict__`` of a layer.
Attributes = dict[str, Any]


class ModuleCopy:
    """The layers of one replica: separate objects with the attributes of the module's layers.

    Args:
        module: The module.
        device: The device of the replica.
        shares_parameters: Whether the replica uses the parameters of the module, or of an earlier
            replica, which are on its device already, instead of copies.
    """

    def __init__(
        self, module: LightningModule, device: torch.device, shares_parameters: bool
    ) -> None:
        self.device = device
        self.shares_parameters = shares_parameters
        #: By layer of the module, the copy of it.
        self.layers: dict[nn.Module, nn.Module] = {module: _new_like(module)}
        #: By parameter and buffer of the module, the one that this replica uses.
        self.tensors: dict[Tensor, Tensor] = {}
        # By the id of a layer or tensor of the module, the one that takes its place.
        self._replacements: dict[int, Any] = {}
        context = compiler_context(module)
        self._compiled: Attributes = {}
        for name in _COMPILED if context else ():
            # A module that is fitted again was compiled before: this unwraps the first compilation.
            original = original_function(context[f"original_{name}"])
            if isinstance(original, MethodType):
                original = MethodType(original.__func__, self.layers[module])
            self._compiled[name] = context["dynamo_ctx"](original)

    def renew(
        self,
        layers: Sequence[nn.Module],
        tensors: Iterable[Tensor],
        shared: Mapping[Tensor, Tensor],
    ) -> None:
        """Copy new layers and tensors, and drop the copies of those that the module lost.

        Args:
            layers: The layers of the module.
            tensors: Their parameters and buffers.
            shared: By parameter of the module, the one to use if parameters are shared.
        """
        old = self.layers
        # A parametrized layer has another class than before.
        self.layers = {
            layer: old[layer] if type(old.get(layer)) is type(layer) else _new_like(layer)
            for layer in layers
        }
        self.tensors = {
            tensor: shared[tensor]
            if self.shares_parameters and tensor in shared
            else self._copy_of(tensor)
            for tensor in tensors
        }
        pairs: list[tuple[Any, Any]] = [*self.layers.items(), *self.tensors.items()]
        self._replacements = {id(theirs): ours for theirs, ours in pairs if theirs is not ours}

    def follow(
        self, layers: Sequence[nn.Module], references: Sequence[Attributes], is_new: bool
    ) -> None:
        """Set the attributes of all layers to those that the module's layers have now.

        Args:
            layers: The layers of the module.
            references: The attributes of each layer that may refer to layers or tensors.
            is_new: Whether `renew` was called.
        """
        for layer, copy, names in zip(layers, self.layers.values(), references, strict=True):
            object.__setattr__(copy, "__dict__", self.replace(vars(layer), names))
            set_own_device_attribute(copy, self.device)
            if isinstance(copy, nn.RNNBase) and is_new and not self.shares_parameters:
                # Otherwise cuDNN copies all weights in each step, and warns.
                copy.flatten_parameters()
        vars(self.root).update(self._compiled)

    @property
    def root(self) -> Any:
        """The copy of the LightningModule itself."""
        return next(iter(self.layers.values()))

    def replace(self, attributes: Attributes, references: Attributes) -> Attributes:
        """Copy attributes, with references to this replica's layers and tensors."""
        replacements = self._replacements
        return attributes | {
            name: _replaced(value, replacements) for name, value in references.items()
        }

    def _copy_of(self, tensor: Tensor) -> Tensor:
        copy = self.tensors.get(tensor)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = tensor.detach().to(self.device, copy=True)
            if isinstance(tensor, nn.Parameter):
                copy = nn.Parameter(copy, tensor.requires_grad)
        return copy.requires_grad_(tensor.requires_grad)


def references_in(attributes: Attributes) -> Attributes:
    """Return the attributes of a layer that may refer to layers, parameters or buffers."""
    return {
        name: value
        for name, value in attributes.items()
        if type(value) not in _PLAIN and not (type(value) is dict and not value)
    }


def _new_like(layer: nn.Module) -> nn.Module:
    return type(layer).__new__(type(layer))


def _replaced(value: Any, replacements: Mapping[int, Any], depth: int = _MAX_DEPTH) -> Any:
    """Replace the references in a value; return the same object if there are none."""
    if id(value) in replacements:
        return replacements[id(value)]
    kind = type(value)
    if kind is dict and value and depth:
        pairs = {key: _replaced(item, replacements, depth - 1) for key, item in value.items()}
        return value if all(map(is_, pairs.values(), value.values())) else pairs
    if kind in (list, tuple) and depth:
        items = [_replaced(item, replacements, depth - 1) for item in value]
        return value if all(map(is_, items, value)) else kind(items)
    if kind is weakref.ref and id(value()) in replacements:
        return weakref.ref(replacements[id(value())])
    if kind is MethodType and id(value.__self__) in replacements:
        return MethodType(value.__func__, replacements[id(value.__self__)])
    return value
