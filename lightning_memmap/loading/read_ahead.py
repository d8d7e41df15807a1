"""Reading ahead: threads read the next window of a stream while rows of this one are taken."""

import os
import weakref
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.loading.buffers import Buffers, copy_rows
from lightning_memmap.loading.lanes import Lanes
from lightning_memmap.loading.reading import Reading, released_error
from lightning_memmap.sampling import Integers, Stream, Windows

#: Windows in memory: one that is taken from, and one that is read.
NUM_BUFFERS = 2


class StreamedShards:
    """Shards whose rows stay in the files, and are read window by window.

    Args:
        lanes: How their rows are read.
        window: Rows of a shard in a window.
    """

    device = torch.device("cpu")

    def __init__(self, lanes: Lanes, window: int) -> None:
        self.window = window
        self._lanes = lanes
        self._idle: list[Buffers] = []
        self._readers: weakref.WeakSet[ReadAhead] = weakref.WeakSet()
        #: Whether they were let go of.
        self.is_released = False

    def read_ahead(self, stream: Stream, epoch: int, position: int) -> "ReadAhead":
        """Begin to read the windows of an epoch, from that of a position on."""
        windows = Windows(stream, self.window)
        reader = ReadAhead(self._lanes, windows, epoch, position, self._idle)
        self._readers.add(reader)
        return reader

    def release(self) -> None:
        """End all threads, and let go of the memory."""
        self.is_released = True
        for reader in list(self._readers):
            reader.close()
        self._idle.clear()


class ReadAhead(AbstractContextManager["ReadAhead"]):
    """Rows of the windows of one epoch, in the order in which they come.

    Threads read, into memory for two windows. They end with the epoch, with `close`, when nobody
    has this object any more, and at the exit of the interpreter. In a process that was forked
    meanwhile, others read on.

    Args:
        lanes: How rows are read.
        windows: Which rows are in which window.
        epoch: The epoch.
        position: The first position that will be taken.
        idle: Memory for windows that nobody uses; it is given back there.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        lanes: Lanes,
        windows: Windows,
        epoch: int,
        position: int,
        idle: list[Buffers],
    ) -> None:
        self._lanes = lanes
        self._windows = windows
        self._epoch = epoch
        self._idle = idle
        self._number = windows.number_of(position) - 1
        self._window: Buffers | None = None
        self._is_closed = False
        self._start()

    @property
    def tensors(self) -> list[Tensor]:
        """The window that is taken from: a tensor per field, of shape (rows, *field shape)."""
        return (self._window or self._advance()).tensors

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all fields."""
        return (self._window or self._advance()).row_bytes

    def locate_positions(self, stream: Stream, epoch: int, positions: range) -> Integers:
        """Where the rows are that supply positions: the ``locations`` of `take`."""
        assert (stream, epoch) == (self._windows.stream, self._epoch)
        lanes = self._lanes
        return self._windows.places(epoch, positions, lanes.num_places, lanes.begins)

    def take(
        self, locations: Tensor, out: Buffers | None = None, *, pin_memory: bool = False
    ) -> list[Tensor]:
        """Copy rows into one batch, once they are read.

        Args:
            locations: Where the rows are, int64 of shape (B,), on the CPU. In no window before
                the last one of the take before: its memory is used again.
            out: Buffers to copy into. New ones are made where it is None.
            pin_memory: Whether new ones are page-locked, for copies to a device.

        Returns:
            One tensor of shape (B, *field shape) per field, on the CPU.

        Raises:
            OSError: The disk cannot be read.
            StoreError: A file is shorter than it was.
            RuntimeError: The shards were let go of.
        """
        size = self._lanes.num_places
        first, last = (int(edge) // size for edge in locations.aminmax())
        assert first >= self._number, "windows come in their order"
        if out is None:
            shapes = [((len(locations), *t.shape[1:]), t.dtype) for t in self.tensors]
            out = Buffers.empty(shapes, pin_memory=pin_memory)
        for number in range(first, last + 1):
            self._check()
            while self._window is None or self._number < number:
                self._advance()
            places = locations - number * size
            if first == last:
                copy_rows(self._window, places, out)
                continue
            here = np.flatnonzero((places >= 0) & (places < size))
            for rows, taken in zip(self._window.rows, out.rows, strict=True):
                taken[here] = rows[places.numpy()[here]]
        return out.tensors

    def close(self) -> None:
        """End the threads. No row can be taken any more."""
        if self._is_closed:
            return
        self._is_closed = True
        self._window = None
        if self._end():
            # Nobody writes there any more.
            self._idle.extend(self._reading.buffers[: NUM_BUFFERS - len(self._idle)])

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> None:
        numbers = range(self._number + 1, len(self._windows))
        self._process = os.getpid()
        self._reading = Reading(
            self._lanes, self._windows, self._epoch, numbers, self._idle, NUM_BUFFERS
        )
        self._end: Any = weakref.finalize(self, self._reading.end)
        self._reading.start()

    def _advance(self) -> Buffers:
        """Go on to the next window, and let the threads have the memory of this one."""
        self._check()
        if self._window is not None:
            self._reading.free.put(self._window)
            self._window = None
        found = self._reading.ready.get()
        if isinstance(found, BaseException):
            raise found
        self._window = found
        self._number += 1
        return found

    def _check(self) -> None:
        if self._is_closed:
            raise released_error()
        if os.getpid() != self._process:
            # The threads stayed with the parent, and so did their locks and what they had read.
            self._end.detach()
            if self._window is not None:
                self._idle.append(self._window)
                self._window = None
                self._number -= 1
            self._start()
