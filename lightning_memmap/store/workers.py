"""Work on a dataset in worker processes, which end when the process that started them ends."""

import ctypes
import fcntl
import multiprocessing
import os
import pickle
import signal
import stat
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from threading import Thread
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset
from typing_extensions import Self

from lightning_memmap.errors import DatasetError, MemmapError, check_integer, describe_error

Task = TypeVar("Task")
Outcome = TypeVar("Outcome")

_PR_SET_PDEATHSIG = 1
_MAX_WORKERS = 1024
#: In a worker, the id of the process that started it.
_starter: int | None = None


class Workers:
    """Processes that read a dataset, or with none of them this process.

    They start with the first task, serve all that follow, and end with the ``with`` block. A build
    has one such block, for what it reads first and for what it writes: to start, a process may have
    to import torch and to open the dataset's files.

    Args:
        dataset: The dataset, or what else all tasks need. It is sent to each process once.
        num_workers: Processes; with 0, this one does all tasks.
    """

    def __init__(self, dataset: Any, num_workers: int) -> None:
        self.dataset = dataset
        self.num_workers = num_workers
        self._orders, self._start = _Orders(), _Start()
        # torch would draw the workers' seed from the global generator: the run that builds a store
        # would then have other random numbers than runs that find it built.
        generator = torch.Generator()
        generator.seed()
        self._loader: Iterable[Any] = DataLoader(
            _Worker(dataset),
            batch_size=None,
            sampler=self._orders,
            num_workers=num_workers,
            collate_fn=_as_it_is,
            generator=generator,
            worker_init_fn=self._start,
            in_order=False,
            persistent_workers=num_workers > 0,
        )

    def run(
        self,
        make: Callable[[Any], Callable[[Task], Outcome]],
        tasks: Iterable[Task],
        receive: Callable[[Outcome], None],
    ) -> None:
        """Do tasks, and pass on each outcome as soon as it is there, in any order.

        Args:
            make: Makes of the dataset what does one task. It is called once in each process that
                has a task. In worker processes what it makes must not depend on what other tasks
                did, and it must be possible to pickle it.
            tasks: The tasks, taken one by one, at most two ahead for each worker.
            receive: Called in this process with each outcome.

        Raises:
            MemmapError: A task raised it.
            OSError: A task raised it.
            DatasetError: A task raised any other error.
        """
        self._orders.take(pickle.dumps(make) if self.num_workers else make, tasks)
        self._start.positions = _positions()
        for outcome in self._loader:
            if isinstance(outcome, _Failure):
                outcome.reraise()
            receive(outcome)

    def close(self) -> None:
        """End the processes. Nothing more is read."""
        # The loader ends them when it is no longer there.
        self._loader = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the processes.

        Raises:
            DatasetError: The block has failed since one of them was killed.
        """
        self.close()
        if trace is not None and self.num_workers:
            # Its frames, too, keep the loader's iterator, and with it the workers that are left.
            traceback.clear_frames(trace)
        death = _worker_death(error) if isinstance(error, Exception) else None
        if death is not None:
            raise DatasetError(
                f"a worker process that read the dataset has died ({death}). If memory ran out, use"
                f" a smaller num_workers than {self.num_workers}; num_workers=0 reads in this"
                " process and shows where it dies. What was stored is kept"
            ) from error


def run_tasks(
    work: Callable[[Task], Outcome],
    tasks: Iterable[Task],
    num_workers: int,
    receive: Callable[[Outcome], None],
) -> None:
    """Do tasks of one kind, by processes of their own: see `Workers.run`.

    Args:
        work: Does one task. It is sent to each process once.
        tasks: The tasks.
        num_workers: Worker processes; with 0, this process does all tasks.
        receive: Called in this process with each outcome.

    Raises:
        MemmapError: A task raised it.
        OSError: A task raised it.
        DatasetError: A task raised any other error, or its process was killed.
    """
    with Workers(work, num_workers) as workers:
        workers.run(_as_it_is, tasks, receive)


def _worker_death(error: BaseException | None) -> RuntimeError | None:
    """The error that torch raises for a worker that was killed, if it is the cause of this one.

    torch has no class for it, and raises it in a signal handler: anywhere in the loop, even in the
    middle of code that then fails in another way.
    """
    while error is not None:
        if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker"):
            return error
        error = error.__cause__ or error.__context__
    return None


def check_num_workers(num_workers: int) -> int:
    """Check a number of processes that a user gives.

    Args:
        num_workers: The value.

    Returns:
        The value as an int of Python.

    Raises:
        TypeError: It is not an integer.
        ValueError: It is below 0, or more processes than any machine could run.
    """
    num_workers = check_integer("num_workers", num_workers, 0, "0 or more processes")
    if num_workers > _MAX_WORKERS:
        raise ValueError(f"num_workers={num_workers}: at most {_MAX_WORKERS} processes")
    return num_workers


def end_with_starter(worker_id: int) -> None:
    """Have this worker process killed when the process that started it ends.

    Args:
        worker_id: Not used; the ``DataLoader`` passes it.
    """
    global _starter
    parent = multiprocessing.parent_process()
    assert parent is not None
    _starter = os.getppid()
    if sys.platform == "linux":
        # The signal comes when the thread that started this process ends. It waits for the tasks.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The signal does not come if that thread ended before this call.
    if _starter != parent.pid and multiprocessing.get_start_method() != "forkserver":
        os.kill(os.getpid(), signal.SIGKILL)
    exit_if_orphaned()
    # A worker from a fork server is not a child of its starter, and may be waiting for a task.
    Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()


@dataclass
class _Start:
    """What a worker process does first.

    Args:
        positions: Where this process stands in files that it has open for reading, by descriptor.
    """

    positions: dict[int, int] = field(default_factory=dict)

    def __call__(self, worker_id: int) -> None:
        end_with_starter(worker_id)
        if multiprocessing.get_start_method() == "fork":
            _open_anew(self.positions)


def _positions() -> dict[int, int]:
    """Where this process stands in the files that it has open for reading alone, by descriptor."""
    found: dict[int, int] = {}
    if sys.platform != "linux":
        return found
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # The listing's own is closed by now.
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            if is_file and flags & (os.O_ACCMODE | os.O_PATH) == os.O_RDONLY:
                found[descriptor] = os.lseek(descriptor, 0, os.SEEK_CUR)
    return found


def _open_anew(positions: dict[int, int]) -> None:
    """Give this process a position of its own in files that it shares since it was forked.

    Where a dataset holds an open file, processes that move the one position that they share would
    read each other's rows.
    """
    for descriptor, position in positions.items():
        with suppress(OSError):  # One that may no longer be opened stays shared.
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            own = os.open(f"/proc/self/fd/{descriptor}", flags)
            os.lseek(own, position, os.SEEK_SET)
            os.dup2(own, descriptor, inheritable=os.get_inheritable(descriptor))
            os.close(own)


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def exit_if_orphaned() -> None:
    """End this process if it is a worker and the process that started it is gone."""
    parent = multiprocessing.parent_process()
    if _starter is not None and (
        os.getppid() != _starter or parent is None or not parent.is_alive()
    ):
        os.kill(os.getpid(), signal.SIGKILL)


def _as_it_is(outcome: Any) -> Any:
    return outcome


class _WorkerTracebackError(Exception):
    """The traceback of a worker process as text, shown as the cause of the error."""


@dataclass(frozen=True)
class _Failure:
    """The error of a task, in a form that can be sent to another process, whatever was raised."""

    error: MemmapError | OSError
    traceback: str

    def reraise(self) -> None:
        raise self.error from _WorkerTracebackError(f"\n{self.traceback}")


class _Order(NamedTuple):
    """One task, and how to make what does it: pickled for another process."""

    number: int
    make: Any
    task: Any


class _Orders:
    """What is to be done next."""

    def __init__(self) -> None:
        self._number = 0
        self._orders: Iterable[_Order] = ()

    def take(self, make: Any, tasks: Iterable[Any]) -> None:
        """Take tasks, which are handed out one by one."""
        number = self._number = self._number + 1
        self._orders = (_Order(number, make, task) for task in tasks)

    def __iter__(self) -> Iterator[_Order]:
        return iter(self._orders)


class _Worker(Dataset[Any]):
    """Item ``order`` is the outcome of its task, or its failure."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._number = 0
        self._work: Callable[[Any], Any] = _as_it_is

    def __getitem__(self, order: _Order) -> Any:
        exit_if_orphaned()
        try:
            if order.number != self._number:
                make = pickle.loads(order.make) if isinstance(order.make, bytes) else order.make
                self._work, self._number = make(self._dataset), order.number
            return self._work(order.task)
        except (MemmapError, OSError) as error:
            return _Failure(error.with_traceback(None), traceback.format_exc())
        except Exception as error:
            return _Failure(DatasetError(describe_error(error)), traceback.format_exc())
