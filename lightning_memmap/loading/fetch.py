"""Fetches the rows of coming steps: for all data devices at once, or for each of them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.loading.buffers import BufferPool
from lightning_memmap.loading.device_streams import has_streams, send
from lightning_memmap.loading.row_source import (
    EpochRows,
    Fetched,
    Leaf,
    Steps,
    fixed_fields,
    has_variable,
)
from lightning_memmap.loading.split import SplitRows
from lightning_memmap.loading.variable_rows import joined_rows, send_rows
from lightning_memmap.sampling import Integers, Sampler

#: Small steps are fetched several at once, up to this number of bytes.
_FETCH_BYTES = 2**22


class Fetcher:
    """Fetches rows where they are, for a receiver of all rows or for each data device."""

    def __init__(self, rows: SplitRows, sampler: Sampler, is_apart: bool) -> None:
        self._rows = rows
        self._sampler = sampler
        devices = rows.topology.data_devices
        # One receiver serves all logical data devices where all rows lie in one place on the only
        # physical device, and no transform runs on each of them.
        is_one_place = len(rows.sources) == 1 and {*devices} == {rows.sources[0].device}
        #: Whether there is one receiver of all rows.
        self.is_whole = is_one_place and not is_apart
        self._receivers = devices[:1] if self.is_whole else devices
        owners = [rows.topology.owner(shard) for shard in range(rows.pool.num_shards)]
        pairs = {*zip(rows.source_of_shard.tolist(), owners, strict=True)}
        #: By source, the receivers that it has rows for.
        self._receivers_of = [
            sorted({0 if self.is_whole else d for s, d in pairs if s == which and d is not None})
            for which in range(len(rows.sources))
        ]
        # Two steps may be under way, each with a batch on every data device, and images of a third
        # one are decoded.
        slots = 3 * len(devices) + 2
        self._pools = [BufferPool(fixed_fields(each.fields), slots) for each in rows.sources]

    @contextmanager
    def epoch(self, epoch: int, position: int) -> Iterator[list[EpochRows]]:
        """The rows of each source in the order of an epoch, from a position on."""
        with ExitStack() as stack:
            yield [
                stack.enter_context(source.epoch(self._sampler, epoch, position))
                for source in self._rows.sources
            ]

    def fetch(self, sources: list[EpochRows], steps: Steps) -> Iterator[Fetched]:
        """Fetch the rows of consecutive steps, several small ones at once."""
        longest, images = steps.lengths[0], self._rows.images
        row_bytes = self._rows.sources[0].row_bytes + (0 if images is None else images.row_bytes)
        together = max(1, _FETCH_BYTES // max(1, longest * row_bytes))
        together = min(together, self._rows.sources[0].max_steps, len(steps.lengths))
        supply, numbers = self._rows.supply, np.zeros(0, np.int64)
        if self._rows.are_numbered or supply is not None:
            numbers = self._sampler.dataset_rows(steps.epoch, steps.positions)
        if supply is not None:
            supply.want(numbers)
            # A step does not wait for the rows of later ones.
            together = 1
        edges = np.append(0, np.cumsum(steps.lengths))
        edges = np.append(edges[:-1:together], edges[-1])
        count = len(self._rows.topology.data_devices)
        first = steps.positions.start // steps.positions.step % count
        asked = [self._asked(which, steps, first, edges) for which in range(len(sources))]
        for group, (start, end) in enumerate(pairwise(edges.tolist())):
            some = slice(group * together, (group + 1) * together)
            part = Steps(
                steps.epoch,
                steps.first_step + some.start,
                steps.positions[start:end],
                steps.lengths[some],
                steps.step_rows[some],
            )
            fetched = Fetched(part, (first + start) % count, [], self._receivers)
            if supply is not None and not self._rows.is_released:
                supply.wait(numbers[start:end])
            # Ordinary tensors in inference mode too: it may be over before the last step.
            with torch.inference_mode(False):
                fetched.leaves = self._leaves(sources, asked, group)
                if self._rows.are_numbered:
                    fetched.number(torch.from_numpy(numbers[start:end]))
            yield fetched
            # Not referenced while the next one is fetched: its memory may be free by then.
            del fetched

    def _asked(self, which: int, steps: Steps, first: int, edges: Integers) -> "_Asked":
        """The rows of each group of steps that a source is asked for."""
        source, receivers = self._rows.sources[which], self._receivers_of[which]
        count = len(self._receivers)
        # Those of its only receiver, or all that come.
        start, step = 0, 1
        if len(receivers) == 1:
            start, step = (receivers[0] - first) % count, count
        positions = steps.positions[start::step]
        slots = source.locate(self._sampler, steps.epoch, positions)
        rows = np.arange(start, len(steps.positions), step)
        if len(self._rows.sources) > 1:
            shards = np.array(positions) % self._rows.pool.num_shards
            mine = self._rows.source_of_shard[shards] == which
            rows, slots = rows[mine], slots[mine]
        # Group by group, and in each of them one receiver after another.
        turns = np.repeat(np.arange(len(edges) - 1), np.diff(edges))[rows]
        if count > 1:
            turns = turns * count + (first + rows) % count
        if len(receivers) > 1:
            order = np.argsort(turns.astype(np.min_scalar_type(len(edges) * count)), kind="stable")
            rows, slots = rows[order], slots[order]
        sizes = np.bincount(turns, minlength=(len(edges) - 1) * count).reshape(-1, count)
        located = torch.from_numpy(slots)
        if not has_variable(source.fields):
            located = send(located, source.device)
        users = {self._receivers[receiver] for receiver in receivers} - {source.device}
        on_cpu = source.device.type == "cpu"
        # Copies to a device may still be reading this memory when the next rows come: torch's
        # allocator does not hand it out again before they are done.
        is_pinned = on_cpu and any(map(has_streams, users))
        pool = self._pools[which] if on_cpu and not is_pinned else None
        firsts = [0, *np.cumsum(sizes.sum(axis=1)).tolist()]
        return _Asked(pool, is_pinned, receivers, located, rows, sizes[:, receivers], firsts)

    def _leaves(
        self, sources: list[EpochRows], asked: list["_Asked"], group: int
    ) -> list[list[Leaf]]:
        """The rows of a group of steps, for each receiver."""
        found: list[list[tuple[Integers, list[Leaf]]]] = [[] for _ in self._receivers]
        for source, each in zip(sources, asked, strict=True):
            sizes, first = each.sizes[group].tolist(), each.firsts[group]
            slots = each.slots[first : first + sum(sizes)]
            out = None if each.pool is None else each.pool.get(len(slots))
            leaves = [*source.fetch(slots, out, pin_memory=each.is_pinned)]
            split = [leaf.split_with_sizes(sizes) if len(sizes) > 1 else [leaf] for leaf in leaves]
            for index, (receiver, size) in enumerate(zip(each.receivers, sizes, strict=True)):
                rows, first = each.rows[first : first + size], first + size
                device = self._receivers[receiver]
                found[receiver].append((rows, [send_rows(leaf[index], device) for leaf in split]))
        return [
            parts[0][1] if len(parts) == 1 else _in_order(parts, device)
            for parts, device in zip(found, self._receivers, strict=True)
        ]


class _Asked(NamedTuple):
    """The rows that a source is asked for in some groups of steps."""

    pool: BufferPool | None  # Memory for them; None where their source or its device gives it.
    is_pinned: bool  # Whether the source gives pinned memory.
    receivers: list[int]
    slots: Tensor  # Group by group, and in each of them one receiver after another.
    rows: Integers  # Which of all rows these are.
    sizes: Integers  # How many each receiver has in each group, (groups, receivers).
    firsts: list[int]  # The first of each group among the slots.


def _in_order(fetched: Sequence[tuple[Integers, list[Leaf]]], device: torch.device) -> list[Leaf]:
    """The rows of one receiver, whose shards may live in several places, in their order."""
    rows = np.concatenate([rows for rows, _ in fetched])
    order = send(torch.from_numpy(np.argsort(rows)), device)
    columns = zip(*(leaves for _, leaves in fetched), strict=True)
    return [joined_rows(column).index_select(0, order) for column in columns]
