"""Private names of torchmetrics: the states of metrics, to copy and to merge them."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_mean


def copy_metric(metric: nn.Module, device: torch.device) -> Any:
    """An empty copy of a torchmetrics metric or collection on a device."""
    copied: Any = copy.deepcopy(metric).to(device)
    for child in copied.modules():
        if isinstance(child, MetricCollection):
            # Each metric of a copy has its own states, which are merged one by one.
            child._enable_compute_groups, child._groups_checked, child._groups = False, False, {}
    copied.reset()
    return copied


def states_without_reduction(metric: Metric) -> list[str]:
    """The tensor states of a metric that cannot be merged."""
    return [
        name
        for name, reduction in metric._reductions.items()
        if reduction is None and isinstance(metric._defaults[name], Tensor)
    ]


def merge_metric(target: Metric, sources: list[Metric]) -> None:
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
