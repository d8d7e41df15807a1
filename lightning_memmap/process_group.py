"""Leaving the process group at the end of a program."""

import atexit
from functools import cache

import torch.distributed as dist


@cache
def leave_gloo_at_exit() -> None:
    """Register the process to leave its gloo process group before the interpreter ends.

    Lightning does this for NCCL alone. Threads of gloo that outlive the interpreter occasionally
    abort the process (SIGABRT), after all of its work is done. Calling this twice has no effect.
    """
    atexit.register(_leave_gloo)


def _leave_gloo() -> None:
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()
