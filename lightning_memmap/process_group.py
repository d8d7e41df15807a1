"""The process group at the end of a program."""

import atexit
from functools import cache

import torch.distributed as dist


@cache
def leave_gloo_at_exit() -> None:
    """Leave a process group of gloo before the interpreter goes, at the exit of this program.

    Lightning does that for NCCL alone. Threads of gloo that are there when the interpreter is gone
    abort the process (SIGABRT) now and then, after all of its work was done.
    """
    atexit.register(_leave_gloo)


def _leave_gloo() -> None:
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()
