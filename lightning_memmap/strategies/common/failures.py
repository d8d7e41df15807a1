"""Passing the error of the first process that fails on to the others, which only lose contact."""

from datetime import timedelta

import torch.distributed as dist

from lightning_memmap._compat.ddp import rendezvous_store
from lightning_memmap.errors import describe_error

#: How long a process that has failed waits for the store in which failures are noted.
_PATIENCE = timedelta(seconds=5)
#: Part of gloo's error for a collective with a process that has ended.
_IS_GONE = "by peer"


def first_failure(run: int, error: Exception) -> str | None:
    """Note an error in the store of all processes, unless another one has failed before.

    Args:
        run: The number of the run in this program, the same on all processes.
        error: The error of this process.

    Returns:
        A sentence to add to the error: which rank failed before, and its error, or that a process
        has ended without an error. None if there is nothing to add.
    """
    described = describe_error(error)
    ours = f"rank {dist.get_rank()}: {described}"
    first = ""
    is_gone = _IS_GONE in ours
    store = rendezvous_store()
    if store is not None:
        try:
            store.set_timeout(_PATIENCE)
            key = f"lightning_memmap/failure/{run}"
            # A process that lost contact with another one isn't the first to fail.
            noted = store.check([key]) if is_gone else store.compare_set(key, "", ours)
            first = (store.get(key) if is_gone and noted else noted or b"").decode()
        except RuntimeError:
            # The process with the store has ended.
            first = ""
    # Several may have raised the same.
    if first and first.partition(": ")[2] != described:
        return f"another process failed before: {first}"
    if is_gone:
        return "another process of the run has ended; its own error is in what it printed"
    return None
