"""The metric of a module has the updates of all replicas."""

from copy import deepcopy

import torch
from torchmetrics import Metric

from lightning_memmap._compat.metrics import merge_metric


class RunningAverage(Metric):
    """The mean of all values, kept as a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.value: torch.Tensor
        self.add_state("value", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, value: float) -> None:
        self.value += (value - self.value) / self._update_count

    def compute(self) -> torch.Tensor:
        return self.value


def test_means_of_replicas_are_weighted_by_their_updates() -> None:
    metric = RunningAverage()
    replicas = [deepcopy(metric), deepcopy(metric)]
    for replica, values in zip(replicas, ([1.0, 1.0], [4.0]), strict=True):
        for value in values:
            replica.update(value)
    earlier = vars(deepcopy(metric))
    merge_metric(metric, earlier, [vars(replica).copy() for replica in replicas])
    assert metric.compute() == 2
