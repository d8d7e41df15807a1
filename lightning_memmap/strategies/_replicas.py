"""Replicas of a module in one process: on one physical device they share its parameters."""

import copy
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
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

#: By tensor of the module, that of a copy.
_Tensors = dict[Tensor, Tensor]


class Replicas(nn.Module):
    """The module, which is replica 0, and a copy of its layers for each further data device."""

    # Before each step, the copies get the attributes that the module's layers have then; references
    # to layers, buffers and metrics are replaced by the copy's own. On the physical device of the
    # module, copies share its parameters: nothing is broadcast, and its gradients are sums over all
    # of them. Each further physical device has one copy of the parameters. What a step assigns to
    # attributes of a copy is lost with the next step.

    def __init__(self, module: LightningModule, devices: Sequence[torch.device]) -> None:
        super().__init__()
        self.module = module
        self.devices = tuple(devices)
        #: What each replica logs in a step.
        self.logs = [PartLog() for _ in devices]
        self.metrics = MetricCopies(devices)
        self._found_metrics: list[tuple[nn.Module, str, Any]] = []
        #: In the last step: layers, tensors and metrics, shapes of buffers, and by layer its
        #: attributes and children.
        self._parts: list[Any] = []
        self._shapes: list[Any] = []
        self._seen: dict[nn.Module, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._copies = [_Copy(*each) for each in zip(devices[1:], self.logs[1:], strict=True)]
        others = dict.fromkeys(device for device in devices if device != devices[0])
        self._parameters_on: dict[torch.device, _Tensors] = {device: {} for device in others}
        self._threads = ThreadPoolExecutor(len(self.devices), "replica")

    def first(self, count: int) -> list[Any]:
        """The modules of the first replicas, which exist after `pull`."""
        return [self.module, *(each.layers[self.module] for each in self._copies)][:count]

    def run(self, name: str, parts: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """What the method of each replica returns for its part. Metrics have counted all parts."""
        count = len(parts)
        calls = [
            partial(getattr(module, name), part, *args, **kwargs)
            for module, part in zip(self.first(count), parts, strict=True)
        ]
        with self.metrics.counted(self._found_metrics, count), logged_in(self.module, self.logs[0]):
            return run_replicas(calls, self.devices, self._threads)

    def close(self) -> None:
        """End the threads of further devices."""
        self._threads.shutdown()

    def pull(self, *, with_values: bool) -> None:
        """Give the copies what the module is now."""
        layers, self._found_metrics = _find_layers(self.module)
        buffers = [b for each in layers for b in each._buffers.values() if b is not None]
        parameters = list(self.module.parameters())
        # Only where something came or went, references are replaced again in all layers.
        parts = [*layers, *buffers, *parameters, *(metric for *_, metric in self._found_metrics)]
        shapes = [(each.shape, each.dtype) for each in buffers]
        is_same = _are_the_same(parts, self._parts) and shapes == self._shapes
        self._parts, self._shapes = parts, shapes
        same = {
            each
            for each in layers
            if each in self._seen
            and all(map(_are_same, (vars(each), each._modules), self._seen[each]))
        }
        self._seen = {
            each: self._seen[each] if each in same else (dict(vars(each)), dict(each._modules))
            for each in layers
        }
        # What is made in inference mode could not be trained.
        with torch.inference_mode(False), torch.no_grad():
            for device, known in self._parameters_on.items():
                self._parameters_on[device] = own = _own(parameters, known, device)
                is_same = is_same and _are_same(own, known)
                for parameter in parameters:
                    own[parameter].requires_grad_(parameter.requires_grad)
            for index, each in enumerate(self._copies, 1):
                if not is_same:
                    metrics = {id(m): self.metrics.of(m)[index] for *_, m in self._found_metrics}
                    each.buffers = _own(buffers, each.buffers, each.device)
                    each.refer(layers, metrics, self._parameters_on.get(each.device))
                each.follow(same if is_same else ())
            if with_values:
                self._pull_values(parameters, list(dict.fromkeys(buffers)))

    def _pull_values(self, parameters: list[nn.Parameter], buffers: list[Tensor]) -> None:
        # A further device is sent them once.
        nearest = {self.devices[0]: buffers}
        remote: dict[torch.device, list[Tensor]] = {}
        for each in self._copies:
            if each.device not in nearest:
                nearest[each.device] = list(each.buffers.values())
                own = self._parameters_on[each.device].values()
                remote[each.device] = [*own, *nearest[each.device]]
        if remote:
            _send_all([*parameters, *buffers], remote)
        for each in self._copies:
            own_buffers = list(each.buffers.values())
            if own_buffers and own_buffers[0] is not nearest[each.device][0]:
                torch._foreach_copy_(own_buffers, nearest[each.device])

    def push_gradients(self) -> None:
        """Add the gradients of other physical devices to the module's, and clear them."""
        found: dict[torch.device, dict[Tensor, Tensor]] = {}
        for device, tensors in self._parameters_on.items():
            found[device] = {p: own.grad for p, own in tensors.items() if own.grad is not None}
            for own in tensors.values():
                own.grad = None
        every = dict.fromkeys(parameter for grads in found.values() for parameter in grads)
        sparse = {p for grads in found.values() for p, grad in grads.items() if grad.is_sparse}
        with torch.no_grad():
            for parameter in every:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            for parameter in sparse:
                for grads in found.values():
                    if parameter in grads:
                        assert parameter.grad is not None
                        parameter.grad = parameter.grad + send(grads[parameter], self.devices[0])
            dense = [parameter for parameter in every if parameter not in sparse]
            for bucket in _utils._take_tensors(dense, _BUCKET_BYTES):
                # A replica that does not use a parameter has no gradient of it.
                flat = [
                    _utils._flatten_dense_tensors(
                        [g[p] if p in g else torch.zeros_like(p, device=device) for p in bucket]
                    )
                    for device, g in found.items()
                ]
                total = reduce(torch.add, [send(each, self.devices[0]) for each in flat])
                grads = _utils._unflatten_dense_tensors(total, bucket)
                torch._foreach_add_([parameter.grad for parameter in bucket], grads)


class _Copy:
    """The copy of a module's layers for one replica."""

    def __init__(self, device: torch.device, log: PartLog) -> None:
        self.device = device
        #: By layer of the module, and by buffer, that of this replica.
        self.layers: dict[nn.Module, nn.Module] = {}
        self.buffers: _Tensors = {}
        self._log = log
        #: What takes the place of references, by id; by layer, the attributes of its copy.
        self._own: dict[int, Any] = {}
        self._given: dict[nn.Module, dict[str, Any]] = {}
        #: Recurrent layers whose weights on this device are not one piece of memory yet.
        self._unpacked: list[nn.RNNBase] = []
        #: By layer, attributes that are not those of the module.
        self._special: dict[nn.Module, dict[str, Any]] = {}

    def refer(
        self, layers: Sequence[nn.Module], metrics: dict[int, Any], parameters: _Tensors | None
    ) -> None:
        """Copy layers, which stay the same objects, and note what takes the place of references."""
        known = self.layers
        self.layers = {
            each: known[each] if each in known else type(each).__new__(type(each))
            for each in layers
        }
        self._unpacked = [
            each
            for each in layers
            if isinstance(each, nn.RNNBase) and parameters is not None and each not in known
        ]
        self._own = dict(metrics)
        for tensors in (self.layers, self.buffers, parameters or {}):
            self._own.update(zip(map(id, tensors), tensors.values(), strict=True))

    def follow(self, same: Container[nn.Module]) -> None:
        """Give the copies the attributes of the layers, those excepted that have not changed."""
        given, self._given = self._given, {}
        for each, replica in self.layers.items():
            if each in same and _are_same(vars(replica), given[each]):
                self._given[each] = given[each]
                continue
            attributes = {name: _mapped(value, self._own) for name, value in vars(each).items()}
            if each not in self._special:
                self._special[each] = self._special_of(each, replica)
            vars(replica).clear()
            vars(replica).update(attributes, **self._special[each])
            self._given[each] = dict(vars(replica))
        for each in self._unpacked:
            # Otherwise cuDNN copies all weights in each step, and warns.
            self.layers[each].flatten_parameters()  # type: ignore[operator]
        self._unpacked = []

    def _special_of(self, layer: nn.Module, replica: nn.Module) -> dict[str, Any]:
        special: dict[str, Any] = {}
        if isinstance(layer, _DeviceDtypeModuleMixin):
            special["_device"] = self.device
        if isinstance(layer, LightningModule):
            special["log"] = self._log
        if (context := getattr(layer, "_compiler_ctx", None)) is None:
            return special
        for name in _COMPILED:
            # A module that is fitted again was compiled before: this unwraps the first compilation.
            original = innermost_fn(context[f"original_{name}"])
            if isinstance(original, MethodType):
                original = MethodType(original.__func__, replica)
            special[name] = context["dynamo_ctx"](original)
        return special


def _find_layers(module: nn.Module) -> tuple[list[nn.Module], list[tuple[nn.Module, str, Any]]]:
    """The layers of a module, itself included, and its metrics, each with its parent and name."""
    # Metrics and collections are copied and merged as a whole. One may have several names.
    layers = {module: None}
    metrics = []
    pending = [module]
    for each in pending:
        for name, child in each._modules.items():
            if isinstance(child, (Metric, MetricCollection)):
                metrics.append((each, name, child))
            elif child is not None and child not in layers:
                layers[child] = None
                pending.append(child)
    return pending, metrics


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


def _are_same(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one.values(), other.values()))


def _are_the_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


def _own(tensors: Iterable[Tensor], known: _Tensors, device: torch.device) -> _Tensors:
    """Copies of tensors on a device: those that there are, or new ones."""
    own = {}
    for tensor in tensors:
        mine = known.get(tensor)
        if mine is None or mine.shape != tensor.shape or mine.dtype != tensor.dtype:
            mine = tensor.detach().to(device, copy=True)
            if isinstance(tensor, nn.Parameter):
                mine = nn.Parameter(mine, tensor.requires_grad)
        own[tensor] = mine
    return own


def _send_all(sources: list[Any], targets: Mapping[torch.device, list[Any]]) -> None:
    """Copy tensors to tensors on other devices, many small ones at once."""
    every = (_utils._take_tensors(each, _BUCKET_BYTES) for each in (sources, *targets.values()))
    for bucket, *others in zip(*every, strict=True):
        flat = _utils._flatten_dense_tensors(bucket)
        for device, own in zip(targets, others, strict=True):
            torch._foreach_copy_(own, _utils._unflatten_dense_tensors(send(flat, device), bucket))


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


def run_replicas(
    functions: Sequence[Callable[[], Any]], devices: Sequence[torch.device], threads: Executor
) -> list[Any]:
    """Call one function per replica: those of one device in turn, and devices side by side."""
    # In turn, because replicas of a device draw random numbers from one generator, and each thread
    # that computes on a CPU would start its own OpenMP team. Modes are those of the caller.
    results: list[Any] = [None] * len(functions)
    by_device: dict[torch.device, list[int]] = {}
    for index in range(len(functions)):
        by_device.setdefault(devices[index], []).append(index)

    def run(device: torch.device) -> None:
        for index in by_device[device]:
            results[index] = functions[index]()

    here, *others = by_device
    futures = [threads.submit(_entering(device, run)) for device in others]
    try:
        run(here)
    finally:
        wait(futures)
    for future in futures:
        future.result()
    return results


def _entering(device: torch.device, run: Callable[[torch.device], None]) -> Callable[[], None]:
    """A function that runs a device's replicas in another thread, in the modes of this one."""
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


class MetricCopies:
    """Empty copies of metrics, one for each replica, made when they are first asked for."""

    # By ``id``: metrics overload comparison, and their hash changes with their state.

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._copies: dict[int, tuple[nn.Module, list[Any]]] = {}
        self._originals: dict[int, Any] = {}

    def of(self, metric: nn.Module) -> list[Any]:
        """The copies of a metric or collection, the same ones each time."""
        if id(metric) not in self._copies:
            copies = [_copy_metric(metric, device) for device in self._devices]
            self._copies[id(metric)] = (metric, copies)
            for each in copies:
                self._originals.update(zip(map(id, each.modules()), metric.modules(), strict=True))
        return self._copies[id(metric)][1]

    def original(self, metric: Metric) -> Metric:
        """The metric that one is a copy of."""
        found: Metric = self._originals.get(id(metric), metric)
        return found

    @contextmanager
    def counted(self, found: Sequence[tuple[nn.Module, str, Any]], count: int) -> Iterator[None]:
        """Give the module copies within the context; at its end, merge those of some replicas."""
        for parent, name, metric in found:
            parent._modules[name] = self.of(metric)[0]
        try:
            yield
        finally:
            for parent, name, metric in found:
                parent._modules[name] = metric
        # Ordinary tensors in inference mode too: a metric may be updated in training as well.
        with torch.inference_mode(False), torch.no_grad():
            for metric in {id(metric): metric for *_, metric in found}.values():
                _merge_metrics(metric, self.of(metric)[:count])


def _copy_metric(metric: nn.Module, device: torch.device) -> Any:
    copied: Any = copy.deepcopy(metric).to(device)
    for child in copied.modules():
        if isinstance(child, MetricCollection):
            # Each metric of a copy has its own states, which are merged one by one.
            child._enable_compute_groups, child._groups_checked, child._groups = False, False, {}
    copied.reset()
    return copied


def _merge_metrics(metric: nn.Module, copies: list[Any]) -> None:
    for own, *others in zip(metric.modules(), *(c.modules() for c in copies), strict=True):
        if isinstance(own, Metric):
            step, *rest = others
            has_value = any(other._forward_cache is not None for other in others)
            _merge_states(step, rest)
            _merge_states(own, [step])
            if has_value:
                # What `self.log` logs for the step.
                own._forward_cache = step.compute()
    for each in copies:
        each.reset()


def _merge_states(target: Metric, sources: list[Metric]) -> None:
    """Merge the states of metrics into those of another one, each by its ``dist_reduce_fx``."""
    updated = [metric for metric in (target, *sources) if metric._update_count]
    # Metrics overload comparison: they must be compared by identity.
    if all(metric is target for metric in updated):
        return
    for name, reduction in target._reductions.items():
        values = [getattr(metric, name) for metric in updated]
        device = target.device
        if isinstance(values[0], list):
            merged: Any = [item.to(device) for value in values for item in value]
        elif reduction is dim_zero_cat:
            merged = torch.cat([value.to(device) for value in values])
        elif reduction is dim_zero_mean:
            counts = torch.tensor([float(metric._update_count) for metric in updated])
            stacked = torch.stack([value.to(device) for value in values])
            weights = (counts / counts.sum()).to(stacked)
            merged = torch.tensordot(weights, stacked, dims=1)
        else:
            merge: Any = reduction
            merged = merge(torch.stack([value.to(device) for value in values]))
        setattr(target, name, merged)
    target._update_count = sum(metric._update_count for metric in updated)
    target._computed = None
