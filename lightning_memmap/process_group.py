"""Leaving the process group at the end of a program."""

import atexit
from functools import cache

import torch.distributed as dist


@cache
def leave_group_at_exit() -> None:
    """Register the process to leave its process group before the interpreter ends.

    Lightning does this for the backend ``nccl`` alone, and not for ``gloo`` or
    ``cpu:gloo,cuda:nccl``. Threads of gloo that outlive the interpreter occasionally abort the
    process (SIGABRT), after all of its work is done. Calling this twice has no effect.
    """
    atexit.register(_leave_group)


def _leave_group() -> None:
    if dist.is_available() and dist.is_initialized() and dist.get_backend() != "nccl":
        dist.destroy_process_group()
