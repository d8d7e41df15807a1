"""Rows with encoded images: threads decode those of the next step while a step is used."""

import math
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from lightning_memmap.images import ImageError
from lightning_memmap.loading.buffers import BufferPool, Buffers, Fields
from lightning_memmap.loading.device_streams import has_streams, send
from lightning_memmap.loading.image_decoder import ImageDecoder
from lightning_memmap.loading.row_source import (
    EpochRows,
    Leaf,
    RowSource,
    WrappedRows,
    fixed_fields,
    released_error,
)
from lightning_memmap.loading.variable_rows import VariableRows
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


class DecodedRows(WrappedRows):
    """Rows of another source, with some fields decoded.

    Args:
        rows: The other source, which fetches encoded images into host memory.
        decoders: The decoder of each field of encoded images, by its place among the fields.
        is_held: Which shards of the split the source has, bool of shape (C,).
        num_threads: Threads that decode.
    """

    def __init__(
        self,
        rows: RowSource,
        decoders: Mapping[int, ImageDecoder],
        is_held: NDArray[np.bool_],
        num_threads: int,
    ) -> None:
        super().__init__(rows)
        self.decoders = decoders
        self.is_held = is_held
        self.num_threads = num_threads
        self._epochs: weakref.WeakSet[DecodedEpoch] = weakref.WeakSet()
        self._pools: dict[int, BufferPool] = {}

    @contextmanager
    @override
    def epoch(self, sampler: Sampler, epoch: int, position: int) -> Iterator["DecodedEpoch"]:
        """The rows. At the end of the context, the threads that decode have ended."""
        with (
            self.rows.epoch(sampler, epoch, position) as rows,
            closing(DecodedEpoch(self, rows, sampler, epoch)) as found,
        ):
            self._epochs.add(found)
            yield found

    @override
    def release(self) -> None:
        super().release()
        for epoch in list(self._epochs):
            epoch.close()
        self._pools.clear()

    def memory(self, fixed: Fields, num_rows: int, pin_memory: bool) -> Buffers:
        """Memory for the rows of a step that nobody else holds, on the CPU.

        Args:
            fixed: The fields whose rows have one shape.
            num_rows: How many rows.
            pin_memory: Whether it is page-locked.

        Returns:
            Buffers for these fields, and then for each field of images.
        """
        images = [(decoder.shape, torch.uint8) for decoder in self.decoders.values()]
        fields = [*fixed, *images]
        if pin_memory or has_streams(self.device):
            return Buffers.empty(fields, num_rows, pin_memory=True)
        if num_rows not in self._pools:
            self._pools[num_rows] = BufferPool(fields, num_rows, _NUM_BUFFERS)
        return self._pools[num_rows].get(num_rows)


class DecodedEpoch:
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
        self.row_bytes = rows.row_bytes + sum(
            math.prod(decoder.shape) for decoder in source.decoders.values()
        )
        # On another device, they are fetched there.
        self._fixed = fixed_fields(rows.fields) if rows.device.type == "cpu" else []
        self._source = source
        self._rows = rows
        self._sampler = sampler
        self._epoch = epoch
        self._located: list[tuple[range, Integers]] = []
        self._is_block_over = False
        self._ahead: _Images | None = None
        self._is_closed = False
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._threads = ThreadPoolExecutor(self._source.num_threads, "decode")

    def locate(self, positions: range) -> Integers:
        """Where the rows lie that supply positions; see `EpochRows.locate`."""
        locations = self._rows.locate(positions)
        if self._is_block_over:
            # What was located before was fetched.
            self._located, self._is_block_over = [], False
        self._located.append((positions, locations))
        return locations

    def fetch(
        self,
        locations: Tensor,
        out: Buffers | None = None,
        *,
        pin_memory: bool = False,
        coming: Tensor | None = None,
    ) -> list[Leaf]:
        """Copy rows into a batch, their images decoded; see `EpochRows.fetch`.

        Args:
            locations: Of `locate`, int64 of shape (B,), on the CPU.
            out: Not used: rows are fetched before it is known.
            pin_memory: Whether new buffers are page-locked.
            coming: What is fetched next. Its images are decoded meanwhile.

        Raises:
            DatasetError: An image cannot be decoded, or has another size. The message names its
                row.
        """
        if self._is_closed:
            raise released_error()
        if os.getpid() != self._process:
            # The threads stayed with the parent, and what was fetched did not.
            self._start()
            if self._ahead is not None:
                ahead = self._ahead
                memory = [images.out for images in ahead.fields]
                self._ahead = self._decode(ahead.locations, ahead.leaves, memory)
        images = self._ahead or self._begin(locations, pin_memory)
        assert torch.equal(images.locations, locations), "what is announced is fetched next"
        self._ahead = None
        if coming is not None and len(coming):
            self._ahead = self._begin(coming, pin_memory)
        self._is_block_over = True
        for future in images.futures:
            future.result()
        leaves = list(images.leaves)
        for index, found in zip(self._source.decoders, images.fields, strict=True):
            if found.errors:
                raise self._failed(found, locations)
            leaves[index] = send(found.out, self.device)
        return leaves

    def _begin(self, locations: Tensor, pin_memory: bool) -> "_Images":
        """Fetch rows, and let the threads decode their images."""
        memory = self._source.memory(self._fixed, len(locations), pin_memory)
        count = len(self._fixed)
        out = Buffers(memory.tensors[:count], memory.rows[:count])
        leaves = self._rows.fetch(locations, out, pin_memory=pin_memory)
        return self._decode(locations, leaves, memory.tensors[count:])

    def _decode(
        self, locations: Tensor, leaves: Sequence[Leaf], memory: Sequence[Tensor]
    ) -> "_Images":
        source, fields = self._source, list[_FieldImages]()
        for (index, decoder), out in zip(source.decoders.items(), memory, strict=True):
            rows = leaves[index]
            assert isinstance(rows, VariableRows)
            fields.append(_FieldImages(decoder, rows, out))
        num_tasks = min(source.num_threads, len(locations))
        futures = [
            self._threads.submit(images.decode) for images in fields for _ in range(num_tasks)
        ]
        return _Images(locations, leaves, fields, futures)

    def _failed(self, images: "_FieldImages", locations: Tensor) -> Exception:
        index = min(images.errors)
        error = images.errors[index]
        if not isinstance(error, ImageError):
            return error
        position = self._position_of(int(locations[index]))
        row = self._sampler.dataset_rows(self._epoch, range(position, position + 1))
        failure = images.decoder.failed(int(row[0]), error)
        failure.__cause__ = error
        return failure

    def _position_of(self, location: int) -> int:
        """The position of a row that was located."""
        is_held = self._source.is_held
        for positions, locations in self._located:
            for index in np.flatnonzero(locations == location).tolist():
                # Of rows of other sources it is undefined where they lie.
                position: int = positions[index]
                if is_held[position % len(is_held)]:
                    return position
        raise AssertionError("rows are located before they are fetched")

    def close(self) -> None:
        """End the threads. No row can be fetched any more."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None
        # When the interpreter ends, it has ended the threads, and much of the library is gone.
        if os.getpid() == self._process and not sys.is_finalizing():
            self._threads.shutdown(cancel_futures=True)


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
        leaves: The rows as they were fetched, one for each field.
        fields: The images of each field of images.
        futures: Done when all are decoded.
    """

    locations: Tensor
    leaves: Sequence[Leaf]
    fields: list[_FieldImages]
    futures: list[Future[None]]

    def cancel(self) -> None:
        """Decode no more of them."""
        for images in self.fields:
            images.cancel()
