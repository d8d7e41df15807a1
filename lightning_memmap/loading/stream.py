"""A stream: threads read the next window of the files while rows of this one are fetched."""

import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_memmap.loading.ahead import Ahead
from lightning_memmap.loading.buffers import Buffers
from lightning_memmap.loading.row_source import Leaf, RowSource, Take, in_order
from lightning_memmap.loading.stream_layout import StreamLayout, StreamMemory
from lightning_memmap.sampling import Integers, ReadWindows, Sampler

#: Windows in memory: rows are fetched from one while the other is read.
_NUM_BUFFERS = 2
#: While one thread copies what it has read, or waits for a short read, others read on.
_NUM_THREADS = 4


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
        self._layout, self._windows, self._epoch, self._idle = layout, windows, epoch, idle
        #: The window whose rows are fetched. Its memory is the first one.
        self._number = windows.number_of(position)
        self._memory = Ahead[StreamMemory]("lightning_memmap window-reader", _NUM_THREADS)
        for _ in range(_NUM_BUFFERS):
            self._read(idle.pop() if idle else None)

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
        # Nobody writes there any more.
        self._idle.extend(self._memory.close())
        del self._idle[_NUM_BUFFERS:]

    def _read(self, memory: StreamMemory | None) -> None:
        """Begin to read the next window that is not read yet."""
        number = self._number + len(self._memory)
        if number < len(self._windows):
            memory = memory or StreamMemory(self._layout)
            reads = partial(memory.reads, self._windows, self._epoch, number)
            self._memory.begin(memory, reads)
        elif memory is not None:
            self._idle.append(memory)

    def _window_of(self, number: int) -> StreamMemory:
        """The memory of a window, once it is read. That of earlier windows is used again."""
        while self._number < number:
            used = self._memory.take()
            self._number += 1
            self._read(used)
        return self._memory.first()
