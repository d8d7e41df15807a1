"""How an epoch is divided into steps."""

import math
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class BatchSchedule:
    """How the positions from ``start`` to the end of an epoch are divided into steps.

    Every step but the last two takes ``G`` positions. The last ones follow a rule that
    depends on ``N``, ``G`` and ``C`` alone, so that every process, whatever its rank, takes
    equally many steps with at least one row in each:

    - ``drop_last``: an incomplete last step is dropped;
    - otherwise a last step of ``C`` rows or more is taken as it is, and one of fewer rows
      shares evenly with the step before it;
    - where even the shared steps would be too short for the largest possible number of
      data devices, ``gcd(G, C)``, both become one step of less than ``2 * G`` rows. That happens
      only where ``G`` divides ``C``: with ``G`` data devices, each has one row of a step, and
      there is nothing to share.

    Args:
        num_rows: Rows of the epoch, ``N``.
        global_batch: Rows of a step over all processes, ``G``, at least 1.
        num_shards: Shards of the split, ``C``.
        drop_last: Drop the incomplete last step.
        start: Position of the first row that was not yet delivered, in ``[0, N]``.

    Raises:
        ValueError: ``global_batch`` is below 1, or ``start`` is outside the epoch.
    """

    num_rows: int
    global_batch: int
    num_shards: int
    drop_last: bool = False
    start: int = 0

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise ValueError(f"global_batch={self.global_batch}: at least 1 row is needed")
        if not 0 <= self.start <= self.num_rows:
            raise ValueError(f"start={self.start}: outside the epoch's {self.num_rows} rows")

    @cached_property
    def _tail(self) -> tuple[int, ...]:
        full, left = divmod(self.num_rows - self.start, self.global_batch)
        if not left or self.drop_last:
            return ()
        if not full or left >= self.num_shards:
            return (left,)
        both = self.global_batch + left
        if both // 2 < math.gcd(self.global_batch, self.num_shards):
            return (both,)
        return (both - both // 2, both // 2)

    @cached_property
    def num_full(self) -> int:
        """Steps of full size, which all come before those of other sizes."""
        full, left = divmod(self.num_rows - self.start, self.global_batch)
        shared = bool(full and left and left < self.num_shards and not self.drop_last)
        return full - shared

    def __len__(self) -> int:
        return self.num_full + len(self._tail)

    def bounds(self, step: int) -> tuple[int, int]:
        """First and one-past-last position of a step.

        Args:
            step: The step, counted from 0 at the start of this schedule.

        Returns:
            Two positions of the epoch.

        Raises:
            IndexError: ``step`` is outside ``[0, len(schedule))``.
        """
        if not 0 <= step < len(self):
            raise IndexError(f"step={step}: the schedule has {len(self)} steps")
        full = self.num_full
        first = self.start + min(step, full) * self.global_batch
        if step < full:
            return first, first + self.global_batch
        tail = self._tail
        first += sum(tail[: step - full])
        return first, first + tail[step - full]
