"""Merging what the replicas of ``memmap_dp`` log into one call of ``self.log``."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_memmap.strategies.replicas.merge_outputs import weighted_mean

#: The dtypes in which Lightning keeps logged values.
_LOGGED_DTYPES = (torch.float32, torch.float64)


class ReplicaLog:
    """Records the calls of ``self.log`` of one replica in a step."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Record a call of `self.log`."""
        if isinstance(value, (int, float)):
            # In the dtype of the step's precision.
            value = torch.tensor(value, dtype=torch.get_default_dtype())
        self.calls.append((name, value, args, options))


@contextmanager
def log_to(module: nn.Module, log: ReplicaLog) -> Iterator[None]:
    """Redirect ``module.log`` to a log within the context."""
    before = {key: value for key, value in vars(module).items() if key == "log"}
    vars(module)["log"] = log
    try:
        yield
    finally:
        del vars(module)["log"]
        vars(module).update(before)


def merge_logs(
    logs: Sequence[ReplicaLog], row_ranges: Sequence[range], module: LightningModule
) -> None:
    """Log what all replicas have logged in a step, one call for all rows, and clear the logs.

    Args:
        logs: The logs, by replica.
        row_ranges: The rows of the step that each replica has.
        module: The module that logs.
    """
    merged: dict[tuple[str, int], list[tuple[int, Any, Any, dict[str, Any]]]] = {}
    for log, rows in zip(logs, row_ranges, strict=False):
        counts: Counter[str] = Counter()
        for name, value, args, options in log.calls:
            call = (options.get("batch_size") or len(rows), value, args, options)
            merged.setdefault((name, counts[name]), []).append(call)
            counts[name] += 1
        log.calls = []
    for (name, _), calls in merged.items():
        _, value, args, options = calls[0]
        sizes = [call[0] for call in calls]
        values = [call[1] for call in calls]
        if all(isinstance(value, Tensor) for value in values):
            value = _merged_value(values, sizes, options.get("reduce_fx"), module.device)
        if len(calls) < len(row_ranges) or "batch_size" in options:
            options = {**options, "batch_size": sum(sizes)}
        module.log(name, value, *args, **options)


def _merged_value(
    values: list[Any], sizes: list[int], reduction: Any, device: torch.device
) -> Tensor:
    tensors = [value.detach().to(device) for value in values]
    tensors = [t if t.dtype in _LOGGED_DTYPES else t.float() for t in tensors]
    name = reduction if isinstance(reduction, str) else getattr(reduction, "__name__", "")
    if name in ("sum", "max", "min"):
        method = {"sum": "sum", "max": "amax", "min": "amin"}[name]
        merged: Tensor = getattr(torch.stack(tensors), method)(0)
        return merged
    # Lightning rejects any other reduction but the mean.
    return weighted_mean(tensors, sizes, device)
