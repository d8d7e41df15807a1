"""A process that fails tells the others why, which would only see that it has ended."""

from datetime import timedelta

import torch.distributed as dist

from lightning_memmap._compat.ddp import rendezvous_store
from lightning_memmap.errors import describe_error

#: How long a process that has failed waits for what others have noted, or for a place to note it.
_PATIENCE = timedelta(seconds=5)
#: In the error of gloo for a collective with a process that has ended.
_IS_GONE = "by peer"


def first_failure(run: int, error: Exception) -> str | None:
    """Note an error where all processes can see it, unless another one has failed before.

    Args:
        run: The number of the run in this program, the same on all processes.
        error: The error of this process.

    Returns:
        What to know beside the error: the rank that failed before and its error, or that one has
        ended without any. None if there is nothing more.
    """
    ours, first = f"rank {dist.get_rank()}: {describe_error(error)}", ""
    is_gone = _IS_GONE in ours
    store = rendezvous_store()
    if store is not None:
        try:
            store.set_timeout(_PATIENCE)
            key = f"lightning_memmap/failure/{run}"
            # What ended because another one did is not the first.
            noted = store.check([key]) if is_gone else store.compare_set(key, "", ours)
            first = (store.get(key) if is_gone and noted else noted or b"").decode()
        except RuntimeError:
            # The process that has the store has ended, and what it knew.
            first = ""
    if first and first != ours:
        return f"another process failed before: {first}"
    if is_gone:
        return "another process of the run has ended; its own error is in what it printed"
    return None
