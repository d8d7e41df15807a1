"""A stream: threads read the next window of the files while rows of this one are fetched."""

import os
import threading
import weakref
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_memmap.loading.buffers import Buffers
from lightning_memmap.loading.row_source import (
    EpochRows,
    Leaf,
    RowSource,
    fixed_fields,
    released_error,
)
from lightning_memmap.loading.runs import Read
from lightning_memmap.loading.stream_layout import StreamLayout, StreamMemory
from lightning_memmap.loading.variable_rows import joined_rows
from lightning_memmap.sampling import Integers, ReadWindows, Sampler

#: Windows in memory: rows are fetched from one while the other is read.
_NUM_BUFFERS = 2
#: While one thread copies what it has read, or waits for a short read, others read on.
_NUM_THREADS = 4
#: How long an end waits for threads that are inside a read. A disk may hang; a program must not.
_PATIENCE_S = 10.0


class Stream(RowSource):
    """Rows of some shards that stay in the files, and are read window by window."""

    device = torch.device("cpu")

    def __init__(self, layout: StreamLayout, window: int) -> None:
        self.layout, self._window = layout, window
        self.fields, self.row_bytes = layout.fields, layout.row_bytes
        #: Memory for windows that nobody uses.
        self._idle: list[StreamMemory] = []
        self._epochs: weakref.WeakSet[_StreamedEpoch] = weakref.WeakSet()

    @override
    def check_sampler(self, sampler: object) -> None:
        super().check_sampler(sampler)
        assert isinstance(sampler, Sampler)
        # Its windows must be those that are read.
        ReadWindows(sampler, self._window)

    @override
    def locate(self, sampler: Sampler, epoch: int, positions: range) -> Integers:
        # As if all windows lay one after the other.
        return self.layout.locate(ReadWindows(sampler, self._window), epoch, positions)

    @override
    def epoch(
        self, sampler: Sampler, epoch: int, position: int
    ) -> AbstractContextManager[EpochRows]:
        windows = ReadWindows(sampler, self._window)
        rows = _StreamedEpoch(self.layout, windows, epoch, position, self._idle)
        self._epochs.add(rows)
        return closing(rows)

    @override
    def release(self) -> None:
        super().release()
        for rows in list(self._epochs):
            rows.close()
        self._idle.clear()


class _StreamedEpoch:
    """Rows of the windows of one epoch, in the order in which they come."""

    def __init__(
        self,
        layout: StreamLayout,
        windows: ReadWindows,
        epoch: int,
        position: int,
        idle: list[StreamMemory],
    ) -> None:
        self._fixed = fixed_fields(layout.fields)
        self._layout = layout
        self._windows = windows
        self._epoch = epoch
        self._idle = idle
        self._number = windows.number_of(position) - 1
        self._window: StreamMemory | None = None
        self._is_closed = False
        self._start()

    def fetch(
        self, slots: Tensor, out: Buffers | None = None, *, pin_memory: bool = False
    ) -> Sequence[Leaf]:
        size = self._layout.num_slots
        first, last = (int(edge) // size for edge in slots.aminmax())
        assert first >= self._number, "windows come in their order"
        if out is None:
            out = Buffers.empty(self._fixed, len(slots), pin_memory=pin_memory)
        if first == last:
            return self._window_of(first).fetch(slots - first * size, out)
        # From one window into the next.
        orders, parts = list[Integers](), list[Sequence[Leaf]]()
        for number in range(first, last + 1):
            within = slots - number * size
            here = np.flatnonzero((within >= 0) & (within < size))
            some = Buffers.empty(self._fixed, len(here))
            parts.append(self._window_of(number).fetch(within[here], some))
            orders.append(here)
            for rows, fetched in zip(some.rows, out.rows, strict=True):
                fetched[here] = rows
        order = torch.from_numpy(np.argsort(np.concatenate(orders)))
        fixed = iter(out.tensors)
        return [
            next(fixed)
            if isinstance(pieces[0], Tensor)
            else joined_rows(pieces).index_select(0, order)
            for pieces in zip(*parts, strict=True)
        ]

    def close(self) -> None:
        """End the threads. No row can be fetched any more."""
        if self._is_closed:
            return
        self._is_closed = True
        self._window = None
        if self._end():
            # Nobody writes there any more.
            self._idle.extend(self._reader.memory[: _NUM_BUFFERS - len(self._idle)])

    def _start(self) -> None:
        numbers = range(self._number + 1, len(self._windows))
        self._process = os.getpid()
        self._reader = _WindowReader(self._layout, self._windows, self._epoch, numbers, self._idle)
        self._end: Any = weakref.finalize(self, self._reader.end)
        self._reader.start()

    def _window_of(self, number: int) -> StreamMemory:
        """The memory of a window, once it is read. That of earlier windows is used again."""
        if self._is_closed:
            raise released_error()
        if os.getpid() != self._process:
            self._start_after_fork()
        while self._window is None or self._number < number:
            if self._window is not None:
                self._reader.free.put(self._window)
                self._window = None
            found = self._reader.ready.get()
            if isinstance(found, BaseException):
                raise found
            self._window = found
            self._number += 1
        return self._window

    def _start_after_fork(self) -> None:
        # The threads stayed with the parent, and so did their locks and what they had read.
        self._end.detach()
        if self._window is not None:
            self._idle.append(self._window)
            self._window = None
            self._number -= 1
        self._start()


@dataclass
class _Unread:
    """A window with unfinished reads: ``left`` of them, and those that are yet to be planned."""

    memory: StreamMemory
    left: int = 0
    is_planned: bool = False


class _WindowReader:
    """Threads that read windows. The next window is begun while the last reads of one finish."""

    def __init__(
        self,
        layout: StreamLayout,
        windows: ReadWindows,
        epoch: int,
        numbers: Sequence[int],
        idle: list[StreamMemory],
    ) -> None:
        #: Memory for windows; None stands for memory yet to be allocated, and wakes a thread at
        #: the end.
        self.free: SimpleQueue[StreamMemory | None] = SimpleQueue()
        #: Windows in their order, or why a thread failed.
        self.ready: SimpleQueue[StreamMemory | BaseException] = SimpleQueue()
        #: All memory for windows.
        self.memory: list[StreamMemory] = []
        for _ in numbers[:_NUM_BUFFERS]:
            memory = idle.pop() if idle else None
            if memory is not None:
                self.memory.append(memory)
            self.free.put(memory)
        self._layout = layout
        self._windows, self._epoch, self._numbers = windows, epoch, numbers
        self._unread: deque[_Unread] = deque()
        self._reads = self._plan_reads()
        self._is_over = False
        # The first lock is held while a thread waits for memory. Others still finish reads then.
        self._next_lock, self._done_lock = threading.Lock(), threading.Lock()
        self._threads = [
            # The interpreter would wait for threads that are no daemons before it calls `end`.
            threading.Thread(target=self._run, name="lightning_memmap window-reader", daemon=True)
            for _ in range(_NUM_THREADS)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def end(self) -> bool:
        """End the threads."""
        self._is_over = True
        self.free.put(None)
        self.ready.put(released_error())
        until = monotonic() + _PATIENCE_S
        for thread in self._threads:
            # Garbage may be collected in any thread, in one of these too.
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False
        # It refers to this object, which would not be freed, nor would the memory.
        self._reads.close()
        return True

    def _run(self) -> None:
        """What each thread does."""
        try:
            scratch = self._layout.scratch()
            while (found := self._next()) is not None:
                window, read = found
                read(scratch)
                self._count(window, -1)
        except BaseException as error:  # Whoever waits for a window must get it.
            self._is_over = True
            self.free.put(None)
            self.ready.put(error)

    def _next(self) -> tuple[_Unread, Read] | None:
        with self._next_lock:
            return None if self._is_over else next(self._reads, None)

    def _plan_reads(self) -> Generator[tuple[_Unread, Read], None, None]:
        for number in self._numbers:
            memory = self.free.get()
            if self._is_over:
                return
            if memory is None:
                memory = StreamMemory(self._layout)
                self.memory.append(memory)
            window = _Unread(memory)
            self._unread.append(window)
            for read in memory.reads(self._windows, self._epoch, number):
                self._count(window, 1)
                yield window, read
            window.is_planned = True
            self._count(window, 0)

    def _count(self, window: _Unread, more: int) -> None:
        """Count unfinished reads of a window, and hand over the windows that are complete."""
        with self._done_lock:
            window.left += more
            while self._unread and self._unread[0].is_planned and not self._unread[0].left:
                self.ready.put(self._unread.popleft().memory)
