"""Work on a dataset in worker processes, which end when the process that started them ends."""

import ctypes
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import wait
from threading import Thread
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_memmap.errors import DatasetError, MemmapError, check_integer

Task = TypeVar("Task")
Outcome = TypeVar("Outcome")

_PR_SET_PDEATHSIG = 1
_MAX_WORKERS = 1024
#: In a worker, the id of the process that started it.
_starter: int | None = None


def run_tasks(
    work: Callable[[Task], Outcome],
    tasks: Iterable[Task],
    num_workers: int,
    receive: Callable[[Outcome], None],
) -> None:
    """Do tasks, and pass on each outcome as soon as it is there, in any order.

    Args:
        work: Does one task. In worker processes it must not depend on what other tasks did.
        tasks: The tasks, taken one by one, at most two ahead for each worker.
        num_workers: Worker processes; with 0, this process does all tasks.
        receive: Called in this process with each outcome.

    Raises:
        MemmapError: A task raised it.
        OSError: A task raised it.
        DatasetError: A task raised any other error, or its process was killed.
    """
    # torch would draw the workers' seed from the global generator: the run that builds a store
    # would then have other random numbers than runs that find it built.
    generator = torch.Generator()
    generator.seed()
    loader: DataLoader[Any] = DataLoader(
        _Tasks(work),
        batch_size=None,
        sampler=tasks,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        generator=generator,
        worker_init_fn=end_with_starter,
        in_order=False,
    )
    try:
        for outcome in loader:
            if isinstance(outcome, _Failure):
                outcome.reraise()
            receive(outcome)
    except Exception as error:
        death = _worker_death(error)
        if death is None:
            raise
        raise DatasetError(
            f"a worker process that read the dataset has died ({death}). If memory ran out, use a"
            f" smaller num_workers than {num_workers}; num_workers=0 reads in this process and"
            " shows where it dies. What was stored is kept"
        ) from error


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


def describe_error(error: Exception) -> str:
    """Return an error of a dataset as text, even where its own message raises.

    Args:
        error: What the dataset raised.

    Returns:
        The name of its class and its message.
    """
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as other:
        return f"{type(error).__name__}, whose message raised {type(other).__name__}"


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


class _Tasks(Dataset[Any], Generic[Task, Outcome]):
    """Item ``task`` is the outcome of the task, or its failure."""

    def __init__(self, work: Callable[[Task], Outcome]) -> None:
        self._work = work

    def __getitem__(self, task: Task) -> Outcome | _Failure:
        exit_if_orphaned()
        try:
            return self._work(task)
        except (MemmapError, OSError) as error:
            return _Failure(error.with_traceback(None), traceback.format_exc())
        except Exception as error:
            return _Failure(DatasetError(describe_error(error)), traceback.format_exc())
