"""What the parts of a step log and count, merged exactly once."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_memmap._compat.metrics import batch_value, merge_metric, set_batch_value
from lightning_memmap._compat.modules import own_parts, swap_metric_names
from lightning_memmap.strategies.in_parts.replicas import MetricCopies, Twin, is_metric
from lightning_memmap.strategies.in_parts.shares import weighted_mean


@dataclass
class Record:
    """One call of ``self.log``."""

    function: str
    name: str
    value: Any
    num_rows: int
    options: dict[str, Any]


@dataclass
class StepLog:
    """Stands in for the Trainer's results while a part of a step runs: notes what is logged.

    Args:
        num_rows: Rows of the part.
    """

    num_rows: int
    records: list[Record] = field(default_factory=list)
    restarted: list[str] = field(default_factory=list)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        """As Lightning's results are called by ``self.log``."""
        given = options.pop("batch_size", None)
        self.records.append(Record(fx, name, value, given or self.num_rows, options))

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """As Lightning's results are called when a stage begins anew."""
        assert metrics is False
        if fx is not None and fx not in self.restarted:
            self.restarted.append(fx)


def write_logs(
    logs: Sequence[StepLog], results: Any, module: LightningModule, strategy: Strategy
) -> None:
    """Log once what the parts of a step have logged, as one call over all of their rows.

    Means are weighted by the rows that each call named, or else by those of the part; sums are
    added; of minima and maxima the extreme one is taken. Metrics are logged once.

    Args:
        logs: One per part.
        results: Lightning's results.
        module: The module, with its own metrics, which are merged already.
        strategy: The strategy that runs the parts.
    """
    for function in dict.fromkeys(function for log in logs for function in log.restarted):
        results.reset(metrics=False, fx=function)
    calls: dict[tuple[str, str, int], list[Record]] = {}
    for log in logs:
        counts: dict[tuple[str, str], int] = {}
        for record in log.records:
            key = (record.function, record.name)
            counts[key] = counts.get(key, -1) + 1
            calls.setdefault((*key, counts[key]), []).append(record)
    for (function, name, _), records in calls.items():
        # Lightning compares the options of a name's calls, and knows no view of them.
        options = {**records[0].options, "sync_dist_fn": strategy.reduce}
        if isinstance(records[0].value, Metric):
            value: Any = module.get_submodule(options["metric_attribute"])
        else:
            value = _merged(records, options.get("reduce_fx", torch.mean), strategy.root_device)
        num_rows = sum(record.num_rows for record in records)
        results.log(function, name, value, batch_size=num_rows, **options)


def _merged(records: list[Record], reduction: Any, device: torch.device) -> Tensor:
    values = [_at_least_float(record.value.to(device)) for record in records]
    name = reduction if isinstance(reduction, str) else getattr(reduction, "__name__", "")
    if name in ("sum", "max", "min"):
        stacked = torch.stack(values)
        merged: dict[str, Tensor] = {
            "sum": stacked.sum(), "max": stacked.amax(), "min": stacked.amin()
        }  # fmt: skip
        return merged[name]
    # Lightning itself refuses what is none of them.
    return weighted_mean(values, [record.num_rows for record in records], device)


def _at_least_float(value: Tensor) -> Tensor:
    # As Lightning keeps what is logged.
    return value if value.dtype in (torch.float32, torch.float64) else value.float()


class StepMetrics:
    """Lets each replica count in empty copies of the module's metrics during a step.

    Afterwards the copies are merged into the module's own metrics, by their ``dist_reduce_fx``. So
    these are complete after every step, and the value that ``forward`` gives for a step is over
    all of its rows.

    Args:
        module: The module, whose metrics are replaced by copies while `copies_in_place` lasts.
        device: The root device.
    """

    def __init__(self, module: LightningModule, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._copies = MetricCopies(device)

    @contextmanager
    def copies_in_place(self, twins: Sequence[Twin]) -> Iterator[None]:
        """While it lasts, the module has copies of its metrics; at the end all are merged."""
        places = list(_find_metrics(self._module))
        if not places:
            yield
            return
        metrics = {id(metric): metric for _, _, metric in places}.values()
        copies, known = MetricCopies(self._device), self._copies
        self._copies = copies
        for parent, name, metric in places:
            setattr(parent, name, copies.copy_of(metric, known))
        names = swap_metric_names(self._module, None)
        try:
            yield
        finally:
            swap_metric_names(self._module, names)
            for parent, name, metric in places:
                setattr(parent, name, metric)
        # Ordinary tensors in inference mode too: a metric may count in training as well.
        with torch.inference_mode(False), torch.no_grad():
            for metric in metrics:
                twin_copies = (twin.metrics.get(metric) for twin in twins)
                self._merge(metric, [copies.get(metric), *twin_copies])

    def _merge(self, metric: nn.Module, copies: list[nn.Module]) -> None:
        parts = zip(metric.modules(), *(twin.modules() for twin in copies), strict=True)
        for own, *others in parts:
            if isinstance(own, Metric):
                step, *rest = others
                has_value = any(batch_value(other) is not None for other in others)
                merge_metric(step, rest)
                merge_metric(own, [step])
                if has_value:
                    set_batch_value(own, step.compute())
        for twin in copies:
            twin.reset()  # type: ignore[operator]


def _find_metrics(
    module: nn.Module, seen: set[nn.Module] | None = None
) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """The metrics and collections of a module: what holds them, by which name, and they."""
    seen = set() if seen is None else seen
    seen.add(module)
    for name, child in own_parts(module)[2].items():
        if child is not None and is_metric(child):
            yield module, name, child
        elif child is not None and child not in seen:
            yield from _find_metrics(child, seen)
