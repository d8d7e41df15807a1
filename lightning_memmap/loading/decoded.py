"""Rows with encoded images: threads decode those of the next step while a step is used."""

import os
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_memmap.images import ImageError
from lightning_memmap.loading.buffers import BufferPool, Buffers
from lightning_memmap.loading.device_streams import has_streams, send
from lightning_memmap.loading.image_decoder import ImageDecoder
from lightning_memmap.loading.resident import ResidentRows
from lightning_memmap.loading.row_source import EpochRows, Leaf, released_error
from lightning_memmap.loading.variable_rows import VariableRows, located_rows
from lightning_memmap.sampling import Integers, Sampler

#: By default no more threads: between two images, each runs Python code, which one at a time can.
_MAX_THREADS = 16
#: The step that is used, the next one, and those that a data device may still be reading.
_NUM_BUFFERS = 6


def default_threads(num_local_processes: int) -> int:
    """How many threads decode by default.

    Args:
        num_local_processes: Processes of the run on this machine.

    Returns:
        This process's share of the cores that it may use, 1 to 16.
    """
    return min(_MAX_THREADS, max(1, len(os.sched_getaffinity(0)) // num_local_processes))


class DecodedRows:
    """Rows of another source, with some fields decoded.

    Args:
        rows: The other source, which has the encoded images in host memory.
        decoders: The decoder of each field of encoded images, by its place among the fields.
        is_held: Which shards of the split the source has, bool of shape (C,).
        num_threads: Threads that decode.
    """

    def __init__(
        self,
        rows: ResidentRows,
        decoders: Mapping[int, ImageDecoder],
        is_held: NDArray[np.bool_],
        num_threads: int,
    ) -> None:
        self.rows = rows
        self.decoders = decoders
        self.is_held = is_held
        self.num_threads = num_threads
        self._epochs: weakref.WeakSet[DecodedEpoch] = weakref.WeakSet()
        self._pools: dict[int, BufferPool] = {}

    @property
    def device(self) -> torch.device:
        """Where rows are fetched."""
        return self.rows.device

    @property
    def is_released(self) -> bool:
        """Whether the rows were freed."""
        return self.rows.is_released

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of a batch."""
        images = sum(int(np.prod(decoder.shape)) for decoder in self.decoders.values())
        return self.rows.row_bytes + images

    def check_sampler(self, sampler: Sampler) -> None:
        """Check that a sampler is one; see `RowSource.check_sampler`.

        Args:
            sampler: The order.
        """
        self.rows.check_sampler(sampler)

    def epoch(self, sampler: Sampler, epoch: int, position: int) -> "DecodedEpoch":
        """The rows in the order of an epoch; see `RowSource.epoch`.

        Args:
            sampler: The order.
            epoch: Epoch, counted from 0.
            position: The first position that will be fetched.
        """
        with self.rows.epoch(sampler, epoch, position) as rows:
            found = DecodedEpoch(self, rows, sampler, epoch)
        self._epochs.add(found)
        return found

    def release(self) -> None:
        """End all threads, and free the memory; see `RowSource.release`."""
        self.rows.release()
        for epoch in list(self._epochs):
            epoch.close()
        self._pools.clear()

    def memory(self, num_rows: int, pin_memory: bool) -> list[Tensor]:
        """Memory for decoded rows that nobody else holds, on the CPU.

        Args:
            num_rows: How many.
            pin_memory: Whether it is page-locked.

        Returns:
            uint8 of shape (num_rows, *shape) for each field of images.
        """
        fields = [(decoder.shape, torch.uint8) for decoder in self.decoders.values()]
        if pin_memory or has_streams(self.device):
            return Buffers.empty(fields, num_rows, pin_memory=True).tensors
        if num_rows not in self._pools:
            self._pools[num_rows] = BufferPool(fields, num_rows, _NUM_BUFFERS)
        return self._pools[num_rows].get(num_rows).tensors


class DecodedEpoch(AbstractContextManager["DecodedEpoch"]):
    """Rows in the order of one epoch, with decoded images.

    The threads end with the epoch and with `close`. A process that was forked meanwhile has its
    own.

    Args:
        source: Where the rows are.
        rows: The same rows with encoded images, in the order of the epoch.
        sampler: The order.
        epoch: The epoch.
    """

    def __init__(self, source: DecodedRows, rows: EpochRows, sampler: Sampler, epoch: int) -> None:
        self.device = rows.device
        #: Those of images as they are stored: what is fetched is located on the CPU.
        self.fields = rows.fields
        self.row_bytes = source.row_bytes
        self._source = source
        self._rows = rows
        self._sampler = sampler
        self._epoch = epoch
        self._order = _Order(source.is_held)
        self._ahead: _Images | None = None
        self._is_closed = False
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._threads = ThreadPoolExecutor(self._source.num_threads, "decode")

    def locate(self, positions: range) -> Integers:
        """Where the rows lie that supply positions; see `EpochRows.locate`.

        Args:
            positions: As for `lightning_memmap.sampling.Sampler.at`.
        """
        locations = self._rows.locate(positions)
        self._order.add(positions, locations)
        return locations

    def fetch(
        self, locations: Tensor, out: Buffers | None = None, *, pin_memory: bool = False
    ) -> list[Leaf]:
        """Copy rows into a batch, their images decoded; see `EpochRows.fetch`.

        Args:
            locations: Of `locate`, int64 of shape (B,), on the CPU.
            out: Buffers for the fields whose rows have one shape.
            pin_memory: Whether new buffers are page-locked.

        Raises:
            DatasetError: An image cannot be decoded, or has another size. The message names its
                row.
        """
        if self._is_closed:
            raise released_error()
        if os.getpid() != self._process:
            # The threads stayed with the parent.
            self._ahead = None
            self._start()
        leaves = list(self._rows.fetch(locations, out, pin_memory=pin_memory))
        wanted = locations.numpy()
        images = self._ahead
        if images is not None and not np.array_equal(images.locations, wanted):
            images.cancel()
            images = None
            self._order.is_regular = False
        images = images or self._begin(wanted, pin_memory)
        coming = self._order.after(len(wanted))
        self._ahead = self._begin(coming, pin_memory) if len(coming) else None
        for future in images.futures:
            future.result()
        for index, found in zip(self._source.decoders, images.fields, strict=True):
            if found.errors:
                raise self._failed(found, wanted)
            leaves[index] = send(found.out, self.device)
        return leaves

    def _begin(self, locations: Integers, pin_memory: bool) -> "_Images":
        """Let the threads decode rows."""
        source = self._source
        memory = source.memory(len(locations), pin_memory)
        fields = [
            _FieldImages(decoder, located_rows(source.rows.variable[index], locations), out)
            for (index, decoder), out in zip(source.decoders.items(), memory, strict=True)
        ]
        num_tasks = min(source.num_threads, len(locations))
        futures = [
            self._threads.submit(images.decode) for images in fields for _ in range(num_tasks)
        ]
        return _Images(locations, fields, futures)

    def _failed(self, images: "_FieldImages", locations: Integers) -> Exception:
        index = min(images.errors)
        error = images.errors[index]
        if not isinstance(error, ImageError):
            return error
        position = self._order.position_of(int(locations[index]))
        row = self._sampler.dataset_rows(self._epoch, range(position, position + 1))
        failure = images.decoder.failed(int(row[0]), error)
        failure.__cause__ = error
        return failure

    def close(self) -> None:
        """End the threads. No row can be fetched any more."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None
        if os.getpid() == self._process:
            self._threads.shutdown(cancel_futures=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _FieldImages:
    """The images of one field in one step, which several threads decode together.

    Args:
        decoder: Their decoder.
        rows: Their bytes, in host memory.
        out: Where they go, uint8 of shape (B, *shape).
    """

    def __init__(self, decoder: ImageDecoder, rows: VariableRows, out: Tensor) -> None:
        self.decoder = decoder
        self.out = out
        #: By its place in the step, why an image cannot be decoded.
        self.errors: dict[int, Exception] = {}
        self._rows = rows
        self._pixels = out.numpy()
        self._data = rows.items.view(torch.uint8).numpy()
        self._next: Callable[[], int] = count().__next__

    def decode(self) -> None:
        """Decode images until all are done or in the hands of other threads."""
        starts, lengths = self._rows.starts, self._rows.lengths
        # Drawing the next number is one operation, which no other thread can interrupt.
        while (index := self._next()) < len(starts):
            data = self._data[starts[index] : starts[index] + lengths[index]]
            try:
                self.decoder.decode(data, self._pixels[index])
            except Exception as error:
                self.errors[index] = error

    def cancel(self) -> None:
        """Leave out the images that no thread has begun."""
        self._next = count(len(self._pixels)).__next__


@dataclass(frozen=True)
class _Images:
    """The images of one step.

    Args:
        locations: Which rows they are of, int64 of shape (B,).
        fields: The images of each field.
        futures: Done when all are decoded.
    """

    locations: Integers
    fields: list[_FieldImages]
    futures: list[Future[None]]

    def cancel(self) -> None:
        """Decode no more of them."""
        for images in self.fields:
            images.cancel()


class _Order:
    """Which rows are fetched next, if a step has as many as the one before.

    Args:
        is_held: Which shards of the split the source has, bool of shape (C,).

    Attributes:
        is_regular: Whether that has been true of the steps that were located together.
    """

    def __init__(self, is_held: NDArray[np.bool_]) -> None:
        self.is_regular = True
        self._is_held = is_held
        self._located: list[tuple[Integers, Integers]] = []
        self._done = 0

    def add(self, positions: range, locations: Integers) -> None:
        """Note where rows lie.

        Args:
            positions: Their positions in the epoch.
            locations: Where they lie.
        """
        if self._done:
            # Of earlier steps, all of which were fetched.
            self._located, self._done, self.is_regular = [], 0, True
        places = np.arange(positions.start, positions.stop, positions.step)
        is_here = self._is_held[places % len(self._is_held)]
        self._located.append((places[is_here], locations[is_here]))

    def after(self, num_rows: int) -> Integers:
        """Note that rows were fetched, and return where the next ones lie.

        Args:
            num_rows: How many were fetched, and how many come next.

        Returns:
            Locations in the order in which they are fetched: those of one data device after those
            of another. Fewer or none at the end, and none where that cannot be told.
        """
        if not self._done:
            places = np.concatenate([places for places, _ in self._located])
            self._locations = np.concatenate([found for _, found in self._located])
            self._order = np.argsort(places, kind="stable")
        self._done += num_rows
        if not self.is_regular:
            return self._locations[:0]
        # The places in what was located, device by device.
        return self._locations[np.sort(self._order[self._done : self._done + num_rows])]

    def position_of(self, location: int) -> int:
        """The position of a row that was located.

        Args:
            location: Where it lies.
        """
        for places, locations in self._located:
            for index in np.flatnonzero(locations == location)[:1].tolist():
                return int(places[index])
        raise AssertionError("rows are located before they are fetched")
