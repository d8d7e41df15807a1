"""A stream: threads read the next window of the files while rows of this one are fetched."""

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_memmap.loading.buffers import Buffers
from lightning_memmap.loading.row_source import (
    Leaf,
    RowSource,
    Take,
    in_order,
    released_error,
)
from lightning_memmap.loading.runs import Read, scratch_memory
from lightning_memmap.loading.stream_layout import StreamLayout, StreamMemory
from lightning_memmap.sampling import Integers, ReadWindows, Sampler

#: Windows in memory: rows are fetched from one while the other is read.
_NUM_BUFFERS = 2
#: While one thread copies what it has read, or waits for a short read, others read on.
_NUM_THREADS = 4

#: Scratch memory of each thread.
_OF_THREAD = threading.local()


class Stream(RowSource):
    """Rows of some shards that stay in the files, and are read window by window."""

    device = torch.device("cpu")

    def __init__(self, layout: StreamLayout, window: int) -> None:
        self.layout, self._window = layout, window
        #: Memory for windows that nobody uses.
        self._idle: list[StreamMemory] = []
        self._epochs: weakref.WeakSet[_StreamedEpoch] = weakref.WeakSet()

    @override
    def check_sampler(self, sampler: Sampler) -> None:
        # Its windows must be those that are read.
        ReadWindows(sampler, self._window)

    @override
    def locate(self, sampler: Sampler, epoch: int, positions: range) -> Integers:
        # As if all windows lay one after the other.
        return self.layout.locate(ReadWindows(sampler, self._window), epoch, positions)

    @override
    @contextmanager
    def epoch(self, sampler: Sampler, epoch: int, position: int) -> Iterator[Take]:
        windows = ReadWindows(sampler, self._window)
        with closing(_StreamedEpoch(self.layout, windows, epoch, position, self._idle)) as rows:
            self._epochs.add(rows)
            yield rows.take

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
        self._layout, self._windows, self._epoch = layout, windows, epoch
        self._idle = idle
        #: The window whose rows are fetched, and its memory.
        self._number = windows.number_of(position) - 1
        self._window: StreamMemory | None = None
        self._is_closed = False
        self._start()

    def take(self, slots: Tensor, out: Buffers | None) -> list[Leaf]:
        """Copy rows into a batch: some after those before, in the order of the windows."""
        size = self._layout.num_slots
        first, last = (int(edge) // size for edge in slots.aminmax())
        assert first >= self._number, "windows come in their order"
        if first == last:
            return self._window_of(first).take(slots - first * size, out)
        # From one window into the next.
        parts = list[tuple[Integers, list[Leaf]]]()
        for number in range(first, last + 1):
            here = np.flatnonzero(slots.numpy() // size == number)
            parts.append((here, self._window_of(number).take(slots[here] - number * size)))
        return in_order(parts, slots.device)

    def close(self) -> None:
        """End the threads. No row can be fetched any more."""
        if self._is_closed:
            return
        self._is_closed = True
        if os.getpid() == self._process:
            self._threads.shutdown(cancel_futures=True)
        # Nobody writes there any more.
        self._idle.extend(memory for memory, _ in self._coming)
        if self._window is not None:
            self._idle.append(self._window)
        self._window = None
        self._coming.clear()
        del self._idle[_NUM_BUFFERS:]

    def _start(self) -> None:
        self._process = os.getpid()
        self._threads = ThreadPoolExecutor(
            _NUM_THREADS,
            "lightning_memmap window-reader",
            initializer=_make_scratch,
            initargs=(self._layout.item_bytes,),
        )
        #: The memory of coming windows, which are read.
        self._coming = deque[tuple[StreamMemory, list[Future[None]]]]()
        for _ in range(min(_NUM_BUFFERS, len(self._windows) - 1 - self._number)):
            self._read(self._idle.pop() if self._idle else StreamMemory(self._layout))

    def _read(self, memory: StreamMemory) -> None:
        """Begin to read the next window that is not read yet."""
        number = self._number + 1 + len(self._coming)
        if number < len(self._windows):
            # One future for each thread: one for each read would take longer than short reads.
            reads, lock = memory.reads(self._windows, self._epoch, number), threading.Lock()
            threads = [self._threads.submit(self._do, reads, lock) for _ in range(_NUM_THREADS)]
            self._coming.append((memory, threads))
        else:
            self._idle.append(memory)

    def _window_of(self, number: int) -> StreamMemory:
        """The memory of a window, once it is read. That of earlier windows is used again."""
        self._check_open()
        if os.getpid() != self._process:
            # The threads stayed with the parent, and so did what they had read.
            self._number -= self._window is not None
            self._window = None
            self._start()
        while self._window is None or self._number < number:
            if self._window is not None:
                used, self._window = self._window, None
                self._read(used)
            memory, threads = self._coming[0]
            for each in threads:
                each.result()
            self._check_open()
            self._coming.popleft()
            self._window, self._number = memory, self._number + 1
        return self._window

    def _check_open(self) -> None:
        if self._is_closed:
            raise released_error()

    def _do(self, reads: Iterator[Read], lock: threading.Lock) -> None:
        """Do the reads of a window that no other thread does."""
        while not self._is_closed:
            with lock:
                read = next(reads, None)
            if read is None:
                return
            read(_OF_THREAD.scratch)


def _make_scratch(item_bytes: int) -> None:
    _OF_THREAD.scratch = scratch_memory(item_bytes)
