"""Fetches the rows of coming steps: for all data devices at once, or for each of them."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.loading.buffers import memory_for
from lightning_memmap.loading.device_streams import send
from lightning_memmap.loading.row_source import Fetched, Leaf, Steps, Take, in_order
from lightning_memmap.loading.split import SplitRows
from lightning_memmap.loading.variable_rows import VariableRows
from lightning_memmap.placement.topology import DataTopology
from lightning_memmap.sampling.rows import Integers
from lightning_memmap.sampling.sampler import Sampler

#: What a source is asked for: slots, group by group and in each of them one receiver after another,
#: which of all rows these are, and how many each of its receivers has.
_Asked: TypeAlias = tuple[Tensor, Integers, list[int]]
#: Small steps are fetched several at once, up to these numbers of bytes and steps.
_FETCH_BYTES, _FETCH_STEPS = 2**23, 64


class Fetcher:
    """Fetches rows where they are, for a receiver of all rows or for each data device."""

    def __init__(
        self,
        rows: SplitRows,
        topology: DataTopology,
        sampler: Sampler,
        assembled_on: torch.device | None,
    ) -> None:
        self._rows = rows
        self._sampler = sampler
        devices = topology.data_devices
        # Where batches are assembled is one receiver for all logical data devices, if all rows lie
        # in one place on the only physical one.
        is_one_place = len(rows.sources) == 1 and {*devices} == {rows.sources[0].device}
        self._receivers = devices
        if is_one_place and assembled_on is not None:
            self._receivers = (assembled_on,)
        owners = [topology.owner(shard) for shard in range(rows.pool.num_shards)]
        pairs = {*zip(rows.source_of_shard.tolist(), owners, strict=True)}
        #: By source, the receivers that it has rows for.
        count = len(self._receivers)
        self._receivers_of = [
            sorted({d % count for s, d in pairs if s == which and d is not None})
            for which in range(len(rows.sources))
        ]
        # Two steps may be under way, each with a batch on every data device, and images of a third
        # one are decoded.
        slots = 3 * len(devices) + 2
        fixed = [(field.item_shape, field.dtype) for field in rows.fields if not field.num_variable]
        self._are_variable = any(field.num_variable for field in rows.fields)
        #: By source, what gives memory for a number of rows; None where its device does.
        self._memory = [
            memory_for(fixed, [self._receivers[receiver] for receiver in receivers], slots)
            if source.device.type == "cpu"
            else None
            for source, receivers in zip(rows.sources, self._receivers_of, strict=True)
        ]

    def fetch(self, takes: list[Take], steps: Steps) -> Iterator[Fetched]:
        """Fetch the rows of consecutive steps, several small ones at once."""
        longest, images = steps.lengths[0], self._rows.images
        row_bytes = self._rows.row_bytes + (0 if images is None else images.row_bytes)
        together = max(1, _FETCH_BYTES // max(1, longest * row_bytes))
        together = min(together, _FETCH_STEPS, len(steps.lengths))
        pending = self._rows.pending
        numbers = np.zeros(0, np.int64)
        if pending is not None and pending.progress == 1.0:
            pending = None
        if self._rows.are_numbered or pending is not None:
            numbers = self._sampler.dataset_rows(steps.epoch, steps.positions)
        if pending is not None:
            pending.request(numbers)
            # A step does not wait for the rows of later ones.
            together = 1
        edges = np.append(0, np.cumsum(steps.lengths))
        edges = np.append(edges[:-1:together], edges[-1])
        count = len(self._receivers)
        first = steps.positions.start // steps.positions.step % count
        asked = zip(
            *[self._asked(which, steps, first, edges) for which in range(len(takes))], strict=True
        )
        for group, (start, end) in enumerate(pairwise(edges.tolist())):
            some = slice(group * together, (group + 1) * together)
            part = Steps(
                steps.epoch,
                steps.first_step + some.start,
                steps.positions[start:end],
                steps.lengths[some],
                steps.step_rows[some],
            )
            if pending is not None and not self._rows.is_released:
                pending.wait(numbers[start:end])
            # Ordinary tensors in inference mode too: it may be over before the last step.
            with torch.inference_mode(False):
                leaves = self._leaves(takes, next(asked))
                fetched = Fetched(part, (first + start) % count, leaves, self._receivers)
                if self._rows.are_numbered:
                    fetched.number(torch.from_numpy(numbers[start:end]))
            # Not referenced while the next one is fetched: its memory may be free by then.
            del leaves
            yield fetched
            del fetched

    def _asked(self, which: int, steps: Steps, first: int, edges: Integers) -> Iterator[_Asked]:
        """The rows that a source is asked for in each group of steps."""
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
        sizes = np.diff(rows.searchsorted(edges))[:, None]
        if len(receivers) > 1:
            turns = np.repeat(np.arange(len(sizes)) * count, sizes[:, 0]) + (first + rows) % count
            order = np.argsort(turns.astype(np.min_scalar_type(len(edges) * count)), kind="stable")
            rows, slots = rows[order], slots[order]
            sizes = np.bincount(turns, minlength=len(sizes) * count).reshape(-1, count)
            sizes = sizes[:, receivers]
        located = torch.from_numpy(slots)
        if not self._are_variable:
            located = send(located, source.device)
        ends = np.append(0, np.cumsum(sizes.sum(axis=1))).tolist()
        # One after the other: the first step does not wait until all are divided.
        for (begin, end), size in zip(pairwise(ends), sizes.tolist(), strict=True):
            yield located[begin:end], rows[begin:end], size

    def _leaves(self, takes: list[Take], asked: Sequence[_Asked]) -> list[list[Leaf]]:
        """The rows of a group of steps, for each receiver."""
        found: list[list[tuple[Integers, list[Leaf]]]] = [[] for _ in self._receivers]
        of_source = zip(takes, self._memory, self._receivers_of, asked, strict=True)
        for take, memory, receivers, (slots, rows, sizes) in of_source:
            leaves = take(slots, None if memory is None else memory(len(slots)))
            split = [leaf.split_with_sizes(sizes) if len(sizes) > 1 else [leaf] for leaf in leaves]
            first = 0
            for index, (receiver, size) in enumerate(zip(receivers, sizes, strict=True)):
                device, here = self._receivers[receiver], rows[first : first + size]
                parts = (leaf[index] for leaf in split)
                sent = [
                    p.to(device) if isinstance(p, VariableRows) else send(p, device) for p in parts
                ]
                found[receiver].append((here, sent))
                first += size
        return [in_order(*each) for each in zip(found, self._receivers, strict=True)]
