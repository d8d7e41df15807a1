"""Reading ahead: threads read the next window of a stream while rows of this one are taken."""

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import monotonic
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.loading.buffers import Buffers, copy_rows
from lightning_memmap.loading.lanes import Lanes, Piece
from lightning_memmap.order import Integers, Stream, Windows

#: Windows in memory: one that is taken from, and one that is read.
NUM_BUFFERS = 2
#: While one thread copies what it has read, or waits for a short read, others read on.
_NUM_THREADS = 4
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
        for _ in numbers[:NUM_BUFFERS]:
            buffers = self._idle.pop() if self._idle else None
            if buffers is not None:
                self._feed.buffers.append(buffers)
            self._feed.free.put(buffers)
        reading = _Reading(self._feed, self._lanes, self._windows, self._epoch, numbers)
        threads = [
            threading.Thread(
                target=reading.run,
                name="lightning_memmap read-ahead",
                # It holds nothing that must be brought to an end, and `_end` is called at the exit
                # of the interpreter: one that waited for the thread before that would wait for
                # ever.
                daemon=True,
            )
            for _ in range(_NUM_THREADS)
        ]
        self._end: Any = weakref.finalize(self, _end, self._feed, threads)
        for thread in threads:
            thread.start()

    def _advance(self) -> Buffers:
        """Go on to the next window, and let the threads have the memory of this one."""
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
            # The threads stayed with the parent, and so did their locks and what they had read.
            self._end.detach()
            if self._window is not None:
                self._idle.append(self._window)
                self._window = None
                self._number -= 1
            self._start()


@dataclass
class _Feed:
    """What the threads and their user share. The threads know nothing else of their user, so that
    this one can be dropped.

    Args:
        free: Memory for windows; None where it is to be made, and to wake a thread at the end.
        ready: Windows in their order, and why a thread failed.
        buffers: All memory for windows.
        is_over: Set when no window is wanted any more.
    """

    free: "SimpleQueue[Buffers | None]" = field(default_factory=SimpleQueue)
    ready: "SimpleQueue[Buffers | BaseException]" = field(default_factory=SimpleQueue)
    buffers: list[Buffers] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)


@dataclass
class _Unread:
    """A window of which pieces are not read yet: ``left`` of them, and those still to be cut."""

    buffers: Buffers
    left: int = 0
    is_cut: bool = False


class _Reading:
    """What the threads do together: the next window is begun while the last pieces of one are
    read.

    Args:
        feed: What they share with their user.
        lanes: How rows are read.
        windows: Which rows are in which window.
        epoch: The epoch.
        numbers: The windows to read.
    """

    def __init__(
        self, feed: _Feed, lanes: Lanes, windows: Windows, epoch: int, numbers: Sequence[int]
    ) -> None:
        self._feed = feed
        self._lanes = lanes
        self._runs = (windows.runs(epoch, number) for number in numbers)
        self._unread: deque[_Unread] = deque()
        self._pieces = self._cut()
        # The first one is held while a thread waits for memory. Then others still finish pieces.
        self._next_lock, self._done_lock = threading.Lock(), threading.Lock()

    def run(self) -> None:
        """What each thread does."""
        try:
            scratch = self._lanes.scratch()
            while (found := self._next()) is not None:
                window, piece = found
                piece(scratch)
                self._count(window, -1)
        except BaseException as error:  # Whoever waits for a window must be told.
            self._feed.is_over.set()
            self._feed.free.put(None)
            self._feed.ready.put(error)

    def _next(self) -> tuple[_Unread, Piece] | None:
        with self._next_lock:
            return None if self._feed.is_over.is_set() else next(self._pieces, None)

    def _cut(self) -> Iterator[tuple[_Unread, Piece]]:
        for runs in self._runs:
            buffers = self._feed.free.get()
            if self._feed.is_over.is_set():
                return
            if buffers is None:
                buffers = self._lanes.allocate()
                self._feed.buffers.append(buffers)
            window = _Unread(buffers)
            self._unread.append(window)
            for piece in self._lanes.pieces(runs, buffers):
                self._count(window, 1)
                yield window, piece
            window.is_cut = True
            self._count(window, 0)

    def _count(self, window: _Unread, more: int) -> None:
        """Count pieces of a window, and hand over the windows that are read."""
        with self._done_lock:
            window.left += more
            while self._unread and self._unread[0].is_cut and not self._unread[0].left:
                self._feed.ready.put(self._unread.popleft().buffers)


def _end(feed: _Feed, threads: Sequence[threading.Thread]) -> bool:
    """End the threads.

    Returns:
        Whether they have ended.
    """
    feed.is_over.set()
    feed.free.put(None)
    feed.ready.put(released_error())
    until = monotonic() + _PATIENCE_S
    for thread in threads:
        # Garbage may be collected in any thread, in one of these too.
        if thread is not threading.current_thread():
            thread.join(max(0.0, until - monotonic()))
    return not any(thread.is_alive() for thread in threads)


def released_error() -> RuntimeError:
    """What a loader says that outlived its shards."""
    return RuntimeError(
        "the shards of this loader were let go of by teardown(): call setup(), and ask for a new"
        " loader"
    )
