"""Replicas of a module in one process, which take turns with its layers."""

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from operator import is_
from types import MethodType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric, MetricCollection

from lightning_memmap._compat.dynamo import (
    compiler_context,
    is_compiled,
    original_backend,
    original_function,
)
from lightning_memmap._compat.metrics import count_from_nothing, merge_metric, unmerged_state
from lightning_memmap._compat.modules import own_children, own_tensors, set_own_device_attribute
from lightning_memmap._compat.tensors import add_all, copy_all, flatten, take_buckets, unflatten
from lightning_memmap.errors import UnsuitableModuleError
from lightning_memmap.loading.device_streams import current, send, send_together
from lightning_memmap.strategies._base import STEPS
from lightning_memmap.strategies.microbatch import PartLog, logged_in

#: Bytes that go from one device to another at a time.
_BUCKET_BYTES = 64 * 2**20
#: Containers within each other in which references are found. They may hold themselves.
_MAX_DEPTH = 4
#: Most attributes are of these types, in which there are none.
_PLAIN = {bool, int, float, str, type(None), set, OrderedDict}
#: What Lightning compiles of a module.
_COMPILED = ("forward", *STEPS)
#: What a layer has, by name. Of a metric, its states are among them.
_Attributes = dict[str, Any]


class Replicas(nn.Module):
    """The module, and a copy of its layers on each further physical device."""

    # The replicas of a device take turns with its layers, each with attributes and buffers of its
    # own. They share parameters, so that on the module's device nothing is broadcast, and gradients
    # are sums. On GPUs a turn only enqueues work: they compute side by side. What a step assigns to
    # attributes of a replica other than the first is lost.

    def __init__(self, module: LightningModule, devices: Sequence[torch.device]) -> None:
        super().__init__()
        self.module = module
        self.devices = tuple(devices)
        #: What each replica logs in a step.
        self.logs = [PartLog() for _ in devices]
        others = dict.fromkeys(device for device in devices if device != devices[0])
        self.copies = {device: _Copy(module, device) for device in others}
        self._layers: list[Any] = []
        #: Of the last step, the layers, their classes, and what their tensors were.
        self._known: Any = None
        #: All that metrics consist of, with which the replicas of all devices take turns.
        self._metrics: list[Any] = []

    def run(self, name: str, parts: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """What the method of each replica returns for its part. Metrics have counted all parts."""
        # What a metric has counted before is set aside: `self.log` logs its value for the step.
        earlier = [vars(each).copy() for each in self._metrics]
        # Ordinary tensors in inference mode too: a module may be trained as well, and a metric.
        with torch.inference_mode(False), torch.no_grad():
            turns = [self._turn(index) for index in range(len(parts))]
        results = []
        try:
            for part, log, device, (layers, attributes) in zip(
                parts, self.logs, self.devices, turns, strict=False
            ):
                if device != self.devices[0]:
                    # The module has its own again, for whoever refers to it.
                    _give(*turns[0])
                _give(layers, attributes)
                with current(device), logged_in(layers[0], log):
                    results.append(getattr(layers[0], name)(part, *args, **kwargs))
        finally:
            _give(*turns[0])
            counts = zip(*(own[len(self._layers) :] for _, own in turns), strict=True)
            with torch.inference_mode(False), torch.no_grad():
                for metric, before, counted in zip(self._metrics, earlier, counts, strict=True):
                    if isinstance(metric, Metric):
                        merge_metric(metric, before, counted)
        return results

    def _turn(self, index: int) -> tuple[list[Any], list[_Attributes]]:
        """The layers of a replica, and the attributes that they have in its turn."""
        device = self.devices[index]
        copy = self.copies.get(device)
        layers = self._layers if copy is None else [*copy.layers.values()]
        attributes = [vars(each) for each in layers]
        if device in self.devices[:index]:
            attributes = [each.copy() for each in attributes]
            clones: dict[Any, Any] = {None: None}
            for each in attributes:
                if buffers := each["_buffers"]:
                    clones |= {b: b.clone() for b in buffers.values() if b not in clones}
                    each["_buffers"] = {name: clones[b] for name, b in buffers.items()}
        metrics = [vars(each) for each in self._metrics]
        if index:
            metrics = [
                each.copy() if copy is None else copy.mapped(each, _references(each))
                for each in metrics
            ]
        for metric, counted in zip(self._metrics, metrics, strict=True):
            if isinstance(metric, Metric):
                count_from_nothing(counted, device)
        return [*layers, *self._metrics], [*attributes, *metrics]

    def pull(self, *, with_values: bool) -> None:
        """Find the layers of the module; give the copies on further devices what it is now."""
        self._layers, self._metrics = _find_layers(self.module)
        if not self.copies:
            return
        every = [*self._layers, *self._metrics]
        tensors = list(dict.fromkeys(chain.from_iterable(map(own_tensors, every))))
        kinds = [(id(each), each.shape, each.dtype, each.requires_grad) for each in tensors]
        known = self._layers, [*map(type, self._layers)], kinds
        is_new, self._known = self._known != known, known
        references = [_references(vars(each)) for each in self._layers]
        # What is made in inference mode could not be trained.
        with torch.inference_mode(False), torch.no_grad():
            for each in self.copies.values():
                if is_new:
                    each.renew(self._layers, tensors)
                each.follow(self._layers, references, is_new)
            for some in _in_buckets(tensors) if with_values else ():
                flat = flatten(some)
                for device, copy in self.copies.items():
                    sent = unflatten(send(flat, device), some)
                    copy_all([copy.tensors[each] for each in some], sent)

    @torch.no_grad()
    def push_gradients(self) -> None:
        """Add the gradients of further devices to the module's, and clear them."""
        root = self.devices[0]
        parameters: dict[Tensor, Any] = {}
        dense: list[list[Tensor]] = []
        for each in self.copies.values():
            dense.append([])
            for parameter, own in each.tensors.items():
                grad, own.grad = own.grad, None
                if grad is None:
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                if grad.is_sparse:
                    parameter.grad = parameter.grad + send(grad, root)
                else:
                    parameters[grad] = parameter
                    dense[-1].append(grad)
        # A bucket of each device at a time.
        for buckets in zip_longest(*map(_in_buckets, dense), fillvalue=[]):
            given = [some for some in buckets if some]
            flat = send_together([flatten(some) for some in given], root)
            for some, sent in zip(given, flat, strict=True):
                totals = [parameters[grad].grad for grad in some]
                add_all(totals, unflatten(sent, some))


def _give(layers: Iterable[nn.Module], attributes: Iterable[_Attributes]) -> None:
    """Let layers have other attributes."""
    for each, own in zip(layers, attributes, strict=True):
        object.__setattr__(each, "__dict__", own)


def _references(attributes: _Attributes) -> _Attributes:
    """The attributes of a layer in which there may be others, parameters or buffers."""
    return {
        name: value
        for name, value in attributes.items()
        if type(value) not in _PLAIN and not (type(value) is dict and not value)
    }


class _Copy:
    """The layers, parameters and buffers of a module on a further device."""

    def __init__(self, module: LightningModule, device: torch.device) -> None:
        self._device = device
        #: By layer, parameter and buffer of the module, that on this device.
        self.layers: dict[nn.Module, nn.Module] = {module: _alike(module)}
        self.tensors: dict[Tensor, Tensor] = {}
        #: Both of them, by the ids of those of the module.
        self._own: dict[int, Any] = {}
        context = compiler_context(module)
        self._compiled: _Attributes = {}
        for name in _COMPILED if context else ():
            # A module that is fitted again was compiled before: this unwraps the first compilation.
            original = original_function(context[f"original_{name}"])
            if isinstance(original, MethodType):
                original = MethodType(original.__func__, self.layers[module])
            self._compiled[name] = context["dynamo_ctx"](original)

    def renew(self, layers: Sequence[nn.Module], tensors: Sequence[Tensor]) -> None:
        """Make copies of what is new, and forget those of what is gone."""
        known = self.layers
        # A parametrized layer has another class than before.
        self.layers = {
            each: known[each] if type(known.get(each)) is type(each) else _alike(each)
            for each in layers
        }
        self.tensors = {each: self._copy_of(each) for each in tensors}
        self._own = {id(each): own for each, own in (*self.layers.items(), *self.tensors.items())}

    def follow(
        self, layers: Sequence[nn.Module], references: Sequence[_Attributes], is_new: bool
    ) -> None:
        """Give all layers the attributes of the module's."""
        pairs = zip(layers, references, strict=True)
        _give(self.layers.values(), [self.mapped(vars(each), found) for each, found in pairs])
        vars(self.layers[layers[0]]).update(self._compiled)
        for own in self.layers.values():
            set_own_device_attribute(own, self._device)
            if isinstance(own, nn.RNNBase) and is_new:
                # Otherwise cuDNN copies all weights in each step, and warns.
                own.flatten_parameters()

    def mapped(self, attributes: _Attributes, references: _Attributes) -> _Attributes:
        """A copy of the attributes of a layer, which leads to the layers of this device."""
        own = self._own
        return attributes | {name: _mapped(value, own) for name, value in references.items()}

    def _copy_of(self, tensor: Tensor) -> Tensor:
        mine = self.tensors.get(tensor)
        if mine is None or mine.shape != tensor.shape or mine.dtype != tensor.dtype:
            mine = tensor.detach().to(self._device, copy=True)
            if isinstance(tensor, nn.Parameter):
                mine = nn.Parameter(mine, tensor.requires_grad)
        return mine.requires_grad_(tensor.requires_grad)


def _alike(layer: nn.Module) -> nn.Module:
    return type(layer).__new__(type(layer))


def _find_layers(module: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """The layers of a module, itself included; and all that its metrics consist of."""
    metrics: dict[int, nn.Module] = {}
    layers = {module: None}
    pending = [module]
    for each in pending:
        for child in own_children(each):
            if isinstance(child, (Metric, MetricCollection)):
                metrics |= {id(part): part for part in child.modules()}
            elif child not in layers:
                layers[child] = None
                pending.append(child)
    return pending, list(metrics.values())


def _mapped(value: Any, own: Mapping[int, Any], depth: int = _MAX_DEPTH) -> Any:
    """A value with other references in it, by their ids; the same object where none is replaced."""
    if id(value) in own:
        return own[id(value)]
    kind = type(value)
    if kind is dict and value and depth:
        pairs = {key: _mapped(item, own, depth - 1) for key, item in value.items()}
        return value if all(map(is_, pairs.values(), value.values())) else pairs
    if kind in (list, tuple) and depth:
        items = [_mapped(item, own, depth - 1) for item in value]
        return value if all(map(is_, items, value)) else kind(items)
    if kind is weakref.ref and id(value()) in own:
        return weakref.ref(own[id(value())])
    if kind is MethodType and id(value.__self__) in own:
        return MethodType(value.__func__, own[id(value.__self__)])
    return value


def _in_buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype and about so many bytes."""
    yield from take_buckets(tensors, _BUCKET_BYTES)


def check_module(module: LightningModule, devices: Sequence[torch.device]) -> None:
    """Check that a module can be replicated; see `Replicas`."""
    compiled: Any = compiler_context(module).get("dynamo_ctx")
    backend = original_backend(getattr(compiled, "callback", None))
    config = getattr(compiled, "compiler_config", None) or {}
    name = getattr(backend, "compiler_name", "")
    if (config.get("triton.cudagraphs") or name == "cudagraphs") and len(set(devices)) > 1:
        raise ValueError(
            "torch.compile with CUDA graphs, such as mode='reduce-overhead', under memmap_dp on"
            f" {len(set(devices))} devices: a graph is of one device, and the replicas of all share"
            " what is compiled; compile in another way, or train with memmap_superbatch_ddp"
        )
    for name, child in module.named_modules():
        if is_compiled(child):
            raise UnsuitableModuleError(
                f"the submodule {name or 'self'!r} was compiled on its own, and memmap_dp"
                " cannot replicate it: give the Trainer torch.compile(module) of the whole"
                " LightningModule, or use memmap_superbatch"
            )
        if any(map(is_lazy, child.parameters(recurse=False))):
            raise ValueError(
                f"the parameters of {name!r} have no shape yet, and memmap_dp cannot replicate"
                " them: run one batch through the module before fit"
            )
        if isinstance(child, Metric) and (unmerged := unmerged_state(child)):
            raise ValueError(
                f"the metric {name!r} ({type(child).__name__}) has {unmerged}, so that what the"
                " replicas count cannot be merged: use memmap_superbatch, or update the metric in a"
                " callback from the step's output"
            )
