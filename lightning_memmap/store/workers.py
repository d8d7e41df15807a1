"""Worker processes that read a dataset and end when the process that started them ends; threads."""

import ctypes
import errno
import fcntl
import multiprocessing
import os
import pickle
import signal
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import (
    FIRST_COMPLETED,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import cache
from itertools import islice
from mmap import mmap
from multiprocessing import connection
from threading import Barrier, Thread
from time import monotonic
from types import TracebackType
from typing import Any, TypeVar

import torch
from typing_extensions import Self

from lightning_memmap.errors import DatasetError, MemmapError, check_integer, describe_error

Task = TypeVar("Task")
Outcome = TypeVar("Outcome")

_PR_SET_PDEATHSIG = 1
_MAX_WORKERS = 1024
#: How long processes that have nothing to do may take to end.
_PATIENCE_S = 5.0
#: Above the stack of a thread, and what else it needs before it can say that it lacks memory.
_THREAD_BYTES = 16 * 2**20


class Workers:
    """Processes that read a dataset, or with none of them this process."""

    def __init__(self, dataset: Any, num_workers: int) -> None:
        self.dataset = dataset
        self.num_workers = num_workers
        self._pool: ProcessPoolExecutor | None = None

    def run(
        self,
        make: Callable[[Any], Callable[[Task], Outcome]],
        tasks: Iterable[Task],
        receive: Callable[[Outcome], None],
    ) -> None:
        """Do tasks, and pass on each outcome as soon as it is there, in any order."""
        if self.num_workers:
            self._run_in_pool(pickle.dumps(make), tasks, receive)
            return
        work: Callable[[Task], Outcome] | None = None
        for task in tasks:
            with _our_errors():
                work = work or make(self.dataset)
                outcome = work(task)
            receive(outcome)

    def _run_in_pool(
        self, make: bytes, tasks: Iterable[Any], receive: Callable[[Any], None]
    ) -> None:
        pool, todo, waiting = self.started(), iter(tasks), set[Future[Any]]()
        try:
            while True:
                for task in islice(todo, 2 * self.num_workers - len(waiting)):
                    waiting.add(pool.submit(_work, make, task))
                if not waiting:
                    return
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                # Those that failed come last: what the others have done is kept.
                for future in sorted(done, key=lambda each: each.exception() is not None):
                    receive(future.result())
        except BrokenProcessPool as error:
            raise DatasetError(
                "a worker process that read the dataset has died. If memory ran out, use a smaller"
                f" num_workers than {self.num_workers}; num_workers=0 (with build='first')"
                " reads in this process and shows where it dies. What was stored is kept"
            ) from error
        finally:
            for future in waiting:
                future.cancel()

    def started(self) -> ProcessPoolExecutor:
        """The processes: they begin with the first task, and end with the thread that gives it."""
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self.num_workers,
                multiprocessing.get_context(),
                _begin,
                (self.dataset,),
            )
        return self._pool

    def close(self, *, at_once: bool = False) -> None:
        """End the processes, once they have done their tasks or at once. Nothing more is read."""
        if self._pool is None:
            return
        pool, self._pool = self._pool, None
        # It has no other way to end those that are at work, or that wait for ever: for a lock which
        # another held that was killed.
        processes = list((pool._processes or {}).values())
        ending: Any = pool._executor_manager_thread
        pool.shutdown(wait=False, cancel_futures=True)
        left: set[Any] = {process.sentinel for process in processes}
        ends = monotonic() + (0.0 if at_once else _PATIENCE_S)
        while left and (seconds := ends - monotonic()) > 0:
            left -= set(connection.wait(left, seconds))
        for process in processes:
            if process.sentinel in left:
                process.kill()
        if ending is not None:
            ending.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(at_once=error is not None)


def run_tasks(
    work: Callable[[Task], Outcome],
    tasks: Iterable[Task],
    num_workers: int,
    receive: Callable[[Outcome], None],
) -> None:
    """Do tasks of one kind, by processes of their own: see `Workers.run`."""
    with Workers(work, num_workers) as workers:
        workers.run(_as_it_is, tasks, receive)


def threads(count: int) -> ThreadPoolExecutor:
    """A pool whose threads have started: Python would wait for ever for one without memory."""
    pool, started = ThreadPoolExecutor(count), Barrier(count)
    try:
        mmap(-1, count * _THREAD_BYTES).close()
        list(pool.map(lambda _: started.wait(), range(count)))
    except (OSError, RuntimeError) as error:
        started.abort()
        pool.shutdown()
        text = f"no memory for a thread, or too many (`ulimit -v`, `ulimit -u`; {error})"
        raise OSError(errno.ENOMEM, text) from error
    return pool


def check_num_workers(num_workers: int) -> int:
    """Check a number of processes that a user gives, and return it as an int of Python."""
    num_workers = check_integer("num_workers", num_workers, 0, "0 or more processes")
    if num_workers > _MAX_WORKERS:
        raise ValueError(f"num_workers={num_workers}: at most {_MAX_WORKERS} processes")
    return num_workers


@contextmanager
def _our_errors() -> Iterator[None]:
    """Errors of a dataset as those of this package, which can be sent to another process."""
    try:
        yield
    except (MemmapError, OSError):
        raise
    except Exception as error:
        raise DatasetError(describe_error(error)) from error


def _as_it_is(outcome: Any) -> Any:
    return outcome


# In a worker process

#: The id of the process that started this one, and the dataset.
_starter: int | None = None
_dataset: Any = None


def _begin(dataset: Any) -> None:
    """What a worker process does first."""
    global _dataset
    end_with_starter()
    # The process that started this one decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    if multiprocessing.get_start_method() == "fork":
        _open_anew()
    _dataset = dataset


@cache
def _made(make: bytes) -> Callable[[Any], Any]:
    """What a run makes of the dataset, which is kept for more of its tasks."""
    made: Callable[[Any], Any] = pickle.loads(make)(_dataset)
    return made


def _work(make: bytes, task: Any) -> Any:
    try:
        with _our_errors():
            return _made(make)(task)
    finally:
        exit_if_orphaned()


def end_with_starter() -> None:
    """Have this worker process killed when the process that started it ends."""
    global _starter
    _starter = os.getppid()
    # The signal comes when the thread that started this process ends. It waits for the tasks.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It does not come if that thread ended before this call.
    exit_if_orphaned()
    # A worker from a fork server is not a child of its starter, and may be waiting for a task.
    Thread(target=_end_after, args=(_parent().sentinel,), daemon=True).start()


def _end_after(sentinel: int) -> None:
    connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def exit_if_orphaned() -> None:
    """End this process if it is a worker and the process that started it is gone."""
    if _starter is not None and not (os.getppid() == _starter and _parent().is_alive()):
        os.kill(os.getpid(), signal.SIGKILL)


def _parent() -> Any:
    """The process that started this worker, which may be the child of a fork server."""
    return multiprocessing.parent_process()


def _open_anew() -> None:
    """Give this process a position of its own in files that it shares since it was forked."""
    # Where a dataset holds an open file, processes that move the one position that they share would
    # read each other's rows. No process moves it before it has its own.
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # One that may no longer be opened stays shared.
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            if is_file and flags & (os.O_ACCMODE | os.O_PATH) == os.O_RDONLY:
                own = os.open(f"/proc/self/fd/{descriptor}", flags)
                os.lseek(own, os.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
                os.dup2(own, descriptor, inheritable=os.get_inheritable(descriptor))
                os.close(own)
