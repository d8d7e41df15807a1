"""Reading ahead: a thread reads the next window of a stream while rows of this one are taken."""

import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.loading.buffers import Buffers, copy_rows
from lightning_memmap.loading.lanes import Lanes
from lightning_memmap.order import Integers, Stream
from lightning_memmap.windows import Windows

#: Windows in memory: one that is taken from, and one that is read.
NUM_BUFFERS = 2
#: How long an end waits for a thread that is inside a read. A disk may hang; a program must not.
_PATIENCE_S = 10.0


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

    A thread reads, into memory for two windows. It ends with the epoch, with `close`, when nobody
    has this object any more, and at the exit of the interpreter. In a process that was forked
    meanwhile, another one reads on.

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
        return self._windows.places(epoch, positions, self._lanes.number_of)

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
            while self._number < number:
                self._advance()
            self._check()
            assert self._window is not None
            places = locations - number * size
            if first == last:
                copy_rows(self._window, places, out)
                continue
            here = np.flatnonzero((places >= 0) & (places < size))
            for rows, taken in zip(self._window.rows, out.rows, strict=True):
                taken[here] = rows[places.numpy()[here]]
        return out.tensors

    def close(self) -> None:
        """End the thread. No row can be taken any more."""
        if self._is_closed:
            return
        self._is_closed = True
        self._window = None
        if self._end():
            # Nobody writes there any more.
            self._idle.extend(self._feed.buffers[: NUM_BUFFERS - len(self._idle)])

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
        self._feed = _Feed()
        if self._window is not None:
            self._feed.buffers.append(self._window)
        for _ in numbers[: NUM_BUFFERS - len(self._feed.buffers)]:
            buffers = self._idle.pop() if self._idle else None
            if buffers is not None:
                self._feed.buffers.append(buffers)
            self._feed.free.put(buffers)
        thread = threading.Thread(
            target=_read_windows,
            args=(self._feed, self._lanes, self._windows, self._epoch, numbers),
            name="lightning_memmap read-ahead",
            # It holds nothing that must be brought to an end, and `_end` is called at the exit of
            # the interpreter: one that waited for the thread before that would wait for ever.
            daemon=True,
        )
        self._end: Any = weakref.finalize(self, _end, self._feed, thread)
        thread.start()

    def _advance(self) -> Buffers:
        """Go on to the next window, and let the thread have the memory of this one."""
        self._check()
        if self._window is not None:
            self._feed.free.put(self._window)
            self._window = None
        found = self._feed.ready.get()
        if isinstance(found, BaseException):
            raise found
        self._window = found
        self._number += 1
        return found

    def _check(self) -> None:
        if self._is_closed:
            raise released_error()
        if os.getpid() != self._process:
            # The thread stayed with the parent, and so did its locks. What was taken from is here.
            self._end.detach()
            self._start()


@dataclass
class _Feed:
    """What the thread and its user share. The thread knows nothing else of its user, so that this
    one can be dropped.

    Args:
        free: Memory for windows; None where it is to be made, and to wake the thread at the end.
        ready: Windows, and at the end of a thread that failed, why it did.
        buffers: All memory for windows.
        is_over: Set when no window is wanted any more.
    """

    free: "SimpleQueue[Buffers | None]" = field(default_factory=SimpleQueue)
    ready: "SimpleQueue[Buffers | BaseException]" = field(default_factory=SimpleQueue)
    buffers: list[Buffers] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)


def _read_windows(
    feed: _Feed, lanes: Lanes, windows: Windows, epoch: int, numbers: Sequence[int]
) -> None:
    """What the thread does."""
    try:
        for number in numbers:
            buffers = feed.free.get()
            if feed.is_over.is_set():
                return
            if buffers is None:
                buffers = lanes.allocate()
                feed.buffers.append(buffers)
            lanes.read(windows.runs(epoch, number), buffers, lambda: not feed.is_over.is_set())
            if feed.is_over.is_set():
                return
            feed.ready.put(buffers)
    except BaseException as error:  # Whoever waits for a window must be told.
        feed.ready.put(error)


def _end(feed: _Feed, thread: threading.Thread) -> bool:
    """End a thread.

    Returns:
        Whether it has ended.
    """
    feed.is_over.set()
    feed.free.put(None)
    feed.ready.put(released_error())
    # Garbage may be collected in any thread, in this one too.
    if thread is not threading.current_thread():
        thread.join(_PATIENCE_S)
    return not thread.is_alive()


def released_error() -> RuntimeError:
    """What a loader says that outlived its shards."""
    return RuntimeError(
        "the shards of this loader were let go of by teardown(): call setup(), and ask for a new"
        " loader"
    )
