"""Persistent replicas of a module: the same module on other devices, with their own tensors."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from lightning_memmap._compat.metrics import states_without_reduction
from lightning_memmap._compat.modules import is_compiled_inside
from lightning_memmap._compat.tensors import copy_tensors
from lightning_memmap.errors import UnsuitableModuleError
from lightning_memmap.strategies._buckets import buckets
from lightning_memmap.strategies.replicas.attributes import (
    MISSING,
    Assignments,
    NumberCheck,
    map_references,
)
from lightning_memmap.strategies.replicas.replica import FindProxy, ModuleReplica, itself
from lightning_memmap.strategies.replicas.transfer import (
    BUCKET_BYTES,
    add_gradients,
    brought,
    copies_on,
)


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
        self.find_proxy: FindProxy = itself
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
        for bucket in buckets(ordered, BUCKET_BYTES):
            copies = copies_on(ordered[bucket], devices)
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
            add_gradients(by_device.setdefault(replica.device, {}), found)
            for own in replica.parameters.values():
                own.grad = None
        for other in list(by_device.values())[1:]:
            add_gradients(root, brought(other, self.devices[0]))
        for parameter, grad in root.items():
            parameter.grad = grad


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
