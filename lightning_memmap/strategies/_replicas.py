"""Replicas of a module in one process: on one physical device they share its parameters."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, wait
from contextlib import ExitStack
from operator import is_
from types import MethodType
from typing import Any

import torch
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule, innermost_fn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from lightning_memmap.errors import UnsuitableModuleError
from lightning_memmap.loading.device_streams import send, stream_module
from lightning_memmap.strategies._part_results import MetricCopies, is_metric

#: Bytes that go from one device to another at a time.
_BUCKET_BYTES = 64 * 2**20
#: Many small tensors as few large ones; torch has no public names for these functions.
_utils: Any = torch._utils
#: Containers within each other in which references are found. They may hold themselves.
_MAX_DEPTH = 4
#: Attributes of a module that each replica has of its own.
_OWN = {"_parameters", "_buffers", "_modules"}
_MISSING = object()
#: What Lightning compiles of a module.
_COMPILED = ("forward", "training_step", "validation_step", "test_step", "predict_step")

#: By parameter of the module, that of another device.
_Parameters = dict[nn.Parameter, nn.Parameter]


class Replicas(nn.Module):
    """The module, which is replica 0, and a copy of its tree for each further data device."""

    # On the physical device of the module, copies share its parameters: nothing is broadcast, and
    # its gradients are sums over all of them. Each further physical device has one copy of the
    # parameters. Every replica has its own buffers and metrics. What hooks and callbacks assign to
    # attributes of a module, all replicas follow; what a step assigns, each keeps for itself, as
    # each process does under DDP.

    def __init__(self, module: LightningModule, devices: Sequence[torch.device]) -> None:
        super().__init__()
        check_module(module, devices)
        self.module = module
        self.devices = tuple(devices)
        #: The copies of metrics that each replica updates.
        self.metrics = [MetricCopies(device) for device in devices]
        self._copies = [
            _Copy(device, metrics)
            for device, metrics in zip(devices[1:], self.metrics[1:], strict=True)
        ]
        others = dict.fromkeys(device for device in devices if device != devices[0])
        self._remote: dict[torch.device, _Parameters] = {device: {} for device in others}
        #: By submodule, its children and its attributes at the end of the last step.
        self._seen: dict[nn.Module, tuple[list[Any], dict[str, Any]]] = {}
        self._num_run = len(devices)

    def first(self, count: int) -> list[Any]:
        """The modules of the first replicas, which exist after `pull`."""
        return [self.module, *(copy.modules[self.module] for copy in self._copies)][:count]

    def pull(self, *, with_values: bool) -> None:
        """Give the replicas what the module is now."""
        if not self._copies:
            return
        # What is made in inference mode could not be trained.
        with torch.inference_mode(False), torch.no_grad():
            if self._has_other_structure():
                self._follow_structure()
                with_values = True
            self._follow_attributes()
            for parameters in self._remote.values():
                for parameter, own in parameters.items():
                    own.requires_grad_(parameter.requires_grad)
            if with_values:
                self._pull_buffers()
                self._broadcast_parameters()

    def end_step(self, count: int) -> None:
        """Note what the step of the first replicas assigned, which the others do not follow."""
        self._seen = {each: (kept, dict(vars(each))) for each, (kept, _) in self._seen.items()}
        self._num_run = count

    def push_gradients(self) -> None:
        """Add the gradients of other physical devices to the module's, and clear them."""
        found = []
        for parameters in self._remote.values():
            found.append({p: own.grad for p, own in parameters.items() if own.grad is not None})
            for own in parameters.values():
                own.grad = None
        every = dict.fromkeys(parameter for grads in found for parameter in grads)
        sparse = {p for grads in found for p, grad in grads.items() if grad.is_sparse}
        with torch.no_grad():
            for parameter in every:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            for parameter in sparse:
                for grad in (grads[parameter] for grads in found if parameter in grads):
                    assert parameter.grad is not None
                    parameter.grad = parameter.grad + grad.to(parameter.device)
            dense = [parameter for parameter in every if parameter not in sparse]
            for bucket in _utils._take_tensors(dense, _BUCKET_BYTES):
                flat = []
                for device, grads in zip(self._remote, found, strict=True):
                    own = _utils._flatten_dense_tensors(_grads_of(bucket, grads, device))
                    flat.append(send(own, self.devices[0]))
                total = flat[0] if len(flat) == 1 else torch.stack(flat).sum(0)
                grads = _utils._unflatten_dense_tensors(total, bucket)
                torch._foreach_add_([parameter.grad for parameter in bucket], grads)

    def _has_other_structure(self) -> bool:
        """Whether layers, or parameters that another device has copies of, came or went."""
        if not self._seen:
            return True
        for module, (children, _) in self._seen.items():
            now = module._modules
            if len(now) != len(children) or not all(map(is_, now.values(), children)):
                return True
        if not self._remote:
            return False
        known = next(iter(self._remote.values()))
        parameters = list(self.module.parameters())
        return len(parameters) != len(known) or not all(
            parameter in known and _are_alike(parameter, known[parameter])
            for parameter in parameters
        )

    def _follow_structure(self) -> None:
        for device, known in self._remote.items():
            self._remote[device] = {
                p: _on(device, p, known.get(p)) for p in self.module.parameters()
            }
        for copy in self._copies:
            copy.follow(self.module, self._remote.get(copy.device))
        self._seen = {
            each: (list(each._modules.values()), self._seen.get(each, (None, dict(vars(each))))[1])
            for each in self._copies[0].modules
        }

    def _follow_attributes(self) -> None:
        for module, (_, seen) in self._seen.items():
            now = vars(module)
            changed: list[str] = []
            if len(now) != len(seen) or not all(map(is_, now.values(), seen.values())):
                changed = [
                    name
                    for name in {**seen, **now}
                    if now.get(name, _MISSING) is not seen.get(name, _MISSING)
                ]
            for index, copy in enumerate(self._copies, 1):
                # A replica without rows in the last step lacks what has been assigned since.
                is_behind = index >= self._num_run
                if is_behind or changed:
                    copy.assign(module, {**seen, **now} if is_behind else changed)

    def _pull_buffers(self) -> None:
        # A further device is sent them once.
        nearest: dict[torch.device, dict[nn.Module, nn.Module]] = {}
        for copy in self._copies:
            near = nearest.get(copy.device, {})
            sources: list[Any] = []
            targets: list[Tensor] = []
            for module, replica in copy.modules.items():
                for name in replica._buffers.keys() - module._buffers.keys():
                    del replica._buffers[name]
                for name, buffer in module._buffers.items():
                    own = replica._buffers.get(name)
                    if buffer is None:
                        replica._buffers[name] = None
                    elif own is None or not _are_alike(buffer, own):
                        replica._buffers[name] = _copied(buffer, copy.device)
                    else:
                        sources.append(near.get(module, module)._buffers[name])
                        targets.append(own)
            if not near and copy.device != self.devices[0]:
                _send_all(sources, {copy.device: targets})
                nearest[copy.device] = copy.modules
            elif targets:
                torch._foreach_copy_(targets, sources)

    def _broadcast_parameters(self) -> None:
        if self._remote:
            targets = {device: list(own.values()) for device, own in self._remote.items()}
            _send_all(list(next(iter(self._remote.values()))), targets)


class _Copy:
    """The copy of a module's tree for one replica."""

    def __init__(self, device: torch.device, metrics: MetricCopies) -> None:
        self.device = device
        #: By submodule, its copy.
        self.modules: dict[nn.Module, nn.Module] = {}
        self._metrics = metrics
        self._parameters: _Parameters | None = None
        #: Attributes that are not those of the module.
        self._own: dict[nn.Module, set[str]] = {}

    def follow(self, module: nn.Module, parameters: _Parameters | None) -> None:
        """Copy the tree of the module as it is now; copies of layers stay the same objects."""
        known, self.modules, self._parameters = self.modules, {}, parameters
        self._copy(module, known)
        for each, replica in self.modules.items():
            if each in known:
                continue
            own = {}
            if isinstance(each, _DeviceDtypeModuleMixin):
                # Lightning searches the copy for the names of its metrics.
                own = {"_device": self.device, "_metric_attributes": None}
            own.update(_compiled_steps(each, replica))
            self._own[each] = _OWN | own.keys()
            self.assign(each, vars(each))
            vars(replica).update(own)
            if isinstance(replica, nn.RNNBase) and parameters is not None:
                # Otherwise cuDNN copies all weights in each step, and warns.
                replica.flatten_parameters()

    def assign(self, module: nn.Module, names: Iterable[str]) -> None:
        """Take over attributes of a submodule; where they refer to its layers, to the copies."""
        attributes = vars(self.modules[module])
        for name in names:
            if name in self._own[module]:
                continue
            value = vars(module).get(name, _MISSING)
            if value is _MISSING:
                attributes.pop(name, None)
            else:
                attributes[name] = _mapped(value, self._own_of)

    def _copy(self, module: nn.Module, known: dict[nn.Module, nn.Module]) -> nn.Module:
        if module in self.modules:
            return self.modules[module]
        replica = known.get(module) or type(module).__new__(type(module))
        self.modules[module] = replica
        parameters = module._parameters
        if self._parameters is not None:
            parameters = {n: p if p is None else self._parameters[p] for n, p in parameters.items()}
        vars(replica).update(
            _parameters=parameters,
            _buffers=vars(replica).get("_buffers", {}),
            _modules={
                name: child
                if child is None
                else self._own_of(child)
                if is_metric(child)
                else self._copy(child, known)
                for name, child in module._modules.items()
            },
        )
        return replica

    def _own_of(self, value: Any) -> Any:
        """What the replica has in place of an object; the object itself where it has nothing."""
        if is_metric(value):
            return self._metrics.of(value)
        if isinstance(value, nn.Module):
            return self.modules.get(value, value)
        if isinstance(value, nn.Parameter) and self._parameters is not None:
            return self._parameters.get(value, value)
        return value


def check_module(module: LightningModule, devices: Sequence[torch.device]) -> None:
    """Check that a module can be replicated; see `Replicas`."""
    config: dict[str, Any] = {}
    if (context := module._compiler_ctx) is not None:
        config = getattr(context["dynamo_ctx"], "compiler_config", None) or {}
    if config.get("triton.cudagraphs") and len(set(devices)) > 1:
        raise ValueError(
            "torch.compile with CUDA graphs, such as mode='reduce-overhead', under memmap_dp on"
            f" {len(set(devices))} devices: graphs belong to one thread, and each device has its"
            " own; compile with another mode, or train with memmap_superbatch_ddp"
        )
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise UnsuitableModuleError(
                f"the submodule {name!r} is a ScriptModule, which memmap_dp cannot replicate:"
                " use the module that was scripted, or memmap_superbatch"
            )
        if child._compiled_call_impl is not None or isinstance(child, OptimizedModule):
            raise UnsuitableModuleError(
                f"the submodule {name or 'self'!r} was compiled on its own, and memmap_dp"
                " cannot replicate it: give the Trainer torch.compile(module) of the whole"
                " LightningModule, or use memmap_superbatch"
            )
        if isinstance(child, Metric) and (states := _states_without_reduction(child)):
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


def _states_without_reduction(metric: Metric) -> list[str]:
    """The tensor states of a metric that cannot be merged."""
    return [
        name
        for name, reduction in metric._reductions.items()
        if reduction is None and isinstance(metric._defaults[name], Tensor)
    ]


def _compiled_steps(module: nn.Module, replica: nn.Module) -> dict[str, Any]:
    """The methods of a compiled LightningModule, compiled for a replica."""
    context = getattr(module, "_compiler_ctx", None)
    if context is None:
        return {}
    compiled = {}
    for name in _COMPILED:
        # A module that is fitted again was compiled before: this unwraps the first compilation.
        original = innermost_fn(context[f"original_{name}"])
        if isinstance(original, MethodType):
            original = MethodType(original.__func__, replica)
        compiled[name] = context["dynamo_ctx"](original)
    return compiled


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


def _mapped(value: Any, replace: Callable[[Any], Any], depth: int = _MAX_DEPTH) -> Any:
    """A value with other references in it; the same object where nothing is replaced."""
    if type(value) in (list, tuple) and depth:
        items = [_mapped(item, replace, depth - 1) for item in value]
        return value if all(map(is_, items, value)) else type(value)(items)
    if type(value) is dict and depth:
        pairs = {key: _mapped(item, replace, depth - 1) for key, item in value.items()}
        return value if all(map(is_, pairs.values(), value.values())) else pairs
    if isinstance(value, weakref.ref):
        target = value()
        mapped = replace(target)
        return value if mapped is target else weakref.ref(mapped)
    if isinstance(value, MethodType):
        owner = replace(value.__self__)
        return value if owner is value.__self__ else MethodType(value.__func__, owner)
    return replace(value)


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().to(device, copy=True)


def _on(device: torch.device, parameter: nn.Parameter, known: nn.Parameter | None) -> nn.Parameter:
    if known is not None and _are_alike(parameter, known):
        return known
    return nn.Parameter(_copied(parameter, device), parameter.requires_grad)


def _grads_of(
    parameters: list[nn.Parameter], grads: dict[nn.Parameter, Tensor], device: torch.device
) -> list[Tensor]:
    # A replica that does not use a parameter has no gradient of it.
    return [grads[p] if p in grads else torch.zeros_like(p, device=device) for p in parameters]


def _send_all(sources: list[Any], targets: Mapping[torch.device, list[Any]]) -> None:
    """Copy tensors to tensors on other devices, many small ones at once."""
    every = (_utils._take_tensors(each, _BUCKET_BYTES) for each in (sources, *targets.values()))
    for bucket, *others in zip(*every, strict=True):
        flat = _utils._flatten_dense_tensors(bucket)
        for device, own in zip(targets, others, strict=True):
            torch._foreach_copy_(own, _utils._unflatten_dense_tensors(send(flat, device), bucket))
