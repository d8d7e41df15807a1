"""The replicas of ``memmap_dp``: where they get their parameters, and where their gradients go."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain, zip_longest
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_memmap._compat.metrics import count_from_nothing, merge_metric
from lightning_memmap._compat.modules import own_children, own_named_tensors
from lightning_memmap._compat.tensors import add_all, copy_all
from lightning_memmap.loading.device_streams import current, send, send_together
from lightning_memmap.results.row_log import take_logged_rows
from lightning_memmap.strategies.common.buckets import flatten, take_buckets, unflatten
from lightning_memmap.strategies.replicas.merge_logs import ReplicaLog, log_to
from lightning_memmap.strategies.replicas.module_copy import Attributes, ModuleCopy, references_in

#: Bytes that are sent from one device to another at a time.
_BUCKET_BYTES = 64 * 2**20


class Replicas(nn.Module):
    """A module, which is replica 0, and a copy of its layers for each further replica.

    On the module's own device, copies share its parameters, so nothing is sent and gradients add
    up by themselves. The first replica on any other device has copies of the parameters, which
    further replicas there share. All copies have separate buffers.
    """

    def __init__(self, module: LightningModule, devices: Sequence[torch.device]) -> None:
        super().__init__()
        self.module = module
        self.devices = tuple(devices)
        #: The calls of ``self.log`` of each replica in a step.
        self.logs = [ReplicaLog() for _ in devices]
        #: The values that each replica has logged for its rows in a step.
        self.logged_rows: list[dict[str, Tensor]] = []
        self.copies = [
            ModuleCopy(module, device, shares_parameters=device in devices[:index])
            for index, device in enumerate(devices)
            if index
        ]
        # The first replicas on other devices than the module's.
        self._remote = [copy for copy in self.copies if not copy.shares_parameters]
        self._layers: list[nn.Module] = []
        # Layers, their classes and the kinds of their tensors in the last step.
        self._structure: Any = None
        # All modules that metrics consist of. They aren't copied: see `run`.
        self._metrics: list[nn.Module] = []

    def run(
        self,
        name: str,
        batches: Sequence[Any],
        contexts: Sequence[AbstractContextManager[None]],
        *args: Any,
        **kwargs: Any,
    ) -> list[Any]:
        """Call a method of each replica with its batch; metrics count the rows of all of them.

        Args:
            name: The method.
            batches: The batch of each replica.
            contexts: The context of each replica's call.
            *args: Other arguments of the method.
            **kwargs: Other arguments of the method by name.
        """
        roots = [self.module, *(copy.root for copy in self.copies)]
        # Earlier counts of metrics are set aside: `self.log` logs their value for the step.
        before = [vars(metric).copy() for metric in self._metrics]
        counts = [self._new_counts(index) for index in range(len(batches))]
        outputs = []
        self.logged_rows = []
        try:
            for index, batch in enumerate(batches):
                # All replicas use the module's metrics, because wrapped methods of torchmetrics
                # refer to them, each with separate counts.
                _set_attributes(self._metrics, counts[index])
                log = log_to(roots[index], self.logs[index])
                with current(self.devices[index]), log, contexts[index]:
                    outputs.append(getattr(roots[index], name)(batch, *args, **kwargs))
                self.logged_rows.append(take_logged_rows(roots[index]))
        finally:
            _set_attributes(self._metrics, counts[0])
            with torch.inference_mode(False), torch.no_grad():
                for metric, old, *new in zip(self._metrics, before, *counts, strict=True):
                    if isinstance(metric, Metric):
                        merge_metric(metric, old, new)
        return outputs

    def _new_counts(self, index: int) -> list[Attributes]:
        """Return the attributes of all metrics with which one replica counts from nothing."""
        attributes = [vars(metric) for metric in self._metrics]
        if index:
            copy = self.copies[index - 1]
            attributes = [copy.replace(values, references_in(values)) for values in attributes]
        # Ordinary tensors in inference mode too: a metric may be used in training as well.
        with torch.inference_mode(False), torch.no_grad():
            for metric, metric_attributes in zip(self._metrics, attributes, strict=True):
                if isinstance(metric, Metric):
                    count_from_nothing(metric_attributes, self.devices[index])
        return attributes

    def follow_module(self, *, with_values: bool) -> None:
        """Update all copies to the layers, attributes and buffers that the module has now.

        Args:
            with_values: Whether parameters and buffers are sent to other devices. On each device,
                the buffers of further replicas are always copied.
        """
        self._layers, self._metrics = _find_layers(self.module)
        modules = [*self._layers, *self._metrics]
        named = chain.from_iterable(map(own_named_tensors, modules))
        tensors = list(dict.fromkeys(tensor for _, tensor in named))
        kinds = [(id(t), t.shape, t.dtype, t.requires_grad) for t in tensors]
        structure = self._layers, [*map(type, self._layers)], kinds
        is_new = self._structure != structure
        self._structure = structure
        references = [references_in(vars(layer)) for layer in self._layers]
        # Tensors that are made in inference mode could not be trained.
        with torch.inference_mode(False), torch.no_grad():
            if is_new:
                self._renew(tensors)
            for copy in self.copies:
                copy.follow(self._layers, references, is_new)
            if with_values:
                self._send(tensors)
            self._copy_buffers([t for t in tensors if not isinstance(t, nn.Parameter)])

    def _renew(self, tensors: Sequence[Tensor]) -> None:
        parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        by_device: dict[torch.device, Mapping[Tensor, Tensor]] = {
            self.devices[0]: {parameter: parameter for parameter in parameters}
        }
        for copy in self.copies:
            copy.renew(self._layers, tensors, by_device.get(copy.device, {}))
            by_device.setdefault(copy.device, {p: copy.tensors[p] for p in parameters})

    def _send(self, tensors: Sequence[Tensor]) -> None:
        """Copy the values of tensors of the module to all other devices."""
        if not self._remote:
            return
        for bucket in take_buckets(tensors, _BUCKET_BYTES):
            flat = flatten(bucket)
            for copy in self._remote:
                sent = unflatten(send(flat, copy.device), bucket)
                copy_all([copy.tensors[tensor] for tensor in bucket], sent)

    def _copy_buffers(self, buffers: Sequence[Tensor]) -> None:
        """Copy buffers to further replicas on the same device."""
        sources = {copy.device: copy.tensors for copy in self._remote}
        for copy in self.copies:
            if copy.shares_parameters and buffers:
                source = sources.get(copy.device)
                values = buffers if source is None else [source[buffer] for buffer in buffers]
                copy_all([copy.tensors[buffer] for buffer in buffers], values)

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add the gradients of other devices to the module's, and clear them."""
        root = self.devices[0]
        totals: dict[Tensor, Tensor] = {}
        dense: list[list[Tensor]] = []
        for copy in self._remote:
            dense.append([])
            for parameter, replica_parameter in copy.tensors.items():
                grad = replica_parameter.grad
                replica_parameter.grad = None
                if grad is None:
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                if grad.is_sparse:
                    parameter.grad = parameter.grad + send(grad, root)
                else:
                    totals[grad] = parameter.grad
                    dense[-1].append(grad)
        # A bucket of each device at a time.
        for buckets in zip_longest(
            *(take_buckets(grads, _BUCKET_BYTES) for grads in dense), fillvalue=[]
        ):
            filled = [bucket for bucket in buckets if bucket]
            flat = send_together([flatten(bucket) for bucket in filled], root)
            for bucket, sent in zip(filled, flat, strict=True):
                add_all([totals[grad] for grad in bucket], unflatten(sent, bucket))


def _set_attributes(modules: Iterable[nn.Module], attributes: Iterable[Attributes]) -> None:
    for module, values in zip(modules, attributes, strict=True):
        object.__setattr__(module, "__dict__", values)


def _find_layers(module: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the layers of a module, itself first, and all modules that its metrics consist of."""
    metrics: dict[int, nn.Module] = {}
    layers = {module: None}
    pending = [module]
    for layer in pending:
        for child in own_children(layer):
            if isinstance(child, (Metric, MetricCollection)):
                metrics |= {id(part): part for part in child.modules()}
            elif child not in layers:
                layers[child] = None
                pending.append(child)
    return pending, list(metrics.values())
