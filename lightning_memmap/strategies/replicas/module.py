"""Persistent replicas of a module: the same module on other devices, with their own tensors."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from lightning_memmap._compat.metrics import states_without_reduction
from lightning_memmap._compat.modules import (
    MODULE_DICTS,
    compiled_steps,
    is_compiled,
    is_compiled_inside,
    lightning_attributes,
    module_dicts,
)
from lightning_memmap._compat.tensors import add_tensors, copy_tensors, storage_key
from lightning_memmap.errors import UnsuitableModuleError
from lightning_memmap.loading.device_streams import send
from lightning_memmap.strategies._buckets import buckets
from lightning_memmap.strategies.replicas.attributes import (
    MISSING,
    Assignment,
    Assignments,
    NumberCheck,
    map_references,
)
from lightning_memmap.strategies.scattering.metrics import MetricCopies, is_metric

#: Returns what a replica has in place of an optimizer or a scheduler; any other object itself.
FindProxy = Callable[[Any], Any]

#: Bytes that one GPU sends to the others at a time.
_BUCKET_BYTES = 64 * 2**20


class Replicas:
    """The module, and a replica of it for each further device.

    Replica 0 is the module itself. Every other replica has its own parameters, buffers and
    metrics, and its own attributes where a step assigns them. Everything else is shared: what a
    step appends to a list of the module is seen by all.

    Args:
        module: The module, on the first device.
        devices: One per replica, repeats allowed.

    Raises:
        UnsuitableModuleError: The module has submodules that cannot be replicated.
        ValueError: A parameter has no shape yet, or a metric's state no ``dist_reduce_fx``.
    """

    def __init__(self, module: LightningModule, devices: Sequence[torch.device]) -> None:
        check_module(module)
        self.module = module
        self.devices = tuple(devices)
        #: All replicas but replica 0.
        self.others = [ModuleReplica(device) for device in self.devices[1:]]
        #: For the attributes of replica 0 during a step.
        self.find_proxy: FindProxy = _itself
        self._assignments = Assignments()
        self._numbers = NumberCheck()
        self._proxied: dict[tuple[nn.Module, str], Any] = {}
        self._num_up_to_date = 0
        self._versions: list[int] | None = None

    def module_of(self, index: int) -> LightningModule:
        """The module of one replica.

        Args:
            index: The replica, from 0, which is the module itself. All others exist after
                `refresh`.

        Returns:
            The module, with its parameters on the device of that replica.
        """
        return self.module if index == 0 else self.others[index - 1].modules[self.module]  # type: ignore[return-value]

    def refresh(self, always_copy: bool) -> None:
        """Give the replicas the attributes, parameters and buffers that the module has now.

        Args:
            always_copy: Copy parameters and buffers even where torch counted no change since the
                last call. It does not count what is written to their ``data``.
        """
        if not self.others:
            return
        for replica in self.others:
            replica.follow(self.module)
        modules = self.others[0].modules
        assigned = list(self._assignments.since_last_step(modules))
        for index, replica in enumerate(self.others):
            # A replica that the last step did not run lacks all earlier assignments.
            is_behind = index >= self._num_up_to_date
            replica.assign(list(Assignments().since_last_step(modules)) if is_behind else assigned)
        for module, name, value in assigned:
            self._proxied.pop((module, name), None)
            if value is not MISSING and map_references(value, self.find_proxy) is not value:
                self._proxied[module, name] = value
        if always_copy:
            self.broadcast()
            self._versions = None
        elif self._versions is None or self._versions != self._count_versions():
            self.broadcast()
            self._versions = self._count_versions()

    @contextmanager
    def step(self, name: str, num_replicas: int) -> Iterator[list[LightningModule]]:
        """Prepare the first replicas for a step, which runs within the context.

        Args:
            name: Name of the step, such as ``training_step``.
            num_replicas: How many run it, at least 1.

        Yields:
            Their modules.
        """
        modules = [self.module_of(index) for index in range(num_replicas)]
        before = dict(vars(self.module))
        given = {
            key: map_references(value, self.find_proxy) for key, value in self._proxied.items()
        }
        for (module, attribute), value in given.items():
            vars(module)[attribute] = value
        try:
            yield modules
        finally:
            for (module, attribute), value in given.items():
                if vars(module).get(attribute) is value:
                    vars(module)[attribute] = self._proxied[module, attribute]
        if self.others:
            self._numbers.check(name, before, modules)
            self._assignments.note_step(self.others[0].modules)
            self._num_up_to_date = num_replicas - 1

    def _count_versions(self) -> list[int] | None:
        """How many times each tensor was written to; None where torch does not count."""
        tensors = [t for replica in self.others for t in (*replica.sources, *replica.targets)]
        if any(tensor.is_inference() for tensor in tensors):
            return None
        return [tensor._version for tensor in tensors]

    def broadcast(self) -> None:
        """Copy parameters and buffers from the module to its replicas."""
        sources = self.others[0].sources if self.others else []
        if not sources:
            return
        devices = list(dict.fromkeys(self.devices))
        if len(devices) == 1:
            for replica in self.others:
                copy_tensors(replica.targets, sources)
            return
        order = sorted(range(len(sources)), key=lambda index: str(sources[index].dtype))
        ordered = [sources[index].detach() for index in order]
        for bucket in buckets(ordered, _BUCKET_BYTES):
            copies = _on_devices(ordered[bucket], devices)
            for replica in self.others:
                targets = [replica.targets[index] for index in order[bucket]]
                copy_tensors(targets, copies[replica.device])

    @property
    def have_gradients(self) -> bool:
        """Whether a replica has gradients that are not added to the module's."""
        return any(replica.has_gradients for replica in self.others)

    def broadcast_gradients(self) -> None:
        """Give the replicas copies of the module's gradients, which a step may read and clip."""
        for replica in self.others:
            replica.copy_gradients()

    def drop_gradients(self) -> None:
        """Clear the copies, before a backward pass adds to them."""
        for replica in self.others:
            for own in replica.parameters.values():
                own.grad = None

    def reduce_gradients(self) -> None:
        """Add the gradients of the replicas to those of the module, and clear them."""
        root = {p: p.grad for p in self.module.parameters() if p.grad is not None}
        by_device = {self.devices[0]: root}
        for replica in self.others:
            found = {p: own.grad for p, own in replica.parameters.items() if own.grad is not None}
            _add(by_device.setdefault(replica.device, {}), found)
            for own in replica.parameters.values():
                own.grad = None
        for other in list(by_device.values())[1:]:
            _add(root, _brought(other, self.devices[0]))
        for parameter, grad in root.items():
            parameter.grad = grad


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
        self.find_proxy: FindProxy = _itself
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


def _itself(value: Any) -> Any:
    return value


def check_module(module: nn.Module) -> None:
    """Check that a module can be replicated.

    Args:
        module: The module that is trained.

    Raises:
        UnsuitableModuleError: It has submodules that were compiled or scripted for one object.
        ValueError: A parameter has no shape yet, or a metric's state no ``dist_reduce_fx``.
    """
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise UnsuitableModuleError(
                f"the submodule {name!r} is a ScriptModule, which memmap_dp cannot replicate:"
                " use the module that was scripted, or memmap_superbatch"
            )
        if is_compiled_inside(child):
            raise UnsuitableModuleError(
                f"the submodule {name or 'self'!r} was compiled on its own, and memmap_dp"
                " cannot replicate it: give the Trainer torch.compile(module) of the whole"
                " LightningModule, or use memmap_superbatch"
            )
        if isinstance(child, Metric) and (states := states_without_reduction(child)):
            raise ValueError(
                f"the metric {name!r} ({type(child).__name__}) has the states {states} without a"
                " dist_reduce_fx, so that what the replicas count cannot be merged: use"
                " memmap_superbatch, or update the metric in a callback from the step's output"
            )
    lazy = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(
            f"the parameters {lazy} have no shape yet, and memmap_dp cannot replicate them: run"
            " one batch through the module before fit"
        )


def _add(sums: dict[nn.Parameter, Tensor], grads: dict[nn.Parameter, Tensor]) -> None:
    """Add gradients on one device, in place."""
    dense = []
    for parameter, grad in grads.items():
        if parameter not in sums:
            sums[parameter] = grad
        elif grad.is_sparse or sums[parameter].is_sparse:
            sums[parameter] = sums[parameter] + grad
        else:
            dense.append(parameter)
    if dense:
        add_tensors([sums[p] for p in dense], [grads[p] for p in dense])


def _on_devices(
    tensors: list[Tensor], devices: Sequence[torch.device]
) -> dict[torch.device, list[Tensor]]:
    """Copies of tensors on other devices, each of which gets them at once.

    Devices that have them pass them on: a device sends them no more than log2 times.

    Args:
        tensors: Tensors of one dtype, on the first device.
        devices: The devices, each once.

    Returns:
        By device, its tensors; on the first device the given ones.
    """
    found = {devices[0]: tensors}
    flat = [_flattened(tensors)]
    for index, device in enumerate(devices[1:], 1):
        sender = index - 2 ** (index.bit_length() - 1)
        flat.append(send(flat[sender], device))
        found[device] = _split_like(flat[index], tensors)
    return found


def _brought(grads: dict[nn.Parameter, Tensor], device: torch.device) -> dict[nn.Parameter, Tensor]:
    """Gradients of another device on this one, many small ones at once."""
    found = {p: grad.to(device) for p, grad in grads.items() if grad.is_sparse}
    dense = [p for p in grads if p not in found]
    for group in buckets([grads[p] for p in dense], _BUCKET_BYTES):
        tensors = [grads[p] for p in dense[group]]
        flat = send(_flattened(tensors), device)
        found.update(zip(dense[group], _split_like(flat, tensors), strict=True))
    return found


def _lay_out(layer: nn.RNNBase) -> None:
    """Let the weights of a recurrent layer have one memory on a GPU, where they do not yet.

    Otherwise cuDNN copies all of them in each step, and warns.
    """
    weights = [weight for weight in layer.parameters() if weight.is_cuda]
    if len({storage_key(weight) for weight in weights}) > 1:
        layer.flatten_parameters()


def _flattened(tensors: list[Tensor]) -> Tensor:
    flat = [tensor.reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _split_like(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    parts = flat.split_with_sizes([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
