"""What the replicas of a step log and count, merged as if it had been one call of the step."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_mean

from lightning_memmap.strategies.microbatch import weighted_mean


@dataclass
class LogCall:
    """One call of ``self.log``."""

    function: str
    name: str
    value: Any
    #: Weight of the call in a mean over rows.
    num_rows: int
    options: dict[str, Any]


@dataclass
class PartLog:
    """Takes the place of the Trainer's results while one part of a step runs."""

    num_rows: int
    calls: list[LogCall] = field(default_factory=list)
    restarted: list[str] = field(default_factory=list)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        """What ``self.log`` calls of Lightning's results."""
        given = options.pop("batch_size", None)
        self.calls.append(LogCall(fx, name, value, given or self.num_rows, options))

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """What ``self.log`` calls in the first batch of a stage: ``metrics`` is always False."""
        assert metrics is False
        if fx is not None and fx not in self.restarted:
            self.restarted.append(fx)


def make_trainer_proxy(trainer: Any, results: Callable[[], Any]) -> Any:
    """A Trainer that shares all state with another one, but for what ``self.log`` writes to."""
    kind: Any = type(
        type(trainer).__name__,
        (type(trainer),),
        {"__slots__": (), "_results": property(lambda proxy: results())},
    )
    proxy: Any = object.__new__(kind)
    object.__setattr__(proxy, "__dict__", trainer.__dict__)
    return proxy


def merge_logs(
    logs: Sequence[PartLog], results: Any, module: LightningModule, strategy: Strategy
) -> None:
    """Log once what the parts of a step logged, as one call over all of their rows."""
    for function in dict.fromkeys(function for log in logs for function in log.restarted):
        results.reset(metrics=False, fx=function)
    merged: dict[tuple[str, str, int], list[LogCall]] = {}
    for log in logs:
        counts: dict[tuple[str, str], int] = {}
        for call in log.calls:
            key = (call.function, call.name)
            counts[key] = counts.get(key, -1) + 1
            merged.setdefault((*key, counts[key]), []).append(call)
    for (function, name, _), calls in merged.items():
        # Lightning compares the options of all calls with one name: they must not hold a proxy.
        options = {**calls[0].options, "sync_dist_fn": strategy.reduce}
        if isinstance(calls[0].value, Metric):
            value: Any = module.get_submodule(options["metric_attribute"])
        else:
            value = _merged_value(calls, options.get("reduce_fx", torch.mean), strategy.root_device)
        num_rows = sum(call.num_rows for call in calls)
        results.log(function, name, value, batch_size=num_rows, **options)


def _merged_value(calls: list[LogCall], reduction: Any, device: torch.device) -> Tensor:
    values = [call.value.to(device) for call in calls]
    # Lightning keeps what is logged in these dtypes.
    values = [v if v.dtype in (torch.float32, torch.float64) else v.float() for v in values]
    name = reduction if isinstance(reduction, str) else getattr(reduction, "__name__", "")
    if name in ("sum", "max", "min"):
        reduce = getattr(torch.stack(values), {"sum": "sum", "max": "amax", "min": "amin"}[name])
        merged: Tensor = reduce()
        return merged
    # Any other reduction but the mean is refused by Lightning.
    return weighted_mean(values, [call.num_rows for call in calls], device)


class MetricCopies:
    """Empty copies of metrics on one device, made when they are first asked for."""

    # By ``id``: metrics overload comparison, and their hash changes with their state.

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[int, tuple[nn.Module, Any]] = {}

    def of(self, metric: nn.Module) -> Any:
        """The copy of a metric or collection, the same one each time."""
        if id(metric) not in self._copies:
            self._copies[id(metric)] = (metric, _copy_metric(metric, self._device))
        return self._copies[id(metric)][1]

    def keep(self, metrics: Sequence[nn.Module]) -> None:
        """Forget the copies of all other metrics."""
        self._copies = {
            id(each): self._copies[id(each)] for each in metrics if id(each) in self._copies
        }


@contextmanager
def counted_in_copies(module: LightningModule, copies: Sequence[MetricCopies]) -> Iterator[None]:
    """Give a module copies of its metrics within the context, and merge them at its end."""
    found = list(_find_metrics(module))
    if not found:
        yield
        return
    metrics = list({id(metric): metric for _, _, metric in found}.values())
    copies[0].keep(metrics)
    for parent, name, metric in found:
        setattr(parent, name, copies[0].of(metric))
    # Names by which Lightning finds the metrics: it searches again for those of the copies.
    names, module._metric_attributes = module._metric_attributes, None
    try:
        yield
    except BaseException:
        # What a failed step has given to its copies must not reach the next one.
        for metric in metrics:
            for each in copies:
                each.of(metric).reset()
        raise
    finally:
        module._metric_attributes = names
        for parent, name, metric in found:
            setattr(parent, name, metric)
    # Ordinary tensors in inference mode too: a metric may be updated in training as well.
    with torch.inference_mode(False), torch.no_grad():
        for metric in metrics:
            _merge_metrics(metric, [each.of(metric) for each in copies])


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


def is_metric(module: object) -> bool:
    """Whether a module is a metric, or a collection that is copied and merged as a whole."""
    return isinstance(module, (Metric, MetricCollection))


def _find_metrics(
    module: nn.Module, seen: set[nn.Module] | None = None
) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Each metric or collection of a module, with its parent and its name there."""
    seen = set() if seen is None else seen
    seen.add(module)
    # Not `named_children`, which gives a module with two names once.
    for name, child in module._modules.items():
        if child is not None and is_metric(child):
            yield module, name, child
        elif child is not None and child not in seen:
            yield from _find_metrics(child, seen)


def _copy_metric(metric: nn.Module, device: torch.device) -> Any:
    """An empty copy of a torchmetrics metric or collection on a device."""
    copied: Any = copy.deepcopy(metric).to(device)
    for child in copied.modules():
        if isinstance(child, MetricCollection):
            # Each metric of a copy has its own states, which are merged one by one.
            child._enable_compute_groups, child._groups_checked, child._groups = False, False, {}
    copied.reset()
    return copied


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
