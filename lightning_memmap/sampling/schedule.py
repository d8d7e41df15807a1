"""How an epoch is divided: into steps, some of which a run may leave out, and into blocks.

A block is the positions of some consecutive rounds over the shards, which are read from disk at
once. The rows of one shard in it are long runs of a file, or lie near each other there.
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
from lightning_memmap.sampling.rows import Integers
from lightning_memmap.sampling.sampler import Sampler

#: Bytes of a block over all shards if the user gives no number: 21 MiB of each of 24 shards.
DEFAULT_BLOCK_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Piece:
    """Steps whose positions follow one another."""

    first: int
    global_batch: int
    num_full: int
    tail: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.num_full + len(self.tail)

    def edge(self, step: int) -> int:
        """The first position of a step of this piece, or one past the last one."""
        full = min(step, self.num_full)
        return self.first + full * self.global_batch + sum(self.tail[: step - full])

    def ending(self, position: int) -> "Piece | None":
        """The steps before a position; None where it is inside of a step."""
        step = bisect_left(range(len(self) + 1), position, key=self.edge)
        full = min(step, self.num_full)
        found = replace(self, num_full=full, tail=self.tail[: step - full])
        return found if self.edge(step) == position else None


@dataclass(frozen=True)
class BatchSchedule:
    """How the positions from ``start`` to the end of an epoch are divided into steps."""

    # Every step but the last two takes G positions. The last ones depend on N, G and C alone, so
    # that every process takes equally many steps with at least one row in each:
    # - drop_last: an incomplete last step is dropped;
    # - a last step of C rows or more is taken as it is; one of fewer shares with the one before;
    # - where even these would be too short for gcd(G, C) data devices, the most that there can be,
    #   both become one step, which happens only where G divides C.

    num_rows: int
    global_batch: int
    num_shards: int
    drop_last: bool = False
    start: int = 0
    skipped: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise ValueError(f"global_batch={self.global_batch}: at least 1 row is needed")
        if not 0 <= self.start <= self.num_rows:
            raise ValueError(f"start={self.start}: outside the epoch's {self.num_rows} rows")

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The steps in pieces, between which positions are skipped."""
        found, start = list[Piece](), self.start
        for first, last in self.skipped:
            if first >= self.num_rows or last <= start:
                continue
            if first > start:
                # Where the positions were skipped with another global batch, they may begin inside
                # of a step: the steps before them are divided as if the epoch ended there.
                whole = self._piece(start, self.num_rows)
                found.append(whole.ending(first) or self._piece(start, first))
            start = min(last, self.num_rows)
        found.append(self._piece(start, self.num_rows))
        return tuple(piece for piece in found if len(piece))

    def _piece(self, start: int, end: int) -> Piece:
        full, left = divmod(end - start, self.global_batch)
        if not left or self.drop_last:
            return Piece(start, self.global_batch, full)
        if not full or left >= self.num_shards:
            return Piece(start, self.global_batch, full, (left,))
        both = self.global_batch + left
        is_one = both // 2 < math.gcd(self.global_batch, self.num_shards)
        tail = (both,) if is_one else (both - both // 2, both // 2)
        return Piece(start, self.global_batch, full - 1, tail)

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    def bounds(self, step: int) -> tuple[int, int]:
        """First and one-past-last position of a step."""
        left = step
        for piece in self.pieces:
            if 0 <= left < len(piece):
                return piece.edge(left), piece.edge(left + 1)
            left -= len(piece)
        raise IndexError(f"step={step}: the schedule has {len(self)} steps")


Span = tuple[int, int]
_Count = Annotated[int, Meta(ge=0)]


class SkippedSteps(msgspec.Struct, frozen=True, array_like=True):
    """The steps that a run leaves out, and the positions that they had when that was decided.

    A checkpoint has these two lists of ranges, both counted over all epochs.
    """

    steps: tuple[tuple[_Count, _Count], ...] = ()
    positions: tuple[tuple[_Count, _Count], ...] = ()

    def __post_init__(self) -> None:
        if any(first >= last for first, last in (*self.steps, *self.positions)):
            raise ValueError("a range of steps or positions is empty")

    def adding(self, steps: tuple[Span, ...], epoch_steps: BatchSchedule) -> "SkippedSteps":
        """These and others."""
        count, num_rows = len(epoch_steps), epoch_steps.num_rows

        def begin(step: int) -> int:
            return step // count * num_rows + epoch_steps.bounds(step % count)[0]

        new = [(begin(first), begin(last)) for first, last in _without(steps, self.steps)]
        positions = _joined([*self.positions, *new])
        found = SkippedSteps(_joined([*self.steps, *steps]), positions)
        for first, last in positions:
            for epoch in range(first // num_rows, -(-last // num_rows)):
                if not len(replace(epoch_steps, skipped=found.of_epoch(epoch, num_rows))):
                    raise ValueError(
                        f"skip_steps: all {count} steps of epoch {epoch} would be left out, steps"
                        f" {epoch * count} to {(epoch + 1) * count - 1} of the run: leave some of"
                        " them in, or resume from a checkpoint of a later epoch"
                    )
        return found

    def of_epoch(self, epoch: int, num_rows: int) -> tuple[Span, ...]:
        """The positions that an epoch leaves out, of so many."""
        start = epoch * num_rows
        found = ((max(0, a - start), min(b - start, num_rows)) for a, b in self.positions)
        return tuple((first, last) for first, last in found if first < last)

    def epochs(self, num_rows: int) -> list[int]:
        """The epochs that leave some out."""
        spans = (range(a // num_rows, -(-b // num_rows)) for a, b in self.positions)
        return sorted({epoch for span in spans for epoch in span})


def steps_to_skip(given: Any) -> tuple[Span, ...]:
    """The argument ``skip_steps`` as ranges: a range, or numbers of steps."""
    if given is None:
        return ()
    if isinstance(given, range):
        given = given if given.step > 0 else given[::-1]
        edges = [(given.start, given.stop)] if given.step == 1 else [(s, s + 1) for s in given]
    elif isinstance(given, (list, tuple, set)):
        edges = [(step, step + 1) for step in (check_integer("skip_steps", s, 0) for s in given)]
    else:
        raise TypeError(
            f"skip_steps={given!r}: give a range of steps of the run, such as"
            " range(81_200, 81_400), or a list of them"
        )
    edges = [(first, last) for first, last in edges if first < last]
    if edges and min(edges)[0] < 0:
        raise ValueError(f"skip_steps={given!r}: steps of a run are counted from 0")
    return _joined(edges)


def _joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same numbers in ascending ranges that do not touch."""
    found = list[Span]()
    for first, last in sorted(spans):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return tuple(found)


def _without(spans: tuple[Span, ...], others: tuple[Span, ...]) -> Iterator[Span]:
    """The numbers of ranges that others lack; both ascend."""
    for first, last in spans:
        for begin, end in others:
            if begin < last and end > first:
                if first < begin:
                    yield first, begin
                first = max(first, end)
        if first < last:
            yield first, last


def default_window(num_shards: int, row_bytes: float) -> int:
    """Rows of a shard in a block. Depends on the store alone: the same on every machine."""
    return max(1, int(DEFAULT_BLOCK_BYTES // max(1, num_shards * row_bytes)))


@dataclass(frozen=True)
class Blocks:
    """What is read at once in the order of a sampler: a block of each shard."""

    sampler: Sampler

    @property
    def rows(self) -> int:
        """Positions of a shard in a block."""
        assert self.sampler.shuffle_window is not None, f"{self.sampler} has no blocks"
        return self.sampler.shuffle_window

    @property
    def has_runs(self) -> bool:
        """Whether a block has the same offsets of each shard, in runs of consecutive ones."""
        return self.sampler.block_runs(0, 0) is not None

    @property
    def positions(self) -> int:
        """Positions in a block of all shards."""
        return self.rows * self.sampler.num_shards

    def __len__(self) -> int:
        return -(-self.sampler.num_positions // self.positions)

    @property
    def longest(self) -> int:
        """Positions of a shard in the longest block."""
        return min(self.rows, -(-self.sampler.num_positions // self.sampler.num_shards))

    def index(self, epoch: int, number: int, held: Integers) -> Integers:
        """The rows that a block has of some shards, by their index in the pool."""
        first = number * self.rows
        last = min(first + self.rows, -(-self.sampler.num_positions // self.sampler.num_shards))
        found = self.sampler.grid(epoch, first, last - 1, held, self.sampler.pool.starts[held])
        rounds = np.arange(first, last, dtype=np.int64)[:, None]
        wanted = rounds * self.sampler.num_shards + held < self.sampler.num_positions
        index: Integers = found[wanted.ravel()]
        return index
