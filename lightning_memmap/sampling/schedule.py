"""How the positions of an epoch are divided into steps, and into blocks.

Steps take consecutive positions, and a run may skip some of them. 22 rows in steps of 8, and how a
last step of fewer rows than shards shares rows with the one before::

    3 shards     0 .. 7   8 .. 15  16 .. 21
    12 shards    0 .. 7   8 .. 14  15 .. 21

A block is the positions of some consecutive rounds over the shards, which are read from disk at
once. Its rows of one shard are long runs of a file, or close together in it.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from lightning_memmap.errors import check_integer
from lightning_memmap.integers import Integers, ceil_div
from lightning_memmap.sampling.sampler import Sampler

#: Bytes of a block over all shards if the user sets none: 21 MiB of each of 24 shards.
DEFAULT_BLOCK_BYTES = 512 * 2**20


@dataclass(frozen=True)
class ConsecutiveSteps:
    """Steps without a gap between their positions.

    Args:
        start: First position of the first step.
        global_batch: Positions of a full step.
        num_full: Full steps.
        tail: Positions of each step after them.
    """

    start: int
    global_batch: int
    num_full: int
    tail: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.num_full + len(self.tail)

    def position(self, step: int) -> int:
        """Return the first position of a step, or one past the last position."""
        num_full = min(step, self.num_full)
        return self.start + num_full * self.global_batch + sum(self.tail[: step - num_full])

    def until(self, position: int) -> "ConsecutiveSteps | None":
        """Return the steps before a position; None if the position is inside a step."""
        step = bisect_left(range(len(self) + 1), position, key=self.position)
        if self.position(step) != position:
            return None
        num_full = min(step, self.num_full)
        return replace(self, num_full=num_full, tail=self.tail[: step - num_full])


@dataclass(frozen=True)
class BatchSchedule:
    """How the positions from ``start`` to the end of an epoch are divided into steps.

    Args:
        num_positions: Positions of an epoch, ``N``.
        global_batch: Positions of a step, ``G``.
        num_shards: Shards, ``C``.
        drop_last: Whether an incomplete last step is dropped.
        start: First position.
        skipped: Half-open ranges of positions that are skipped.
    """

    # Every step but the last two takes G positions. Without skips, the last two depend on N, G and
    # C only, so every process takes the same number of steps, each with at least one row:
    # - a last step of C rows or more stays as it is; a shorter one shares the rows of the step
    #   before;
    # - if even these two would be too short for gcd(G, C) data devices, the most that there can be,
    #   both become one step, which only happens if G divides C.

    num_positions: int
    global_batch: int
    num_shards: int
    drop_last: bool = False
    start: int = 0
    skipped: tuple[tuple[int, int], ...] = ()

    @cached_property
    def stretches(self) -> tuple[ConsecutiveSteps, ...]:
        """The steps between skipped positions."""
        stretches: list[ConsecutiveSteps] = []
        start = self.start
        for skip_start, skip_stop in self.skipped:
            if skip_start >= self.num_positions or skip_stop <= start:
                continue
            if skip_start > start:
                # Positions that were skipped with another global batch may start inside a step.
                # The steps before them are then divided as if the epoch ended there.
                steps = self._steps(start, self.num_positions).until(skip_start)
                stretches.append(steps or self._steps(start, skip_start))
            start = min(skip_stop, self.num_positions)
        stretches.append(self._steps(start, self.num_positions))
        return tuple(steps for steps in stretches if len(steps))

    def _steps(self, start: int, stop: int) -> ConsecutiveSteps:
        num_full, rest = divmod(stop - start, self.global_batch)
        if not rest or self.drop_last:
            return ConsecutiveSteps(start, self.global_batch, num_full)
        if not num_full or rest >= self.num_shards:
            return ConsecutiveSteps(start, self.global_batch, num_full, (rest,))
        shared = self.global_batch + rest
        is_one_step = shared // 2 < math.gcd(self.global_batch, self.num_shards)
        tail = (shared,) if is_one_step else (shared - shared // 2, shared // 2)
        return ConsecutiveSteps(start, self.global_batch, num_full - 1, tail)

    def __len__(self) -> int:
        return sum(map(len, self.stretches))

    def bounds(self, step: int) -> tuple[int, int]:
        """Return the first and one past the last position of a step."""
        offset = step
        for steps in self.stretches:
            if 0 <= offset < len(steps):
                return steps.position(offset), steps.position(offset + 1)
            offset -= len(steps)
        raise IndexError(f"step={step}: the schedule has {len(self)} steps")


Span = tuple[int, int]
_Count = Annotated[int, Meta(ge=0)]


class SkippedSteps(msgspec.Struct, frozen=True, array_like=True):
    """The steps that a run skips, and the positions they had when they were skipped.

    Both are half-open ranges counted over all epochs, as checkpoints store them.
    """

    steps: tuple[tuple[_Count, _Count], ...] = ()
    positions: tuple[tuple[_Count, _Count], ...] = ()

    def __post_init__(self) -> None:
        if any(start >= stop for start, stop in (*self.steps, *self.positions)):
            raise ValueError("a range of steps or positions is empty")

    def adding(self, steps: tuple[Span, ...], epoch_schedule: BatchSchedule) -> "SkippedSteps":
        """Return these steps and others, which have the positions of a schedule.

        Raises:
            ValueError: All steps of an epoch would be skipped.
        """
        num_steps = len(epoch_schedule)
        num_positions = epoch_schedule.num_positions

        def position(step: int) -> int:
            return step // num_steps * num_positions + epoch_schedule.bounds(step % num_steps)[0]

        new = [(position(start), position(stop)) for start, stop in _without(steps, self.steps)]
        positions = _merged([*self.positions, *new])
        skipped = SkippedSteps(_merged([*self.steps, *steps]), positions)
        for start, stop in positions:
            for epoch in range(start // num_positions, ceil_div(stop, num_positions)):
                if not len(replace(epoch_schedule, skipped=skipped.of_epoch(epoch, num_positions))):
                    raise ValueError(
                        f"skip_steps: all {num_steps} steps of epoch {epoch} would be skipped, that"
                        f" is {epoch * num_steps} to {(epoch + 1) * num_steps - 1} of the run: skip"
                        " fewer, or resume from a checkpoint of a later epoch"
                    )
        return skipped

    def of_epoch(self, epoch: int, num_positions: int) -> tuple[Span, ...]:
        """Return the skipped positions of an epoch of ``num_positions`` positions."""
        start = epoch * num_positions
        spans = ((max(0, a - start), min(b - start, num_positions)) for a, b in self.positions)
        return tuple((a, b) for a, b in spans if a < b)

    def epochs(self, num_positions: int) -> list[int]:
        """Return the epochs with skipped positions."""
        spans = (range(a // num_positions, ceil_div(b, num_positions)) for a, b in self.positions)
        return sorted({epoch for span in spans for epoch in span})


def steps_to_skip(value: Any) -> tuple[Span, ...]:
    """Convert the argument ``skip_steps``, a range or integers, to half-open ranges."""
    if value is None:
        return ()
    if isinstance(value, range):
        ascending = value if value.step > 0 else value[::-1]
        is_one = ascending.step == 1
        spans = [(ascending.start, ascending.stop)] if is_one else [(s, s + 1) for s in ascending]
    elif isinstance(value, (list, tuple, set)):
        spans = [(step, step + 1) for step in (check_integer("skip_steps", s, 0) for s in value)]
    else:
        raise TypeError(
            f"skip_steps={value!r}: pass a range of steps of the run, such as"
            " range(81_200, 81_400), or a list of them"
        )
    spans = [(start, stop) for start, stop in spans if start < stop]
    if spans and min(spans)[0] < 0:
        raise ValueError(f"skip_steps={value!r}: steps of a run are counted from 0")
    return _merged(spans)


def _merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Merge ranges into ascending ranges that do not touch."""
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return tuple(merged)


def _without(spans: tuple[Span, ...], others: tuple[Span, ...]) -> Iterator[Span]:
    """Yield the parts of ranges that other ranges do not cover; both ascend."""
    for start, stop in spans:
        for other_start, other_stop in others:
            if other_start < stop and other_stop > start:
                if start < other_start:
                    yield start, other_start
                start = max(start, other_stop)
        if start < stop:
            yield start, stop


def default_block(num_shards: int, row_bytes: float) -> int:
    """Return the default rows of a shard in a block: a function of the store only."""
    return max(1, int(DEFAULT_BLOCK_BYTES // max(1, num_shards * row_bytes)))


@dataclass(frozen=True)
class Blocks:
    """The blocks of a sampler's epochs: what is read at once."""

    sampler: Sampler

    @property
    def num_rounds(self) -> int:
        """Rounds over the shards in a block: its positions of each shard."""
        assert self.sampler.shuffle_block is not None, f"{self.sampler} has no blocks"
        return self.sampler.shuffle_block

    @property
    def has_runs(self) -> bool:
        """Whether a block holds the same offsets of each shard, in runs of consecutive ones."""
        return self.sampler.block_runs(0, 0) is not None

    @property
    def num_block_positions(self) -> int:
        """Positions of a block over all shards."""
        return self.num_rounds * self.sampler.num_shards

    def __len__(self) -> int:
        return ceil_div(self.sampler.num_positions, self.num_block_positions)

    @property
    def max_rows_per_shard(self) -> int:
        """The most rows of a shard in a block."""
        sampler = self.sampler
        longest = min(self.num_rounds, ceil_div(sampler.num_positions, sampler.num_shards))
        for shard, num_rows in enumerate(sampler.pool.sizes.tolist()):
            most = sampler.most_in_block(shard, np.broadcast_to(np.int64(1), num_rows))
            if most is None:
                break
            longest = max(longest, most)
        return longest

    def pool_indices(self, epoch: int, block_index: int, shards: Integers) -> Integers:
        """Return the rows that a block holds of some shards, as indices in the pool."""
        sampler = self.sampler
        start = block_index * self.num_rounds
        stop = min(start + self.num_rounds, ceil_div(sampler.num_positions, sampler.num_shards))
        return sampler.rows_at(epoch, start, stop, shards)
