"""What ``self.log`` was given by each replica or micro-batch of a step, logged once for all."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torchmetrics import Metric

from lightning_memmap.strategies.scattering.batch import weighted_mean


@dataclass
class LogCall:
    """One call of ``self.log``.

    Args:
        function: Name of the hook or step that called it.
        name: The name that was logged.
        value: A tensor or a metric.
        num_rows: Weight of the call in a mean over rows.
        options: All other arguments of Lightning's results.
    """

    function: str
    name: str
    value: Any
    num_rows: int
    options: dict[str, Any]


@dataclass
class StepLog:
    """Takes the place of the Trainer's results while one batch of a step runs.

    Args:
        num_rows: Rows of the batch.
        calls: The calls of ``self.log`` so far.
        restarted: Names of the functions whose results a new stage resets.
    """

    num_rows: int
    calls: list[LogCall] = field(default_factory=list)
    restarted: list[str] = field(default_factory=list)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        """What ``self.log`` calls of Lightning's results.

        Args:
            fx: Name of the hook or step that calls it.
            name: The name to log.
            value: A tensor or a metric.
            **options: All other arguments. ``batch_size`` replaces the rows of the batch.
        """
        given = options.pop("batch_size", None)
        self.calls.append(LogCall(fx, name, value, given or self.num_rows, options))

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """What ``self.log`` calls of Lightning's results in the first batch of a stage.

        Args:
            metrics: Always False, since Lightning resets only what is not a metric here.
            fx: Name of the function whose results are reset.
        """
        assert metrics is False
        if fx is not None and fx not in self.restarted:
            self.restarted.append(fx)


def merge_logs(
    logs: Sequence[StepLog], results: Any, module: LightningModule, strategy: Strategy
) -> None:
    """Log once what the batches of a step logged, as one call over all of their rows.

    Means are weighted by the ``batch_size`` that each call named, or else by the rows of its
    batch; sums are added; of minima and maxima the extreme one is taken. Metrics are logged once.

    Args:
        logs: One per batch.
        results: Lightning's results.
        module: The module, whose own metrics are merged already.
        strategy: The strategy that runs the step.
    """
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
    values = [_at_least_float(call.value.to(device)) for call in calls]
    name = reduction if isinstance(reduction, str) else getattr(reduction, "__name__", "")
    if name in ("sum", "max", "min"):
        reduce = getattr(torch.stack(values), {"sum": "sum", "max": "amax", "min": "amin"}[name])
        merged: Tensor = reduce()
        return merged
    # Any other reduction but the mean is refused by Lightning.
    return weighted_mean(values, [call.num_rows for call in calls], device)


def _at_least_float(value: Tensor) -> Tensor:
    # Lightning keeps what is logged in these dtypes.
    return value if value.dtype in (torch.float32, torch.float64) else value.float()
