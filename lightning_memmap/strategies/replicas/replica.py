"""The replica of a module on one device, with its own tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memmap._compat.modules import (
    MODULE_DICTS,
    compiled_steps,
    is_compiled,
    lightning_attributes,
    module_dicts,
)
from lightning_memmap._compat.tensors import copy_tensors, storage_key
from lightning_memmap.strategies.replicas.attributes import MISSING, Assignment, map_references
from lightning_memmap.strategies.scattering.metrics import MetricCopies, is_metric

#: Returns what a replica has in place of an optimizer or a scheduler; any other object itself.
FindProxy = Callable[[Any], Any]


class ModuleReplica:
    """The replica of a module on one device.

    Args:
        device: The device.

    Attributes:
        device: The device.
        modules: The replica of each submodule.
        parameters: The replica of each parameter.
        metrics: The copy of each metric or metric collection.
        sources: Parameters and buffers of the module.
        targets: Their replicas, in the same order.
        find_proxy: For the attributes of this replica.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.modules: dict[nn.Module, nn.Module] = {}
        self.parameters: dict[nn.Parameter, nn.Parameter] = {}
        self.metrics = MetricCopies(device)
        self.sources: list[Tensor] = []
        self.targets: list[Tensor] = []
        self.find_proxy: FindProxy = itself
        self._visited: dict[nn.Module, nn.Module] = {}
        self._compiled: dict[nn.Module, dict[str, Any]] = {}
        self._mapped: dict[tuple[nn.Module, str], Any] = {}
        self._gradients: dict[nn.Parameter, Tensor] = {}

    def follow(self, module: nn.Module) -> None:
        """Replicate the module's present structure on this device: new layers, frozen or not.

        Values are not copied: `Replicas.broadcast` does that.

        Args:
            module: The module, the same in every call.
        """
        self.sources, self.targets, self._visited = [], [], {}
        parameters, metrics = self.parameters, self.metrics
        self.parameters, self.metrics = {}, MetricCopies(self.device)
        self._replicate(module, parameters, metrics)
        self.modules = self._visited

    def assign(self, assignments: Sequence[Assignment]) -> None:
        """Take over attributes that were assigned to the module.

        Where they refer to modules or parameters, as an LSTM's list of its weights does, those of
        the replica refer to its own.

        Args:
            assignments: Attributes of the module and its submodules, with their new values.
        """
        for module, name, value in assignments:
            self._mapped.pop((module, name), None)
            attributes = vars(self.modules.get(module, module))
            if value is MISSING:
                attributes.pop(name, None)
                continue
            attributes[name] = mapped = map_references(value, self._replica_of)
            if mapped is not value:
                self._mapped[module, name] = mapped
        for (module, name), mapped in list(self._mapped.items()):
            attributes = vars(self.modules[module]) if module in self.modules else {}
            if attributes.get(name) is mapped:
                # What it refers to may have a new replica.
                attributes[name] = map_references(vars(module)[name], self._replica_of)
                self._mapped[module, name] = attributes[name]
            else:
                del self._mapped[module, name]
        for module, replica in self.modules.items():
            vars(replica).update(lightning_attributes(module, self.device))
            if is_compiled(module):
                if module not in self._compiled:
                    self._compiled[module] = compiled_steps(module, replica)
                vars(replica).update(self._compiled[module])
            if isinstance(replica, nn.RNNBase):
                _lay_out(replica)

    @property
    def has_gradients(self) -> bool:
        """Whether there are other gradients than copies of the module's."""
        return any(
            own.grad is not None and own.grad is not self._gradients.get(own)
            for own in self.parameters.values()
        )

    def copy_gradients(self) -> None:
        """Replace this replica's gradients by copies of the module's."""
        known, self._gradients = self._gradients, {}
        targets, sources = [], []
        for parameter, own in self.parameters.items():
            grad, own.grad = parameter.grad, None
            if grad is None:
                continue
            if grad.is_sparse:
                own.grad = grad.to(self.device, copy=True)
            else:
                before = known.get(own)
                if before is None or before.is_sparse:
                    before = torch.empty_like(grad, device=self.device)
                own.grad = before
                targets.append(own.grad)
                sources.append(grad)
            self._gradients[own] = own.grad
        if targets:
            copy_tensors(targets, sources)

    def _replicate(
        self,
        module: nn.Module,
        parameters: dict[nn.Parameter, nn.Parameter],
        metrics: MetricCopies,
    ) -> nn.Module:
        if module in self._visited:
            return self._visited[module]
        replica = self.modules.get(module)
        if replica is None:
            replica = type(module).__new__(type(module))
        self._visited[module] = replica
        own_parameters, own_buffers, own_children = module_dicts(module)
        known_buffers = vars(replica).get(MODULE_DICTS[1], {})
        children: dict[str, nn.Module | None] = {}
        for name, child in own_children.items():
            if child is None:
                children[name] = None
            elif is_metric(child):
                children[name] = self.metrics.copy_of(child, metrics)
            else:
                children[name] = self._replicate(child, parameters, metrics)
        dicts = (
            {name: self._parameter(p, parameters) for name, p in own_parameters.items()},
            {name: self._buffer(b, known_buffers.get(name)) for name, b in own_buffers.items()},
            children,
        )
        vars(replica).update(zip(MODULE_DICTS, dicts, strict=True))
        return replica

    def _parameter(
        self, parameter: nn.Parameter | None, known: dict[nn.Parameter, nn.Parameter]
    ) -> nn.Parameter | None:
        if parameter is None or parameter in self.parameters:
            return None if parameter is None else self.parameters[parameter]
        own = known.get(parameter)
        if own is None or own.shape != parameter.shape or own.dtype != parameter.dtype:
            own = nn.Parameter(
                torch.empty_like(parameter, device=self.device), parameter.requires_grad
            )
        # A module may be frozen or thawed at any time.
        own.requires_grad_(parameter.requires_grad)
        self.parameters[parameter] = own
        self.sources.append(parameter)
        self.targets.append(own)
        return own

    def _buffer(self, buffer: Tensor | None, known: Tensor | None) -> Tensor | None:
        if buffer is None:
            return None
        if known is None or known.shape != buffer.shape or known.dtype != buffer.dtype:
            known = torch.empty_like(buffer, device=self.device, requires_grad=False)
        self.sources.append(buffer)
        self.targets.append(known)
        return known

    def _replica_of(self, value: Any) -> Any:
        """What the replica has in place of an object; the object itself where it has nothing."""
        if isinstance(value, nn.Module):
            return self.metrics.get(value) if is_metric(value) else self.modules.get(value, value)
        if isinstance(value, nn.Parameter):
            return self.parameters.get(value, value)
        return self.find_proxy(value)


def itself(value: Any) -> Any:
    """The value itself: what finds no proxy.

    Args:
        value: Any object.
    """
    return value


def _lay_out(layer: nn.RNNBase) -> None:
    """Let the weights of a recurrent layer have one memory on a GPU, where they do not yet.

    Otherwise cuDNN copies all of them in each step, and warns.
    """
    weights = [weight for weight in layer.parameters() if weight.is_cuda]
    if len({storage_key(weight) for weight in weights}) > 1:
        layer.flatten_parameters()
