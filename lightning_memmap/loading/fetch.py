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
    Leaf,
    fixed_fields,
    has_variable,
)
from lightning_memmap.loading.split import SplitRows
from lightning_memmap.loading.steps import Fetched, Steps
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
        owner, shards = rows.topology.owner, range(rows.pool.num_shards)
        homes = rows.source_of_shard[[s for s in shards if owner(s) is not None]]
        owners = np.array([d for s in shards if (d := owner(s)) is not None])
        #: By receiver, the sources that have rows for it.
        self._sources_of = [
            np.unique(homes[(owners == d) | self.is_whole]).tolist()
            for d in range(len(self._receivers))
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
        asked = [self._asked(which, steps, edges) for which in range(len(sources))]
        for group, (start, end) in enumerate(pairwise(edges.tolist())):
            some, positions = slice(group * together, (group + 1) * together), slice(start, end)
            part = Steps(
                steps.epoch,
                steps.first_step + group * together,
                steps.positions[positions],
                steps.lengths[some],
                steps.step_rows[some],
            )
            fetched = Fetched(part, self._first(part), [], self._receivers)
            if supply is not None and not self._rows.is_released:
                supply.wait(numbers[positions])
            # Ordinary tensors in inference mode too: it may be over before the last step.
            with torch.inference_mode(False):
                fetched.leaves = self._leaves(sources, asked, group)
                if self._rows.are_numbered:
                    fetched.number(torch.from_numpy(numbers[positions]))
            yield fetched
            # Not referenced while the next one is fetched: its memory may be free by then.
            del fetched

    def _leaves(
        self, sources: list[EpochRows], asked: list["_Asked"], group: int
    ) -> list[list[Leaf]]:
        """The rows of a group of steps, for each receiver."""
        found: list[list[tuple[Integers, list[Leaf]]]] = [[] for _ in self._receivers]
        for source, rows in zip(sources, asked, strict=True):
            begins, ends = rows.edges[group].tolist(), rows.edges[group + 1].tolist()
            locations = rows.locations[sum(begins) : sum(ends)]
            out = None if rows.pool is None else rows.pool.get(len(locations))
            leaves = [*source.fetch(locations, out, pin_memory=rows.is_pinned)]
            sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
            split = [leaf.split_with_sizes(sizes) if len(sizes) > 1 else [leaf] for leaf in leaves]
            for index, receiver in enumerate(rows.receivers):
                places = rows.places[index][begins[index] : ends[index]]
                device = self._receivers[receiver]
                found[receiver].append((places, [send_rows(each[index], device) for each in split]))
        return [
            parts[0][1] if len(parts) == 1 else _in_order(parts, device)
            for parts, device in zip(found, self._receivers, strict=True)
        ]

    def _first(self, steps: Steps) -> int:
        """The data device that has the first row of some steps."""
        count = len(self._rows.topology.data_devices)
        return steps.positions.start // steps.positions.step % count

    def _asked(self, which: int, steps: Steps, edges: Integers) -> "_Asked":
        """The rows of each group of steps that a source is asked for."""
        source = self._rows.sources[which]
        receivers = [d for d, found in enumerate(self._sources_of) if which in found]
        count, first = len(self._receivers), self._first(steps)
        slots, places, ends = list[Integers](), list[Integers](), list[Integers]()
        for receiver in receivers:
            start = (receiver - first) % count
            positions = steps.positions[start::count]
            found = source.locate(self._sampler, steps.epoch, positions)
            # How many rows the receiver has before each group.
            firsts = begins = -(-(edges - start) // count)
            mine = np.zeros(0, np.int64)
            if len(self._sources_of[receiver]) > 1:
                shards = np.array(positions) % self._rows.pool.num_shards
                mine = np.flatnonzero(self._rows.source_of_shard[shards] == which)
                begins, found = np.searchsorted(mine, firsts), found[mine]
                mine -= np.repeat(firsts[:-1], np.diff(begins))
            slots.append(found)
            places.append(mine)
            ends.append(begins)
        located = slots[0]
        if len(receivers) > 1:
            groups = range(len(edges) - 1)
            pairs = list(zip(slots, ends, strict=True))
            pieces = [each[end[g] : end[g + 1]] for g in groups for each, end in pairs]
            located = np.concatenate(pieces)
        locations = torch.from_numpy(located)
        if not has_variable(source.fields):
            locations = send(locations, source.device)
        edges = np.stack(ends, axis=1)
        users = {self._receivers[receiver] for receiver in receivers} - {source.device}
        on_cpu = source.device.type == "cpu"
        # Copies to a device may still be reading this memory when the next rows come: torch's
        # allocator does not hand it out again before they are done.
        is_pinned = on_cpu and any(map(has_streams, users))
        pool = self._pools[which] if on_cpu and not is_pinned else None
        return _Asked(pool, is_pinned, receivers, locations, places, edges)


class _Asked(NamedTuple):
    """The rows that a source is asked for in some groups of steps."""

    pool: BufferPool | None  # Memory for them; None where their source or its device gives it.
    is_pinned: bool  # Whether the source gives pinned memory.
    receivers: list[int]
    locations: Tensor  # Group by group, and in each of them one receiver after another.
    places: list[Integers]  # Of each receiver, places in the groups' batches; empty if it has all.
    edges: Integers  # How many rows each receiver has before each group, (groups + 1, receivers).


def _in_order(fetched: Sequence[tuple[Integers, list[Leaf]]], device: torch.device) -> list[Leaf]:
    """The rows of one receiver, whose shards may live in several places, in their order."""
    places = np.concatenate([places for places, _ in fetched])
    order = send(torch.from_numpy(np.argsort(places)), device)
    columns = zip(*(leaves for _, leaves in fetched), strict=True)
    return [joined_rows(column).index_select(0, order) for column in columns]
