"""Threads that read windows, one after the other, into memory that they are given."""

import threading
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic

from lightning_memmap.loading.buffers import Buffers
from lightning_memmap.loading.lanes import Lanes, Piece
from lightning_memmap.sampling import Windows

#: While one thread copies what it has read, or waits for a short read, others read on.
_NUM_THREADS = 4
#: How long an end waits for threads that are inside a read. A disk may hang; a program must not.
_PATIENCE_S = 10.0


def released_error() -> RuntimeError:
    """What a loader says that outlived its shards."""
    return RuntimeError(
        "the shards of this loader were let go of by teardown(): call setup(), and ask for a new"
        " loader"
    )


@dataclass
class _Unread:
    """A window of which pieces are not read yet: ``left`` of them, and those still to be cut."""

    buffers: Buffers
    left: int = 0
    is_cut: bool = False


class Reading:
    """Threads that read windows. The next window is begun while the last pieces of one are read.

    They know nothing of their user, so that this one can be dropped. They hold nothing that must
    be brought to an end, and do not outlive the program.

    Args:
        lanes: How rows are read.
        windows: Which rows are in which window.
        epoch: The epoch.
        numbers: The windows to read.
        idle: Memory for windows that nobody uses; what is needed is taken out of it.
        num_buffers: Windows in memory at most.
    """

    def __init__(
        self,
        lanes: Lanes,
        windows: Windows,
        epoch: int,
        numbers: Sequence[int],
        idle: list[Buffers],
        num_buffers: int,
    ) -> None:
        #: Memory for windows; None where it is to be made, and to wake a thread at the end.
        self.free: SimpleQueue[Buffers | None] = SimpleQueue()
        #: Windows in their order, and why a thread failed.
        self.ready: SimpleQueue[Buffers | BaseException] = SimpleQueue()
        #: All memory for windows.
        self.buffers: list[Buffers] = []
        for _ in numbers[:num_buffers]:
            buffers = idle.pop() if idle else None
            if buffers is not None:
                self.buffers.append(buffers)
            self.free.put(buffers)
        self._lanes = lanes
        self._runs = (windows.runs(epoch, number) for number in numbers)
        self._unread: deque[_Unread] = deque()
        self._pieces = self._cut()
        self._is_over = False
        # The first one is held while a thread waits for memory. Then others still finish pieces.
        self._next_lock, self._done_lock = threading.Lock(), threading.Lock()
        self._threads = [
            # The interpreter would wait for others at its exit, before it calls `end`.
            threading.Thread(target=self._run, name="lightning_memmap read-ahead", daemon=True)
            for _ in range(_NUM_THREADS)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def end(self) -> bool:
        """End the threads.

        Returns:
            Whether they have ended.
        """
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
        # It holds this object, which would not be let go of, nor the memory.
        self._pieces.close()
        return True

    def _run(self) -> None:
        """What each thread does."""
        try:
            scratch = self._lanes.scratch()
            while (found := self._next()) is not None:
                window, piece = found
                piece(scratch)
                self._count(window, -1)
        except BaseException as error:  # Whoever waits for a window must be told.
            self._is_over = True
            self.free.put(None)
            self.ready.put(error)

    def _next(self) -> tuple[_Unread, Piece] | None:
        with self._next_lock:
            return None if self._is_over else next(self._pieces, None)

    def _cut(self) -> Generator[tuple[_Unread, Piece], None, None]:
        for runs in self._runs:
            buffers = self.free.get()
            if self._is_over:
                return
            if buffers is None:
                buffers = self._lanes.allocate()
                self.buffers.append(buffers)
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
                self.ready.put(self._unread.popleft().buffers)
