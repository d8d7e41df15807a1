"""The torchmetrics of a module, updated by several replicas or micro-batches and merged."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import Metric, MetricCollection

from lightning_memmap._compat.metrics import (
    batch_value,
    copy_metric,
    merge_metric,
    set_batch_value,
)
from lightning_memmap._compat.modules import module_dicts, swap_metric_names


class MetricCopies:
    """Copies of metrics on one device.

    Metrics are identified by ``id``: they overload comparison, and their hash changes with their
    state.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[int, tuple[nn.Module, Any]] = {}

    def get(self, metric: nn.Module) -> Any:
        """The copy of a metric.

        Args:
            metric: A metric or collection of the module.

        Returns:
            The copy; the metric itself where there is none.
        """
        return self._copies.get(id(metric), (metric, metric))[1]

    def copy_of(self, metric: nn.Module, known: "MetricCopies") -> Any:
        """The copy of a metric, made where there is none.

        Args:
            metric: A metric or collection of the module.
            known: Earlier copies. One of this metric is used again.

        Returns:
            The copy. It has no state yet if it is new.
        """
        if id(metric) not in self._copies:
            found = known.get(metric)
            made = copy_metric(metric, self._device) if found is metric else found
            self._copies[id(metric)] = (metric, made)
        return self._copies[id(metric)][1]


class StepMetrics:
    """Lets each replica or micro-batch of a step update empty copies of the module's metrics.

    After the step the copies are merged into the module's own metrics, by their
    ``dist_reduce_fx``. So these are complete after every step, and the value that ``forward``
    gives for a step is over all of its rows.

    Args:
        module: The module.
        device: The root device.
    """

    def __init__(self, module: LightningModule, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._copies = MetricCopies(device)

    @contextmanager
    def copies_in_place(self, replicas: Sequence[MetricCopies]) -> Iterator[None]:
        """Give the module copies of its metrics within the context, and merge them at its end.

        Where the step fails, the module gets its metrics back, and nothing is merged.

        Args:
            replicas: The copies that other replicas update.

        Yields:
            Nothing; inside, the module updates copies.
        """
        found = list(_find_metrics(self._module))
        if not found:
            yield
            return
        metrics = {id(metric): metric for _, _, metric in found}.values()
        copies, known = MetricCopies(self._device), self._copies
        self._copies = copies
        for parent, name, metric in found:
            setattr(parent, name, copies.copy_of(metric, known))
        names = swap_metric_names(self._module, None)
        try:
            yield
        except BaseException:
            # What a failed step has given to its copies must not reach the next one.
            for metric in metrics:
                for each in (copies, *replicas):
                    if (copied := each.get(metric)) is not metric:
                        copied.reset()
            raise
        finally:
            swap_metric_names(self._module, names)
            for parent, name, metric in found:
                setattr(parent, name, metric)
        # Ordinary tensors in inference mode too: a metric may be updated in training as well.
        with torch.inference_mode(False), torch.no_grad():
            for metric in metrics:
                _merge(metric, [each.get(metric) for each in (copies, *replicas)])


def _merge(metric: nn.Module, copies: list[nn.Module]) -> None:
    for own, *others in zip(metric.modules(), *(c.modules() for c in copies), strict=True):
        if isinstance(own, Metric):
            step, *rest = others
            has_value = any(batch_value(other) is not None for other in others)
            merge_metric(step, rest)
            merge_metric(own, [step])
            if has_value:
                set_batch_value(own, step.compute())
    for each in copies:
        each.reset()  # type: ignore[operator]


def is_metric(module: nn.Module) -> bool:
    """Whether a module is a metric, or a collection that is copied and merged as a whole.

    Args:
        module: Any module.

    Returns:
        True for a ``Metric`` or ``MetricCollection`` of torchmetrics.
    """
    return isinstance(module, (Metric, MetricCollection))


def _find_metrics(
    module: nn.Module, seen: set[nn.Module] | None = None
) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Each metric or collection of a module, with its parent and its name there."""
    seen = set() if seen is None else seen
    seen.add(module)
    for name, child in module_dicts(module)[2].items():
        if child is not None and is_metric(child):
            yield module, name, child
        elif child is not None and child not in seen:
            yield from _find_metrics(child, seen)
