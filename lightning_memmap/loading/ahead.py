"""Threads that prepare the next items, in their order, while earlier items are used."""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeAlias, TypeVar

from lightning_memmap.loading.row_source import released_error

T = TypeVar("T")
#: Returns the jobs that prepare an item. Each job is done by one thread.
Jobs: TypeAlias = Callable[[], Iterable[Callable[[], None]]]


class Ahead(Generic[T]):
    """A queue of items that threads prepare in the background."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._name = name
        self._num_threads = num_threads
        self._queue: deque[tuple[T, Jobs]] = deque()
        self._is_closed = False
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._threads = ThreadPoolExecutor(self._num_threads, self._name)
        #: The work of the threads on each item.
        self._futures = deque(self._submit(jobs) for _, jobs in self._queue)

    def __len__(self) -> int:
        return len(self._queue)

    def begin(self, item: T, jobs: Jobs) -> None:
        """Append an item, and let the threads do the jobs that prepare it."""
        self._check()
        self._queue.append((item, jobs))
        self._futures.append(self._submit(jobs))

    def first(self) -> T:
        """Wait until the first item is ready, and return it."""
        self._check()
        for future in self._futures[0]:
            future.result()
        # close() may have been called while this waited.
        self._check()
        self._futures[0].clear()
        return self._queue[0][0]

    def take(self) -> T:
        """Wait until the first item is ready, and remove it from the queue."""
        item = self.first()
        self._futures.popleft()
        self._queue.popleft()
        return item

    def close(self) -> list[T]:
        """Stop the threads, and return the items of the queue, ready or not."""
        items = [item for item, _ in self._queue]
        if not self._is_closed:
            self._is_closed = True
            # At its exit the interpreter has stopped the threads, and deleted much of the library.
            if os.getpid() == self._process and not sys.is_finalizing():
                self._threads.shutdown(cancel_futures=True)
            self._queue.clear()
            self._futures.clear()
        return items

    def _check(self) -> None:
        """Check that the threads run, and start them again in a forked process."""
        if self._is_closed:
            raise released_error()
        if os.getpid() != self._process:
            # The threads, and perhaps their results, stayed in the parent.
            self._start()

    def _submit(self, jobs: Jobs) -> list[Future[None]]:
        # One future per thread: one per job would take longer than short jobs.
        remaining = iter(jobs())
        lock = threading.Lock()
        return [self._threads.submit(self._do, remaining, lock) for _ in range(self._num_threads)]

    def _do(self, jobs: Iterator[Callable[[], None]], lock: threading.Lock) -> None:
        while not self._is_closed:
            with lock:
                job = next(jobs, None)
            if job is None:
                return
            job()
