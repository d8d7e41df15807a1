"""Threads that work on what comes next, in its order, while what came before is used."""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from lightning_memmap.loading.row_source import released_error

T = TypeVar("T")


class Ahead(Generic[T]):
    """Things that were begun, in their order, each with the jobs that make it ready."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._name, self._num_threads = name, num_threads
        self._begun = deque[tuple[T, Callable[[], Iterable[Callable[[], None]]]]]()
        self._is_closed = False
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._threads = ThreadPoolExecutor(self._num_threads, self._name)
        #: What the threads do for each of the things.
        self._futures = deque(self._submitted(jobs) for _, jobs in self._begun)

    def __len__(self) -> int:
        return len(self._begun)

    def begin(self, thing: T, jobs: Callable[[], Iterable[Callable[[], None]]]) -> None:
        """Let the threads make a thing ready; each of them does jobs that no other one does."""
        self._check()
        self._begun.append((thing, jobs))
        self._futures.append(self._submitted(jobs))

    def first(self) -> T:
        """The thing that was begun first, once it is ready."""
        self._check()
        for future in self._futures[0]:
            future.result()
        # The threads may have been ended meanwhile.
        self._check()
        self._futures[0].clear()
        return self._begun[0][0]

    def take(self) -> T:
        """The same, which is then the caller's."""
        thing = self.first()
        self._futures.popleft()
        self._begun.popleft()
        return thing

    def close(self) -> list[T]:
        """End the threads. What was begun does not get ready any more."""
        things = [thing for thing, _ in self._begun]
        if not self._is_closed:
            self._is_closed = True
            # When the interpreter ends, it has ended the threads, and much of the library is gone.
            if os.getpid() == self._process and not sys.is_finalizing():
                self._threads.shutdown(cancel_futures=True)
            self._begun.clear()
            self._futures.clear()
        return things

    def _check(self) -> None:
        """Check that the threads were not ended, and are those of this process."""
        if self._is_closed:
            raise released_error()
        if os.getpid() != self._process:
            # They stayed with the parent, and so may have what they did.
            self._start()

    def _submitted(self, jobs: Callable[[], Iterable[Callable[[], None]]]) -> list[Future[None]]:
        # A future for each thread: one for each job would take longer than short jobs.
        left, lock = iter(jobs()), threading.Lock()
        return [self._threads.submit(self._do, left, lock) for _ in range(self._num_threads)]

    def _do(self, jobs: Iterator[Callable[[], None]], lock: threading.Lock) -> None:
        while not self._is_closed:
            with lock:
                job = next(jobs, None)
            if job is None:
                return
            job()
