"""Replicas of a module in one process: those of a physical device take turns with its layers."""

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import is_
from types import MethodType
from typing import Any

import torch
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule, innermost_fn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_mean

from lightning_memmap.errors import UnsuitableModuleError
from lightning_memmap.loading.device_streams import send, stream_module
from lightning_memmap.strategies.microbatch import PartLog, logged_in

#: Bytes that go from one device to another at a time.
_BUCKET_BYTES = 64 * 2**20
#: Many small tensors as few large ones; torch has no public names for these functions.
_utils: Any = torch._utils
#: Containers within each other in which references are found. They may hold themselves.
_MAX_DEPTH = 4
#: What Lightning compiles of a module.
_COMPILED = ("forward", "training_step", "validation_step", "test_step", "predict_step")


class Replicas(nn.Module):
    """The module, and a copy of its layers on each further physical device."""

    # The replicas of a device take turns with its layers, each with attributes and buffers of its
    # own. They share parameters, so that on the module's device nothing is broadcast, and gradients
    # are sums. What a step assigns to attributes of a replica other than the first is lost.

    def __init__(self, module: LightningModule, devices: Sequence[torch.device]) -> None:
        super().__init__()
        self.module = module
        self.devices = tuple(devices)
        #: What each replica logs in a step.
        self.logs = [PartLog() for _ in devices]
        others = dict.fromkeys(device for device in devices if device != devices[0])
        #: By ``id``: metrics overload comparison, and their hash changes with their state.
        self._originals: dict[int, Any] = {}
        self.copies = {device: _Copy(device, self._originals) for device in others}
        self._layers: list[Any] = []
        self._metrics: list[Any] = []
        #: In the last step: layers, tensors and metrics; what the tensors were like; by layer, its
        #: attributes. And the tensors in groups, each with those of every copy.
        self._parts: list[Any] = []
        self._facts: list[Any] = []
        self._seen: dict[nn.Module, list[Any]] = {}
        self._buckets: list[tuple[list[Tensor], ...]] = []
        self._threads = ThreadPoolExecutor(len(self.devices), "replica")

    def run(self, name: str, parts: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """What the method of each replica returns for its part. Metrics have counted all parts."""
        results: list[Any] = [None] * len(parts)

        def run(device: torch.device) -> None:
            other = self.copies.get(device)
            layers = self._layers if other is None else [*other.layers.values()]
            module = layers[0]

            def step(index: int) -> None:
                with logged_in(module, self.logs[index]):
                    results[index] = getattr(module, name)(parts[index], *args, **kwargs)

            turns = [index for index in range(len(parts)) if self.devices[index] == device]
            _take_turns(layers, [partial(step, index) for index in turns])

        copies = [[each.metric(own) for each in self.copies.values()] for own in self._metrics]
        with counted(self._metrics, copies):
            run_on_devices(run, dict.fromkeys(self.devices[: len(parts)]), self._threads)
        return results

    def original(self, metric: Metric) -> Metric:
        """The metric of the module that one on another device is a copy of."""
        found: Metric = self._originals.get(id(metric), metric)
        return found

    def close(self) -> None:
        """End the threads of further devices."""
        self._threads.shutdown()

    def pull(self, *, with_values: bool) -> None:
        """Find the layers of the module; give the copies on further devices what it is now."""
        self._layers, self._metrics = _find_layers(self.module)
        if not self.copies:
            return
        # What is made in inference mode could not be trained.
        with torch.inference_mode(False), torch.no_grad():
            self._follow()
            for tensors, *others in self._buckets if with_values else ():
                flat = _utils._flatten_dense_tensors(tensors)
                for device, own in zip(self.copies, others, strict=True):
                    sent = _utils._unflatten_dense_tensors(send(flat, device), tensors)
                    torch._foreach_copy_(own, sent)

    def _follow(self) -> None:
        layers, metrics = self._layers, self._metrics
        registered = (own.values() for e in layers for own in (e._parameters, e._buffers))
        tensors = list(dict.fromkeys(t for own in registered for t in own if t is not None))
        parts = [*layers, *tensors, *metrics]
        facts = [(each.shape, each.dtype, each.requires_grad) for each in tensors]
        seen = {each: _attributes(each) for each in layers}
        changed = [each for each in layers if not _are_same(seen[each], self._seen.get(each, ()))]
        if not _are_same(parts, self._parts) or facts != self._facts:
            # Any layer may refer to what came or went.
            changed = layers
            for each in self.copies.values():
                each.refer(layers, tensors, metrics)
            every = [tensors, *(list(each.tensors.values()) for each in self.copies.values())]
            self._buckets = _in_buckets(*every)
        self._parts, self._facts, self._seen = parts, facts, seen
        for each in self.copies.values():
            each.follow(changed)

    @torch.no_grad()
    def push_gradients(self) -> None:
        """Add the gradients of further devices to the module's, and clear them."""
        root = self.devices[0]
        for each in self.copies.values():
            sums, grads = list[Tensor](), list[Tensor]()
            for parameter, own in each.tensors.items():
                grad, own.grad = own.grad, None
                if grad is None:
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                if grad.is_sparse:
                    parameter.grad = parameter.grad + send(grad, root)
                else:
                    sums.append(parameter.grad)
                    grads.append(grad)
            for totals, terms in _in_buckets(sums, grads):
                flat = send(_utils._flatten_dense_tensors(terms), root)
                torch._foreach_add_(totals, _utils._unflatten_dense_tensors(flat, terms))


def _take_turns(layers: Sequence[nn.Module], turns: Sequence[Callable[[], None]]) -> None:
    """Call functions, each while the layers have other attributes; those of the first stay."""
    first = [vars(each) for each in layers]
    buffers = [b for each in layers for b in each._buffers.values() if b is not None]
    begin = [first]
    with torch.inference_mode(False), torch.no_grad():
        for _ in turns[1:]:
            own = {each: each.clone() for each in buffers}
            begin.append([_apart(attributes, own) for attributes in first])
    try:
        for turn, attributes in zip(turns, begin, strict=True):
            _give(layers, attributes)
            turn()
    finally:
        _give(layers, first)


def _give(layers: Iterable[nn.Module], attributes: Iterable[dict[str, Any]]) -> None:
    for each, own in zip(layers, attributes, strict=True):
        object.__setattr__(each, "__dict__", own)


def _apart(attributes: dict[str, Any], buffers: Mapping[Any, Tensor]) -> dict[str, Any]:
    """A copy of the attributes of a layer, with other buffers."""
    own = attributes.copy()
    if own["_buffers"]:
        own["_buffers"] = {name: buffers.get(b, b) for name, b in own["_buffers"].items()}
    return own


class _Copy:
    """The layers and tensors of a module on a further device."""

    def __init__(self, device: torch.device, originals: dict[int, Any]) -> None:
        self.device = device
        #: By layer, parameter and buffer of the module, that on this device.
        self.layers: dict[nn.Module, nn.Module] = {}
        self.tensors: dict[Tensor, Tensor] = {}
        self._metrics: dict[int, Any] = {}
        self._originals = originals
        #: What takes the place of references, by id; by layer of the module, the attributes of its
        #: copy, and those of them that are not those of the layer.
        self._own: dict[int, Any] = {}
        self._given: dict[nn.Module, dict[str, Any]] = {}
        self._special: dict[nn.Module, dict[str, Any]] = {}

    def metric(self, metric: Any) -> Any:
        """The copy of a metric or collection, which is made when it is first asked for."""
        if id(metric) not in self._metrics:
            self._metrics[id(metric)] = made = _copy_metric(metric, self.device)
            self._originals.update(zip(map(id, made.modules()), metric.modules(), strict=True))
        return self._metrics[id(metric)]

    def refer(
        self, layers: Sequence[nn.Module], tensors: Sequence[Tensor], metrics: Sequence[Any]
    ) -> None:
        """Copy layers and tensors, and note what takes the place of references to them."""
        known = self.layers
        self.layers = {
            each: known[each] if each in known else type(each).__new__(type(each))
            for each in layers
        }
        self.tensors = {each: self._copy_of(each) for each in tensors}
        self._own = {id(each): self.metric(each) for each in metrics}
        for copies in (self.layers, self.tensors):
            self._own.update(zip(map(id, copies), copies.values(), strict=True))

    def _copy_of(self, tensor: Tensor) -> Tensor:
        mine = self.tensors.get(tensor)
        if mine is None or mine.shape != tensor.shape or mine.dtype != tensor.dtype:
            mine = tensor.detach().to(self.device, copy=True)
            if isinstance(tensor, nn.Parameter):
                mine = nn.Parameter(mine, tensor.requires_grad)
        return mine.requires_grad_(tensor.requires_grad)

    def follow(self, changed: Iterable[nn.Module]) -> None:
        """Give the copies the attributes of the layers, of which some have changed."""
        given = self._given | {each: self._attributes_of(each) for each in changed}
        self._given = {each: given[each] for each in self.layers}
        _give(self.layers.values(), (_apart(each, {}) for each in self._given.values()))
        for each in changed:
            own: Any = self.layers[each]
            if isinstance(own, nn.RNNBase):
                # Otherwise cuDNN copies all weights in each step, and warns.
                own.flatten_parameters()

    def _attributes_of(self, layer: nn.Module) -> dict[str, Any]:
        if layer not in self._special:
            self._special[layer] = self._special_of(layer)
        mapped = {name: _mapped(value, self._own) for name, value in vars(layer).items()}
        return {**mapped, **self._special[layer]}

    def _special_of(self, layer: nn.Module) -> dict[str, Any]:
        special: dict[str, Any] = {}
        if isinstance(layer, _DeviceDtypeModuleMixin):
            special["_device"] = self.device
        if (context := getattr(layer, "_compiler_ctx", None)) is None:
            return special
        for name in _COMPILED:
            # A module that is fitted again was compiled before: this unwraps the first compilation.
            original = innermost_fn(context[f"original_{name}"])
            if isinstance(original, MethodType):
                original = MethodType(original.__func__, self.layers[layer])
            special[name] = context["dynamo_ctx"](original)
        return special


def _find_layers(module: nn.Module) -> tuple[list[nn.Module], list[Any]]:
    """The layers of a module, itself included, and its metrics and collections of them."""
    layers = {module: None}
    metrics: dict[int, Any] = {}
    pending = [module]
    for each in pending:
        for child in each._modules.values():
            if isinstance(child, (Metric, MetricCollection)):
                metrics[id(child)] = child
            elif child is not None and child not in layers:
                layers[child] = None
                pending.append(child)
    return pending, list(metrics.values())


def _attributes(layer: nn.Module) -> list[Any]:
    """All that a layer has, to see whether it is the same."""
    own = vars(layer)
    registered = (own[name].values() for name in ("_modules", "_parameters", "_buffers"))
    return [each for values in (own.values(), *registered) for each in values]


def _are_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


def _mapped(value: Any, own: Mapping[int, Any], depth: int = _MAX_DEPTH) -> Any:
    """A value with other references in it, by their ids; the same object where none is replaced."""
    if id(value) in own:
        return own[id(value)]
    kind = type(value)
    if kind is dict and depth:
        pairs = {key: _mapped(item, own, depth - 1) for key, item in value.items()}
        return value if all(map(is_, pairs.values(), value.values())) else pairs
    if kind in (list, tuple) and depth:
        items = [_mapped(item, own, depth - 1) for item in value]
        return value if all(map(is_, items, value)) else kind(items)
    if kind is weakref.ref:
        target = value()
        return weakref.ref(own[id(target)]) if id(target) in own else value
    if kind is MethodType and id(value.__self__) in own:
        return MethodType(value.__func__, own[id(value.__self__)])
    return value


def _in_buckets(*lists: list[Tensor]) -> list[tuple[list[Tensor], ...]]:
    """Tensors of one dtype and about so many bytes, together with those that belong to them."""
    return list(zip(*(_utils._take_tensors(each, _BUCKET_BYTES) for each in lists), strict=True))


def check_module(module: LightningModule, devices: Sequence[torch.device]) -> None:
    """Check that a module can be replicated; see `Replicas`."""
    context: Any = module._compiler_ctx or {}
    config = getattr(context.get("dynamo_ctx"), "compiler_config", None) or {}
    if config.get("triton.cudagraphs") and len(set(devices)) > 1:
        raise ValueError(
            "torch.compile with CUDA graphs, such as mode='reduce-overhead', under memmap_dp on"
            f" {len(set(devices))} devices: graphs belong to one thread, and each device has its"
            " own; compile with another mode, or train with memmap_superbatch_ddp"
        )
    for name, child in module.named_modules():
        if child._compiled_call_impl is not None or isinstance(child, OptimizedModule):
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
        for state, reduction in child._reductions.items() if isinstance(child, Metric) else ():
            if reduction is None and isinstance(child._defaults[state], Tensor):
                raise ValueError(
                    f"the metric {name!r} ({type(child).__name__}) has the state {state!r} without"
                    " a dist_reduce_fx, so that what the replicas count cannot be merged: use"
                    " memmap_superbatch, or update the metric in a callback from the step's output"
                )


def run_on_devices(
    run: Callable[[torch.device], None], devices: Iterable[torch.device], threads: Executor
) -> None:
    """Call a function for the first device here, and for each other one in a thread beside it."""
    # The replicas of a device draw random numbers from one generator, and each thread that computes
    # on a CPU would start its own OpenMP team. Modes are those of the caller.
    here, *others = devices
    futures = [threads.submit(_entering(device, run)) for device in others]
    try:
        run(here)
    finally:
        wait(futures)
    for future in futures:
        future.result()


def _entering(device: torch.device, run: Callable[[torch.device], None]) -> Callable[[], None]:
    """A function for another thread, which runs in the modes of this one."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    cache = torch.is_autocast_cache_enabled()
    autocast = [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        for kind in sorted({"cpu", device.type})
    ]
    module = stream_module(device)
    stream = module.current_stream(device)

    def entered() -> None:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, dtype, enabled in autocast:
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache)
                )
            # This makes its device the current one, too.
            stack.enter_context(module.stream(stream))
            run(device)

    return entered


def _copy_metric(metric: nn.Module, device: torch.device) -> Any:
    copied: Any = copy.deepcopy(metric).to(device)
    for child in copied.modules():
        if isinstance(child, MetricCollection):
            # Each metric of a copy has its own states, which are merged one by one.
            child._enable_compute_groups, child._groups_checked, child._groups = False, False, {}
    copied.reset()
    return copied


@contextmanager
def counted(metrics: Sequence[Any], copies: Sequence[Sequence[Any]]) -> Iterator[None]:
    """Let metrics and their copies count the parts of a step, and merge them at its end."""
    # What a metric has counted before is set aside: `self.log` logs its value for the step.
    before = [[_set_aside(each) for each in metric.modules()] for metric in metrics]
    try:
        yield
    finally:
        # Ordinary tensors in inference mode too: a metric may be updated in training as well.
        with torch.inference_mode(False), torch.no_grad():
            for metric, known, others in zip(metrics, before, copies, strict=True):
                own = zip(metric.modules(), *(each.modules() for each in others), strict=True)
                for counting, earlier in zip(own, known, strict=True):
                    if earlier is not None:
                        _merge(counting, earlier)
                for each in others:
                    each.reset()


#: The states of a metric by name, and the number of its updates.
_States = tuple[dict[str, Any], int]


def _states_of(metric: Metric) -> _States:
    return {name: getattr(metric, name) for name in metric._defaults}, metric._update_count


@torch.inference_mode(False)
def _set_aside(metric: nn.Module) -> _States | None:
    """What a metric has counted, which then counts from nothing; None for a collection."""
    if not isinstance(metric, Metric):
        return None
    counted = _states_of(metric)
    for name, default in metric._defaults.items():
        empty: Any = [] if isinstance(default, list) else default.detach().clone().to(metric.device)
        setattr(metric, name, empty)
    metric._update_count, metric._forward_cache, metric._computed = 0, None, None
    return counted


def _merge(metrics: Sequence[Any], earlier: _States) -> None:
    """Merge what metrics have counted of a step into the first, and then what it had before."""
    own = metrics[0]
    has_value = any(each._forward_cache is not None for each in metrics)
    _set_states(own, [_states_of(each) for each in metrics])
    value = own.compute() if has_value else None
    _set_states(own, [earlier, _states_of(own)])
    own._forward_cache = value


def _set_states(target: Metric, parts: Sequence[_States]) -> None:
    """Give a metric the states of several, merged by its ``dist_reduce_fx``."""
    updated = [(states, count) for states, count in parts if count]
    total = sum(count for _, count in updated)
    for name, reduction in target._reductions.items() if total else ():
        values = [states[name] for states, _ in updated]
        device = target.device
        if isinstance(values[0], list):
            merged: Any = [item.to(device) for value in values for item in value]
        elif reduction is dim_zero_cat:
            merged = torch.cat([value.to(device) for value in values])
        else:
            stacked = torch.stack([value.to(device) for value in values])
            if reduction is dim_zero_mean:
                weights = torch.tensor([count / total for _, count in updated]).to(stacked)
                merged = torch.tensordot(weights, stacked, dims=1)
            else:
                merge: Any = reduction
                merged = merge(stacked)
        setattr(target, name, merged)
    target._update_count, target._computed = total, None
