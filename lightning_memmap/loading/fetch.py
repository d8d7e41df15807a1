"""Fetches the rows of coming steps: for all data devices at once, or for each of them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.loading.absent import absent_rows
from lightning_memmap.loading.buffers import BufferPool
from lightning_memmap.loading.device_streams import has_streams, send
from lightning_memmap.loading.row_source import EpochRows, Leaf, fixed_fields, has_variable
from lightning_memmap.loading.split import SplitRows
from lightning_memmap.loading.steps import Fetched, Steps, ordinary_tensors
from lightning_memmap.loading.variable_rows import joined_rows, send_rows, share_widths
from lightning_memmap.sampling import Integers, Sampler

#: Small steps are fetched several at once, up to this number of bytes.
_FETCH_BYTES = 2**22


class Fetcher:
    """Fetches rows where they are, into a batch for each data device or into one for all.

    Args:
        rows: The rows of the split.
        sampler: Their order.
        is_apart: Whether each data device needs a batch of its own, since a transform runs there.
    """

    def __init__(self, rows: SplitRows, sampler: Sampler, is_apart: bool) -> None:
        self._rows = rows
        self._sampler = sampler
        self._devices = rows.topology.data_devices
        owner, shards = rows.topology.owner, range(rows.pool.num_shards)
        #: By data device, the sources that have rows for it.
        self._sources_of: list[list[int]] = [
            np.unique(rows.source_of_shard[[s for s in shards if owner(s) == device]]).tolist()
            for device in range(len(self._devices))
        ]
        source = rows.sources[0]
        # One fetch serves all logical data devices where all rows lie in one place on the only
        # physical device.
        is_one_place = len(rows.sources) == 1 and {*self._devices} == {source.device}
        self._is_whole = is_one_place and not is_apart
        self._pools: dict[int, BufferPool] = {}

    @contextmanager
    def epoch(self, epoch: int, position: int) -> Iterator[list[EpochRows]]:
        """The rows of each source in the order of an epoch, from a position on."""
        with ExitStack() as stack:
            yield [
                stack.enter_context(source.epoch(self._sampler, epoch, position))
                for source in self._rows.sources
            ]

    def fetch(self, sources: list[EpochRows], steps: Steps) -> Iterator[Fetched]:
        """Fetch the rows of consecutive steps."""
        numbers = None
        if self._rows.are_numbered:
            numbers = torch.from_numpy(self._sampler.dataset_rows(steps.epoch, steps.positions))
        if self._is_whole:
            return self._fetch_whole(sources[0], steps, numbers)
        return self._fetch_by_device(sources, steps, numbers)

    def _fetch_whole(
        self, source: EpochRows, steps: Steps, numbers: Tensor | None
    ) -> Iterator[Fetched]:
        locations = torch.from_numpy(source.locate(self._sampler, steps.epoch, steps.positions))
        if not has_variable(source.fields):
            locations = send(locations, source.device)
        numbers = None if numbers is None else send(numbers, source.device)
        # Several small steps in one fetch; the steps are views of what it returns.
        longest = steps.lengths[0]
        row_bytes = source.row_bytes + (
            0 if self._rows.images is None else self._rows.images.row_bytes
        )
        together = max(1, _FETCH_BYTES // max(1, longest * row_bytes))
        together = min(together, source.max_steps, len(steps.lengths))
        start, first = 0, self._first(steps)
        for index in range(0, len(steps.lengths), together):
            part = steps.part(index, index + together, start)
            stop = start + len(part.positions)
            with ordinary_tensors():
                leaves = self._fetch(
                    source, locations[start:stop], self._devices, usual_rows=together * longest
                )
            num_fields = len(leaves)
            if numbers is not None:
                leaves.append(numbers[start:stop])
            fetched = Fetched(part, first, [leaves], self._devices, True, num_fields)
            del leaves
            yield fetched
            # Not referenced while the next one is fetched: its memory may be free by then.
            del fetched
            start, first = stop, (first + stop - start) % len(self._devices)

    def _first(self, steps: Steps) -> int:
        """The data device that has the first row of some steps."""
        return steps.positions.start // steps.positions.step % len(self._devices)

    def _fetch_by_device(
        self, sources: list[EpochRows], steps: Steps, numbers: Tensor | None
    ) -> Iterator[Fetched]:
        """Each data device has its own batch. A source serves all of its devices at once."""
        requests = self._requests(sources, steps)
        count, start = len(self._devices), 0
        for index, length in enumerate(steps.lengths):
            part = steps.part(index, index + 1, start)
            first = self._first(part)
            by_device: list[list[tuple[Integers, list[Leaf]]]] = [[] for _ in self._devices]
            for source, request in zip(sources, requests, strict=True):
                for device, places, leaves in self._fetch_request(source, request, index):
                    by_device[device].append((places, leaves))
            leaves_of = [_in_order(*each) for each in zip(by_device, self._devices, strict=True)]
            del by_device
            share_widths(leaves_of)
            num_fields = len(leaves_of[0])
            if numbers is not None:
                mine = numbers[start : start + length]
                for device, leaves in enumerate(leaves_of):
                    own = mine[(device - first) % count :: count].contiguous()
                    leaves.append(send(own, self._devices[device]))
            fetched = Fetched(part, first, leaves_of, self._devices, False, num_fields)
            del leaves_of
            yield fetched
            del fetched
            start += length

    def _requests(self, sources: list[EpochRows], steps: Steps) -> list["_Request"]:
        """Which rows each source is asked for in each step."""
        count, lengths = len(self._devices), np.array(steps.lengths)
        step_of_row = np.repeat(np.arange(len(lengths)), lengths)
        homes = np.array(steps.positions) % self._rows.pool.num_shards
        homes = self._rows.source_of_shard[homes]
        requests = []
        for which, source in enumerate(sources):
            users = [d for d, found in enumerate(self._sources_of) if which in found]
            found, places, of_steps = list[Integers](), list[Integers](), list[Integers]()
            for device in users:
                rows = slice((device - self._first(steps)) % count, None, count)
                mine = np.flatnonzero(homes[rows] == which)
                at = step_of_row[rows]
                # The place of each row in the batch of its device.
                sizes = np.bincount(at, minlength=len(lengths))
                within = np.arange(len(at)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
                slots = source.locate(self._sampler, steps.epoch, steps.positions[rows])
                found.append(slots[mine])
                places.append(within[mine])
                of_steps.append(at[mine])
            # Step by step, in each of them one device after the other.
            order = np.argsort(np.concatenate(of_steps), kind="stable")
            sizes = np.stack([np.bincount(at, minlength=len(lengths)) for at in of_steps], axis=1)
            locations = torch.from_numpy(np.concatenate(found)[order])
            if not has_variable(source.fields):
                locations = send(locations, source.device)
            ends = np.cumsum(sizes.sum(axis=1))
            requests.append(
                _Request(users, locations, np.concatenate(places)[order], sizes.tolist(), ends)
            )
        return requests

    def _fetch_request(
        self, source: EpochRows, request: "_Request", step: int
    ) -> Iterator[tuple[int, Integers, list[Leaf]]]:
        """The rows of one source in a step: for data devices, places in a batch and leaves."""
        sizes = request.sizes[step]
        end = int(request.ends[step])
        begin = end - sum(sizes)
        leaves = self._fetch(
            source, request.locations[begin:end], [self._devices[user] for user in request.users]
        )
        split = [leaf.split_with_sizes(sizes) if len(sizes) > 1 else [leaf] for leaf in leaves]
        for index, (user, size) in enumerate(zip(request.users, sizes, strict=True)):
            target = self._devices[user]
            places = request.places[begin : begin + size]
            yield user, places, [send_rows(parts[index], target) for parts in split]
            begin += size

    def _fetch(
        self,
        source: EpochRows,
        locations: Tensor,
        devices: Sequence[torch.device],
        *,
        usual_rows: int = 0,
    ) -> list[Leaf]:
        """Fetch rows."""
        if source.device.type != "cpu":
            leaves = source.fetch(locations)
        elif any(device != source.device and has_streams(device) for device in devices):
            # Copies to a device may still be reading this memory when the next rows come: torch's
            # allocator does not hand it out again before they are done.
            leaves = source.fetch(locations, pin_memory=True)
        else:
            pool = self._pool_for(max(len(locations), usual_rows), source)
            leaves = source.fetch(locations, pool.get(len(locations)))
        leaves = list(leaves)
        for index, field in self._rows.absent:
            rows = absent_rows(len(locations), field.item_shape, field.dtype)
            leaves = [*leaves[:index], rows, *leaves[index:]]
        return leaves

    def _pool_for(self, num_rows: int, source: EpochRows) -> BufferPool:
        if num_rows not in self._pools:
            # Two steps may be under way, each with a batch on every data device, and images of a
            # third one are decoded.
            slots = 3 * len(self._devices) + 2
            self._pools[num_rows] = BufferPool(fixed_fields(source.fields), num_rows, slots)
        return self._pools[num_rows]


class _Request(NamedTuple):
    """The rows that a source is asked for in some steps."""

    users: list[int]
    """The data devices."""
    locations: Tensor
    """Where the rows lie, step by step, and in each step those of one data device after another."""
    places: Integers
    """The place of each in the batch of its data device, int64 of shape (rows,)."""
    sizes: list[list[int]]
    """By step, how many rows each data device has."""
    ends: Integers
    """Where the rows of each step end, int64 of shape (steps,)."""


def _in_order(fetched: Sequence[tuple[Integers, list[Leaf]]], device: torch.device) -> list[Leaf]:
    """The rows of one data device, whose shards may live in several places, in their order."""
    if len(fetched) == 1:
        return fetched[0][1]
    places = np.concatenate([places for places, _ in fetched])
    order = send(torch.from_numpy(np.argsort(places)), device)
    columns = zip(*(leaves for _, leaves in fetched), strict=True)
    joined = map(joined_rows, columns)
    return [leaf if leaf.is_meta else leaf.index_select(0, order) for leaf in joined]
