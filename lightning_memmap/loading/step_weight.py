"""How much of a step's loss belongs to one process, for strategies that average gradients."""

from collections import deque
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Weights that a loader keeps where no strategy takes them, as under Lightning's own.
_MAX_PENDING = 64


class StepWeight(NamedTuple):
    """The weight of one process's mean loss in the mean over the whole step.

    Args:
        local: The number that the mean of this process is over, usually its rows.
        total: The sum of ``local`` over all processes.
        parts: The amount that each data device of this process adds to ``local``; empty if these
            are its rows.
    """

    local: float
    total: float
    parts: tuple[float, ...] = ()

    def scale(self, num_processes: int) -> float:
        """Return the factor of the loss that makes an average over processes the mean of a step."""
        return self.local * num_processes / self.total if self.total else 0.0


def weights_of_steps(
    by_position: NDArray[Any],
    bounds: NDArray[np.int64],
    rank: int,
    size: int,
    accumulated: int = 1,
    first: int = 0,
    limit: int | None = None,
    num_devices: int = 1,
) -> list[StepWeight]:
    """Weigh steps by what their positions weigh, such as numbers of tokens.

    The mean of a step is then over all of its tokens, and the mean over micro-batches, which
    Lightning divides by ``accumulated``, over the tokens of all of them, also if the last group of
    the epoch is incomplete.

    Args:
        by_position: The weight of each position of the epoch, of shape (N,).
        bounds: The first position of each step, and one past its last one, int64 (steps, 2).
        rank: The process that serves the positions ``rank, rank + size, ...``.
        size: Processes.
        accumulated: Steps between two steps of the optimizer.
        first: The number of the first of these steps in the epoch.
        limit: Steps of the epoch that are used; None for all.
        num_devices: Data devices of this process. Device ``d`` serves every ``num_devices``-th
            position of the process, from its ``d``-th position on.
    """
    before = np.append(0.0, np.cumsum(by_position, dtype=np.float64))
    totals = before[bounds[:, 1]] - before[bounds[:, 0]]
    parts = np.empty((len(bounds), num_devices))
    for device in range(num_devices):
        device_weights = np.zeros(len(by_position))
        served = slice(rank + size * device, None, size * num_devices)
        device_weights[served] = by_position[served]
        device_before = np.append(0.0, np.cumsum(device_weights))
        parts[:, device] = device_before[bounds[:, 1]] - device_before[bounds[:, 0]]
    if accumulated > 1 and len(totals):
        number = first + np.arange(len(totals))
        counted = totals if limit is None else np.where(number < limit, totals, 0)
        group = number // accumulated
        totals = np.bincount(group - group[0], counted)[group - group[0]] / accumulated
    steps = zip(
        parts.sum(axis=1).tolist(), totals.tolist(), map(tuple, parts.tolist()), strict=True
    )
    return [StepWeight(*step) for step in steps]


class DeliveredSteps:
    """The batches that a loader has delivered and whose weights no strategy has taken yet."""

    # One batch, unless something between the loader and the Trainer fetches ahead.

    def __init__(self) -> None:
        # The rows of each batch, and the weight of its loss.
        self._pending: deque[tuple[int, StepWeight]] = deque(maxlen=_MAX_PENDING)
        self._discarded: list[tuple[int, StepWeight]] = []
        #: Notes the rows and the weight of a batch as delivered.
        self.add = self._pending.append

    def begin_epoch(self) -> None:
        """Discard what an earlier epoch delivered in excess."""
        self._discarded = [*self._pending]
        self._pending.clear()

    def take(self) -> tuple[int, StepWeight, bool] | None:
        """Return the earliest batch, which the Trainer trains on next, and forget it.

        Returns:
            Its rows, its weight, and whether another batch with another weight could be meant. None
            if nothing was delivered since the last call.
        """
        if not self._pending:
            return None
        num_rows, weight = self._pending.popleft()
        candidates = (*self._discarded, *self._pending)
        self._discarded.clear()
        scale = weight.scale(1) if candidates else 1.0
        is_ambiguous = any(other.scale(1) != scale for _, other in candidates)
        return num_rows, weight, is_ambiguous
