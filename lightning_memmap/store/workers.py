"""Worker processes that read a dataset and end with the process that started them; threads."""

import ctypes
import errno
import fcntl
import multiprocessing
import os
import pickle
import signal
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, partial
from itertools import islice
from mmap import mmap
from multiprocessing import connection
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]  # unnamed
from multiprocessing.util import Finalize
from threading import Barrier, Thread
from time import monotonic
from typing import Any, TypeAlias, TypeVar

import torch
from typing_extensions import Self

from lightning_memmap.errors import (
    DatasetError,
    MemmapError,
    check_integer,
    describe_error,
    with_article,
)
from lightning_memmap.integers import Integers

Task = TypeVar("Task")
Outcome = TypeVar("Outcome")
Connection: TypeAlias = "connection.Connection[Any, Any]"
#: Rows in a range of step 1, or in any order, int64 of shape (n,).
RowIndices = range | Integers

#: Tasks of each process: one that runs, and one that waits.
_TASKS_PER_PROCESS = 2
#: Seconds of work in one range: short enough for progress bar and journal, long enough to be cheap.
_RANGE_S = 1.0
#: Ranges get smaller towards the end, so that all workers end together, down to this.
_MIN_RANGE_S = 0.05
_PR_SET_PDEATHSIG = 1
_MAX_WORKERS = 1024
#: Added to the niceness of processes that run during a training.
_NICENESS = 5
#: How long idle processes may take to end.
_PATIENCE_S = 5.0
#: How often silent processes are checked.
_CHECK_INTERVAL_S = 1.0
#: The largest pickled exception that is sent.
_MAX_ERROR_BYTES = 2**16
#: Memory reserved for each thread, so that a shortage raises here instead of hanging the pool.
_THREAD_BYTES = 16 * 2**20


class Workers:
    """Processes that read a dataset. With ``num_workers=0``, this process reads it."""

    def __init__(self, dataset: Any, num_workers: int) -> None:
        self.dataset = dataset
        self.num_workers = num_workers
        self._processes = list[_Process]()
        # A program doesn't wait for them when it ends.
        self._end = Finalize(self, _end_all, (self._processes,), exitpriority=0)

    def run(
        self,
        make: Callable[[Any], Callable[[Task], Outcome]],
        tasks: Iterable[Task],
        receive: Callable[[Task, Outcome], None],
    ) -> None:
        """Run tasks, and call ``receive`` with each task and its small outcome, in any order."""
        if self.num_workers:
            self._run_in_processes(pickle.dumps(make), iter(tasks), receive)
            return
        work: Callable[[Task], Outcome] | None = None
        for task in tasks:
            with _converted_errors():
                work = work or make(self.dataset)
                outcome = work(task)
            receive(task, outcome)

    def run_one(self, make: Callable[[Any], Callable[[Task], Outcome]], task: Task) -> Outcome:
        """Run one task, and return its outcome."""
        outcomes = list[Outcome]()
        self.run(make, [task], lambda _, outcome: outcomes.append(outcome))
        return outcomes[0]

    def _run_in_processes(
        self, make: bytes, tasks: Iterator[Any], receive: Callable[[Any, Any], None]
    ) -> None:
        for number, task in enumerate(islice(tasks, _TASKS_PER_PROCESS * self.num_workers)):
            self._process(number % self.num_workers).submit(make, task)
        while busy := {worker.connection: worker for worker in self._processes if worker.tasks}:
            errors = list[BaseException]()
            ready = connection.wait(busy, _CHECK_INTERVAL_S)
            # The connection of a dead worker may be kept open by its forks.
            dead = (worker for worker in busy.values() if not (ready or worker.process.is_alive()))
            for process in (*(worker for key, worker in busy.items() if key in ready), *dead):
                outcome = process.outcome()
                task = process.tasks.popleft()
                if isinstance(outcome, BaseException):
                    errors.append(outcome)
                    continue
                receive(task, outcome)
                for another in islice(tasks, 1):
                    process.submit(make, another)
            # The outcomes of the other workers are kept.
            if errors:
                raise errors[0]

    def start(self) -> None:
        """Start all processes. They end with the thread that starts them."""
        self._process(self.num_workers - 1)

    def _process(self, index: int) -> "_Process":
        """Return one of the processes. It is started first, and works while the next one starts."""
        while len(self._processes) <= index:
            self._processes.append(_Process(self.dataset, self.num_workers))
        return self._processes[index]

    def close(self, *, at_once: bool = False) -> None:
        """End the processes, after their tasks or at once. No more outcomes are read."""
        _end_all(self._processes, 0.0 if at_once else _PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: object, error: object, trace: object) -> None:
        self.close(at_once=error is not None)


class _Process:
    """A worker process and its tasks."""

    def __init__(self, dataset: Any, num_workers: int) -> None:
        self.tasks = deque[Any]()
        self._num_workers = num_workers
        self.connection, other = multiprocessing.Pipe()
        self.process = multiprocessing.Process(
            target=_serve, args=(other, self.connection, dataset)
        )
        try:
            self.process.start()
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            method = multiprocessing.get_start_method()
            raise DatasetError(
                f"the dataset, {with_article(type(dataset).__name__)}, cannot be sent to worker"
                f" processes, which are started by {method!r}: {describe_error(error)}: open files"
                " and connections when a row is first read, define classes and functions in a"
                " module, or use num_workers=0 (with build='first')"
            ) from error
        other.close()

    def submit(self, make: bytes, task: Any) -> None:
        """Send a task."""
        self.send((make, task))
        self.tasks.append(task)

    def send(self, message: Any) -> None:
        """Send a message, or None to end the process."""
        with self._raise_if_dead():
            self.connection.send(message)

    def outcome(self) -> Any:
        """Receive the outcome of the oldest task, which may be an error."""
        with self._raise_if_dead():
            if not (self.connection.poll() or self.process.is_alive()):
                raise EOFError
            return self.connection.recv()

    @contextmanager
    def _raise_if_dead(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError) as error:
            raise DatasetError(
                "a worker process that read the dataset has died. If memory ran out, use a smaller"
                f" num_workers than {self._num_workers}; num_workers=0 (with build='first') reads"
                " in this process and shows where it dies. Rows that were stored are kept"
            ) from error


def _end_all(processes: list[_Process], patience_s: float = 0.0) -> None:
    """End processes. Kill those that don't end in time, such as for the lock of a killed one."""
    ending = processes[:]
    deadline = monotonic() + patience_s
    processes.clear()
    # A busy worker's pipe may be full; do not block on it.
    for worker in ending if patience_s else ():
        with suppress(DatasetError):  # It has ended.
            worker.send(None)
    for worker in ending:
        worker.process.join(max(0.0, deadline - monotonic()))
        worker.process.kill()
        worker.process.join()
        worker.process.close()
        worker.connection.close()


def make_task_runner(
    work: Callable[..., Outcome], *arguments: Any
) -> Callable[[Any], Callable[[Any], Outcome]]:
    """Return a ``make`` for `Workers.run` that calls ``work(*arguments, dataset, task)``."""
    return partial(partial, work, *arguments)


class RowRanges:
    """Divides rows into ranges of about a second of work, by the speed of earlier ranges."""

    def __init__(
        self,
        todo: Iterable[RowIndices],
        *,
        max_rows: int,
        num_workers: int,
        row_s: float,
        advance: Callable[[int], None] = lambda num_rows: None,
    ) -> None:
        self._todo = list(todo)
        self._max_rows = max_rows
        self._num_workers = num_workers
        self._row_s = row_s
        self._advance = advance
        self._num_left = sum(map(len, self._todo))

    def __iter__(self) -> Iterator[RowIndices]:
        for rows in self._todo:
            while len(rows):
                block = rows[: self._next_count()]
                self._num_left -= len(block)
                yield block
                rows = rows[len(block) :]

    def record(self, rows: RowIndices, duration_s: float) -> None:
        """Record how long rows took."""
        self._row_s = (self._row_s + duration_s / len(rows)) / 2
        self._advance(len(rows))

    def _next_count(self) -> int:
        row_s = max(self._row_s, 1e-9)
        count = _RANGE_S / row_s
        if self._num_workers > 1:
            # Each worker has two ranges. The same number of rows is left for faster workers.
            fair_count = self._num_left / (4 * self._num_workers)
            count = min(count, max(fair_count, _MIN_RANGE_S / row_s))
        return max(1, min(self._max_rows, int(count)))


def start_threads(count: int) -> ThreadPoolExecutor:
    """Return a pool whose threads run. Without memory for one, Python would wait forever."""
    pool = ThreadPoolExecutor(count)
    started = Barrier(count)
    try:
        mmap(-1, count * _THREAD_BYTES).close()
        list(pool.map(lambda _: started.wait(), range(count)))
    except (OSError, RuntimeError) as error:
        started.abort()
        pool.shutdown()
        text = f"no memory for a thread, or too many (`ulimit -v`, `ulimit -u`; {error})"
        raise OSError(errno.ENOMEM, text) from error
    return pool


def lower_priority() -> None:
    """Lower the priority of this thread and of threads that it starts, below that of training."""
    # On Linux this holds for a thread, elsewhere for the process.
    os.nice(_NICENESS)


def check_num_workers(num_workers: int) -> int:
    """Check the num_workers argument of a user, and return it as an int."""
    num_workers = check_integer("num_workers", num_workers, 0, "0 or more processes")
    if num_workers > _MAX_WORKERS:
        raise ValueError(f"num_workers={num_workers}: at most {_MAX_WORKERS} processes")
    return num_workers


@contextmanager
def _converted_errors() -> Iterator[None]:
    """Convert errors of a dataset to errors of this package, which can be pickled."""
    try:
        yield
    except (MemmapError, OSError):
        raise
    except Exception as error:
        raise DatasetError(describe_error(error)) from error


# In a worker process


def _serve(parent: Connection, theirs: Connection, dataset: Any) -> None:
    """Run the tasks of a worker process."""
    # Or else it would never hear that the other process has ended.
    theirs.close()
    end_with_starter()
    # The process that started this one decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    lower_priority()
    if multiprocessing.get_start_method() == "fork":
        _reopen_files()
    #: The work of a run is made once for all of its tasks.
    work_of = cache(lambda make: pickle.loads(make)(dataset))
    with suppress(EOFError, ConnectionError):
        while (message := parent.recv()) is not None:
            make, task = message
            try:
                with _converted_errors():
                    outcome = work_of(make)(task)
            except BaseException as error:
                outcome = _make_sendable(error)
            parent.send(outcome)


def _make_sendable(error: BaseException) -> Any:
    """Convert an error to one that can be sent. A large one might block both ends of the pipe."""
    with suppress(Exception):
        with_traceback = ExceptionWithTraceback(error, error.__traceback__)
        if len(pickle.dumps(with_traceback)) < _MAX_ERROR_BYTES:
            return with_traceback
    text = str(error) if isinstance(error, MemmapError) else describe_error(error)
    return DatasetError(f"{text[: _MAX_ERROR_BYTES // 64]}...")


def end_with_starter() -> None:
    """Have this worker process killed when the process that started it ends."""
    # It may be the child of a fork server.
    parent: Any = multiprocessing.parent_process()
    starter = os.getppid()
    # The signal comes when the thread that started this process ends. It waits for the tasks.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It does not come if that thread ended before this call.
    if os.getppid() != starter or not parent.is_alive():
        os.kill(os.getpid(), signal.SIGKILL)
    # A worker from a fork server is not a child of its starter, and may be waiting for a task.
    Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def _reopen_files() -> None:
    """Open the files again that this process shares since it was forked.

    Otherwise the processes would share one position in each open file of the dataset, and read each
    other's rows.
    """
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # One that may no longer be opened stays shared.
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            if is_file and flags & (os.O_ACCMODE | os.O_PATH) == os.O_RDONLY:
                new = os.open(f"/proc/self/fd/{descriptor}", flags)
                os.lseek(new, os.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
                os.dup2(new, descriptor, inheritable=os.get_inheritable(descriptor))
                os.close(new)
