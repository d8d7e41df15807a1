"""Fetches the rows of coming steps, and makes super-batches of them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_memmap.loading.absent import absent_rows
from lightning_memmap.loading.buffers import BufferPool
from lightning_memmap.loading.collate import Collate, Collator
from lightning_memmap.loading.device_streams import has_streams, send
from lightning_memmap.loading.requests import Requests, StepRequests, in_order
from lightning_memmap.loading.row_source import EpochRows, Leaf, fixed_fields, has_variable
from lightning_memmap.loading.split import SplitRows
from lightning_memmap.loading.super_batch import SuperBatch
from lightning_memmap.loading.transform import BatchTransform, DeviceTransform, OnSuperBatch
from lightning_memmap.loading.variable_rows import send_rows, share_widths
from lightning_memmap.sampling import Integers, Sampler, derive_seed

#: Small steps are fetched several at once, up to this number of bytes and of steps.
_FETCH_BYTES, _FETCH_STEPS = 2**22, 64


class Steps(NamedTuple):
    """Consecutive steps whose rows are located together."""

    first_step: int
    """Number of the first step in its epoch."""
    positions: range
    """The positions of all the steps that this process serves."""
    lengths: list[int]
    """Positions of each step. The first step is one of the longest, but for the last two of an
    epoch."""


class Fetcher:
    """Fetches rows where they are, into a batch for each data device or into one for all.

    Args:
        rows: The rows of the split.
        sampler: Their order.
        collate: Nests one tensor per field like the dataset's samples.
        transform: Batch transform that runs on each data device; see `DeviceTransform`. Or one that
            runs on the assembled batch; see `OnSuperBatch`.
        seed: Seed of random transforms.
    """

    def __init__(
        self,
        rows: SplitRows,
        sampler: Sampler,
        collate: Collate,
        transform: BatchTransform | None,
        seed: int,
    ) -> None:
        self._rows = rows
        self._sampler = sampler
        self._seed = seed
        self._devices = rows.topology.data_devices
        on_all = transform if isinstance(transform, OnSuperBatch) else None
        self._collator = Collator(collate, on_all)
        self._transforms = (
            [DeviceTransform(transform, device) for device in self._devices]
            if transform is not None and on_all is None
            else []
        )
        self._requests = Requests(rows)
        self._pools: dict[int, BufferPool] = {}

    @contextmanager
    def epoch(self, epoch: int, position: int) -> Iterator[list[EpochRows]]:
        """The rows of all sources in the order of an epoch.

        Args:
            epoch: Epoch, counted from 0.
            position: The first position that will be fetched.

        Returns:
            A context manager that gives the rows of each source, in the order of the sources.
        """
        with ExitStack() as stack:
            yield [
                stack.enter_context(source.epoch(self._sampler, epoch, position))
                for source in self._rows.sources
            ]

    def fetch(self, sources: list[EpochRows], epoch: int, steps: Steps) -> Iterator[SuperBatch]:
        """Fetch the rows of consecutive steps.

        Args:
            sources: From `epoch`.
            epoch: The epoch that they are of.
            steps: The steps.

        Returns:
            An iterator over a super-batch for each step, each fetched when it is asked for or with
            steps before it.

        Raises:
            OSError: The disk cannot be read.
            StoreError: A file is shorter than it was when the store was opened.
            RuntimeError: The rows were freed.
        """
        if self._is_whole(sources):
            return self._fetch_whole(sources[0], steps)
        return self._fetch_by_device(sources, epoch, steps)

    def _is_whole(self, sources: list[EpochRows]) -> bool:
        """Whether one fetch serves all logical data devices.

        It does where all rows lie in one place on the only physical device, and stay as they are.
        """
        return (
            not self._transforms
            and len(sources) == 1
            and all(device == sources[0].device for device in self._devices)
        )

    def _fetch_whole(self, source: EpochRows, steps: Steps) -> Iterator[SuperBatch]:
        lengths, positions = steps.lengths, steps.positions
        locations = torch.from_numpy(source.locate(positions))
        if not has_variable(source.fields):
            locations = send(locations, source.device)
        # Several small steps in one fetch; the steps are views of what it returns.
        longest = lengths[0]
        together = max(1, _FETCH_BYTES // max(1, longest * source.row_bytes))
        together = min(together, _FETCH_STEPS, len(lengths))
        count, start = len(self._devices), 0
        first = positions.start // positions.step % count
        for index in range(0, len(lengths), together):
            rows_of_steps = lengths[index : index + together]
            stop = start + sum(rows_of_steps)
            after = stop + sum(lengths[index + together : index + 2 * together])
            # Ordinary tensors in inference mode too: it may be over before the last of these steps.
            ordinary = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None
            with ordinary or nullcontext():
                leaves = self._fetch(
                    source,
                    locations[start:stop],
                    self._devices,
                    coming=locations[stop:after],
                    usual_rows=together * longest,
                )
                columns = [leaf.split_with_sizes(rows_of_steps) for leaf in leaves]
            batches = [list(step) for step in zip(*columns, strict=True)]
            start = stop
            del leaves, columns
            # The last reference to a step's views goes with its super-batch.
            batches.reverse()
            for length in rows_of_steps:
                yield SuperBatch(
                    self._devices, length, first, columns=batches.pop(), collator=self._collator
                )
                first = (first + length) % count

    def _fetch_by_device(
        self, sources: list[EpochRows], epoch: int, steps: Steps
    ) -> Iterator[SuperBatch]:
        """Each data device has its own batch. A source serves all of its devices at once."""
        asked = self._requests.of_steps(sources, steps.positions, steps.lengths)
        for step, (requests, coming) in enumerate(pairwise(chain(asked, [None])), steps.first_step):
            assert requests is not None
            leaves = self._leaves(sources, requests, coming)
            batches = [
                self._transformed(device, found, epoch, step) for device, found in enumerate(leaves)
            ]
            del leaves
            yield SuperBatch(
                self._devices,
                requests.num_rows,
                requests.first,
                batches=batches,
                collator=self._collator,
            )
            del batches

    def _leaves(
        self,
        sources: list[EpochRows],
        requests: StepRequests,
        coming: StepRequests | None,
    ) -> list[list[Leaf]]:
        """One leaf per field for each data device, on that device, its rows in order.

        Args:
            sources: From `epoch`.
            requests: What each of them is asked for.
            coming: What they are asked for next, where it is known.
        """
        fetched: list[list[tuple[Integers | None, list[Leaf]]]] = [[] for _ in self._devices]
        for which, (source, request) in enumerate(zip(sources, requests.by_source, strict=True)):
            users, sizes = request.users, request.sizes
            leaves = self._fetch(
                source,
                request.locations,
                [self._devices[device] for device in users],
                coming=None if coming is None else coming.by_source[which].locations,
            )
            split = [leaf.split_with_sizes(sizes) if len(users) > 1 else (leaf,) for leaf in leaves]
            parts = zip(users, request.places, zip(*split, strict=True), strict=True)
            for device, places, columns in parts:
                target = self._devices[device]
                fetched[device].append((places, [send_rows(rows, target) for rows in columns]))
        leaves_of = [
            in_order(found, device) for found, device in zip(fetched, self._devices, strict=True)
        ]
        share_widths(leaves_of)
        return leaves_of

    def _transformed(self, device: int, leaves: list[Leaf], epoch: int, step: int) -> Any:
        batch = self._collator.collate(leaves)
        if self._transforms:
            topology = self._rows.topology
            index = topology.rank + topology.size * device
            return self._transforms[device](batch, derive_seed(self._seed, epoch, step, index))
        return batch

    def _fetch(
        self,
        source: EpochRows,
        locations: Tensor,
        devices: Sequence[torch.device],
        *,
        coming: Tensor | None,
        usual_rows: int = 0,
    ) -> list[Leaf]:
        """Fetch rows.

        Args:
            source: Where from.
            locations: Which rows, int64 of shape (B,); see `EpochRows.fetch`.
            devices: Where they go next.
            coming: Which ones are fetched after them, where it is known.
            usual_rows: Rows of most fetches. Smaller ones use the same memory.

        Returns:
            One leaf per field of the store. Those that this process does not hold are
            `AbsentRows`.
        """
        if source.device.type != "cpu":
            leaves = source.fetch(locations, coming=coming)
        elif any(device != source.device and has_streams(device) for device in devices):
            # Copies to a device may still be reading this memory when the next rows come: torch's
            # allocator does not hand it out again before they are done.
            leaves = source.fetch(locations, pin_memory=True, coming=coming)
        else:
            pool = self._pool_for(max(len(locations), usual_rows), source)
            leaves = source.fetch(locations, pool.get(len(locations)), coming=coming)
        leaves = list(leaves)
        for index, field in self._rows.absent:
            rows = absent_rows(len(locations), field.item_shape, field.dtype)
            leaves = [*leaves[:index], rows, *leaves[index:]]
        return leaves

    def _pool_for(self, num_rows: int, source: EpochRows) -> BufferPool:
        if num_rows not in self._pools:
            # Two steps may be under way, each with a batch on every data device.
            slots = 2 * len(self._devices) + 2
            self._pools[num_rows] = BufferPool(fixed_fields(source.fields), num_rows, slots)
        return self._pools[num_rows]
