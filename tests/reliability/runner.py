"""The processes that run the cases: forked from one that has imported everything."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

_PRELOAD = ["tests.reliability.kinds"]


def runners(num_jobs: int) -> ProcessPoolExecutor:
    """A pool of processes with one thread each, in which cases may fork.

    Args:
        num_jobs: Number of processes.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return ProcessPoolExecutor(num_jobs, mp_context=context, initializer=_begin)


def _begin() -> None:
    # A process of a fork server would have its own children, the workers of builds, from another.
    multiprocessing.set_start_method("fork", force=True)
