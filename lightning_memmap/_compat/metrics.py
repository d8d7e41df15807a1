"""Private names of torchmetrics: the states of a metric, and their merging."""

from collections.abc import Sequence
from functools import reduce
from itertools import chain
from operator import add
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_mean
from torchmetrics.wrappers import Running

#: The ``__dict__`` of a metric, which contains its states.
Attributes = dict[str, Any]


def unmerged_state(metric: Metric) -> str | None:
    """Describe a state of a metric that could not be merged with another metric's."""
    if isinstance(metric, Running):
        return "a window of updates"
    defaults = metric._defaults
    names = (
        name
        for name, reduction in metric._reductions.items()
        if reduction is None and isinstance(defaults[name], Tensor)
    )
    return next((f"the state {name!r} without a dist_reduce_fx" for name in names), None)


def count_from_nothing(metric: Attributes, device: torch.device) -> None:
    """Reset the states of a metric."""
    for name, default in metric["_defaults"].items():
        is_list = isinstance(default, list)
        metric[name] = [] if is_list else default.detach().clone().to(device)
    metric |= {"_update_count": 0, "_forward_cache": None, "_computed": None, "_device": device}


def merge_metric(metric: Metric, earlier: Attributes, replicas: Sequence[Attributes]) -> None:
    """Merge what replicas have counted in a step, for the value of the step, and earlier counts."""
    has_value = any(replica["_forward_cache"] is not None for replica in replicas)
    _set_states(metric, replicas)
    value = metric.compute() if has_value else None
    _set_states(metric, [earlier, vars(metric).copy()])
    metric._forward_cache = value


def _set_states(target: Metric, parts: Sequence[Attributes]) -> None:
    """Set the states of a metric to several others' states, merged by its ``dist_reduce_fx``."""
    updated = [part for part in parts if part["_update_count"]]
    counts = [part["_update_count"] for part in updated]
    total = sum(counts)
    for name, reduction in target._reductions.items() if total else ():
        values = [move_data_to_device(part[name], target.device) for part in updated]
        merge: Any = reduction
        if isinstance(values[0], list):
            merged: Any = [*chain(*values)]
        elif reduction is dim_zero_cat:
            merged = torch.cat(values)
        elif reduction is dim_zero_mean:
            weighted = (value * (n / total) for value, n in zip(values, counts, strict=True))
            merged = reduce(add, weighted)
        else:
            merged = merge(torch.stack(values))
        setattr(target, name, merged)
    target._update_count = total
    target._computed = None
