"""Threads that read windows, one after the other, into memory that they are given."""

import threading
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic

from lightning_memmap.loading.row_source import released_error
from lightning_memmap.loading.stream_layout import StreamLayout, StreamMemory
from lightning_memmap.loading.window_reads import Read
from lightning_memmap.sampling import ReadWindows

#: While one thread copies what it has read, or waits for a short read, others read on.
_NUM_THREADS = 4
#: How long an end waits for threads that are inside a read. A disk may hang; a program must not.
_PATIENCE_S = 10.0


@dataclass
class _Unread:
    """A window with unfinished reads: ``left`` of them, and those that are yet to be planned."""

    memory: StreamMemory
    left: int = 0
    is_planned: bool = False


class WindowReader:
    """Threads that read windows. The next window is begun while the last reads of one finish.

    They know nothing of their user, so that it can be garbage-collected. They own nothing that
    must be closed, and do not outlive the program.

    Args:
        layout: How rows are read.
        windows: Which rows are in which window.
        epoch: The epoch.
        numbers: The windows to read.
        idle: Memory for windows that nobody uses; the reader takes what it needs out of this list.
        num_buffers: Windows in memory at most.
    """

    def __init__(
        self,
        layout: StreamLayout,
        windows: ReadWindows,
        epoch: int,
        numbers: Sequence[int],
        idle: list[StreamMemory],
        num_buffers: int,
    ) -> None:
        #: Memory for windows; None stands for memory yet to be allocated, and wakes a thread at
        #: the end.
        self.free: SimpleQueue[StreamMemory | None] = SimpleQueue()
        #: Windows in their order, or why a thread failed.
        self.ready: SimpleQueue[StreamMemory | BaseException] = SimpleQueue()
        #: All memory for windows.
        self.memory: list[StreamMemory] = []
        for _ in numbers[:num_buffers]:
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
                memory = self._layout.allocate()
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
