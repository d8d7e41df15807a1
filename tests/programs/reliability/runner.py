"""Processes with one thread that have imported everything: forked from one that did."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.context import ForkServerContext

_PRELOAD = ["tests.programs.reliability.preload"]


def fork_server() -> ForkServerContext:
    """Where processes come from that may fork again: call `fork_from_here` in them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def fork_from_here() -> None:
    """Let the children of this process, such as the workers of a build, be forks of it, and not
    come from another fork server."""
    multiprocessing.set_start_method("fork", force=True)


def runners(num_jobs: int) -> ProcessPoolExecutor:
    """A pool of such processes, to run cases in."""
    return ProcessPoolExecutor(num_jobs, mp_context=fork_server(), initializer=fork_from_here)
