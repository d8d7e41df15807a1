"""How much of a step's loss belongs to one process, for strategies that average gradients."""

from collections import deque
from typing import NamedTuple

#: Weights that a loader keeps where no strategy takes them, as under Lightning's own.
_MAX_PENDING = 64


class StepWeight(NamedTuple):
    """The weight of one process's mean loss in the mean over the whole step.

    Args:
        local: The number that the mean of this process is over, usually its rows.
        total: The sum of ``local`` over all processes.
    """

    local: float
    total: float

    def scale(self, num_processes: int) -> float:
        """Return the factor of the loss that makes an average over processes the mean of a step."""
        return self.local * num_processes / self.total


class DeliveredSteps:
    """The batches that a loader has delivered and whose weights no strategy has taken yet."""

    # One batch, unless something between the loader and the Trainer fetches ahead.

    def __init__(self) -> None:
        # The rows of each batch, and the weight of its loss.
        self._pending: deque[tuple[int, StepWeight]] = deque(maxlen=_MAX_PENDING)
        self._discarded: list[tuple[int, StepWeight]] = []

    def begin_epoch(self) -> None:
        """Discard what an earlier epoch delivered in excess."""
        self._discarded = [*self._pending]
        self._pending.clear()

    def add(self, num_rows: int, weight: StepWeight) -> None:
        """Note a batch as delivered."""
        self._pending.append((num_rows, weight))

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
        return num_rows, weight, any(other != weight for _, other in candidates)
