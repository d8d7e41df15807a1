"""Streamed rows: threads read the next window of the files while rows of this one are fetched."""

import os
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.loading.buffers import Buffers
from lightning_memmap.loading.row_source import Leaf, fixed_fields, released_error
from lightning_memmap.loading.stream_layout import StreamLayout, StreamMemory
from lightning_memmap.loading.variable_rows import joined_rows
from lightning_memmap.loading.window_reader import WindowReader
from lightning_memmap.sampling import Integers, ReadWindows, Sampler

#: Windows in memory: rows are fetched from one while the other is read.
NUM_BUFFERS = 2


class StreamedRows:
    """Rows of some shards that stay in the files, and are read window by window.

    Args:
        layout: How their rows are read.
        window: Rows of a shard in a window.
    """

    device = torch.device("cpu")

    def __init__(self, layout: StreamLayout, window: int) -> None:
        self._layout = layout
        self._window = window
        self._idle: list[StreamMemory] = []
        self._epochs: weakref.WeakSet[StreamedEpoch] = weakref.WeakSet()
        #: Whether the memory was freed.
        self.is_released = False

    def check_sampler(self, sampler: Sampler) -> None:
        """Check that the sampler's windows are those that are read."""
        ReadWindows(sampler, self._window)

    def epoch(self, sampler: Sampler, epoch: int, position: int) -> "StreamedEpoch":
        """Begin to read windows, from that of the position on; see `RowSource.epoch`."""
        windows = ReadWindows(sampler, self._window)
        rows = StreamedEpoch(self._layout, windows, epoch, position, self._idle)
        self._epochs.add(rows)
        return rows

    def release(self) -> None:
        """End all threads, and free the memory."""
        self.is_released = True
        for rows in list(self._epochs):
            rows.close()
        self._idle.clear()


class StreamedEpoch(AbstractContextManager["StreamedEpoch"]):
    """Rows of the windows of one epoch, in the order in which they come.

    Threads read, into memory for two windows. They end with the epoch, with `close`, when this
    object is garbage-collected, and at the exit of the interpreter. In a process that was forked
    meanwhile, new ones read on.

    Args:
        layout: How rows are read.
        windows: Which rows are in which window.
        epoch: The epoch.
        position: The first position that will be fetched.
        idle: Memory for windows that nobody uses; it is given back there.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        layout: StreamLayout,
        windows: ReadWindows,
        epoch: int,
        position: int,
        idle: list[StreamMemory],
    ) -> None:
        self.fields = [(field.shape, field.dtype) for field in layout.fields]
        self.row_bytes = layout.row_bytes
        self._fixed = fixed_fields(self.fields)
        self._layout = layout
        self._windows = windows
        self._epoch = epoch
        self._idle = idle
        self._number = windows.number_of(position) - 1
        self._window: StreamMemory | None = None
        self._is_closed = False
        self._start()

    def locate(self, positions: range) -> Integers:
        """Where the rows lie, if all windows lay one after the other; see `EpochRows.locate`."""
        return self._layout.locate(self._windows, self._epoch, positions)

    def fetch(
        self,
        locations: Tensor,
        out: Buffers | None = None,
        *,
        pin_memory: bool = False,
    ) -> Sequence[Leaf]:
        """Copy rows into one batch, once they are read; see `EpochRows.fetch`."""
        size = self._layout.num_slots
        first, last = (int(edge) // size for edge in locations.aminmax())
        assert first >= self._number, "windows come in their order"
        if out is None:
            out = Buffers.empty(self._fixed, len(locations), pin_memory=pin_memory)
        if first == last:
            return self._window_of(first).fetch(locations - first * size, out)
        # From one window into the next.
        orders, parts = list[Integers](), list[Sequence[Leaf]]()
        for number in range(first, last + 1):
            slots = locations - number * size
            here = np.flatnonzero((slots >= 0) & (slots < size))
            some = Buffers.empty(self._fixed, len(here))
            parts.append(self._window_of(number).fetch(slots[here], some))
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
            self._idle.extend(self._reader.memory[: NUM_BUFFERS - len(self._idle)])

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
        self._reader = WindowReader(
            self._layout, self._windows, self._epoch, numbers, self._idle, NUM_BUFFERS
        )
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
