"""Private names around DDP, and of process groups."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

#: The attribute of a module that names the parameters and buffers which DDP ignores.
IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"


def ddp_option(strategy: Any, name: str, default: Any) -> Any:
    """Return an option that a strategy passes to DDP."""
    return getattr(strategy, "_ddp_kwargs", {}).get(name, default)


@contextmanager
def ddp_options(strategy: Any, **options: Any) -> Iterator[None]:
    """Override options that a strategy passes to DDP within the context."""
    before = getattr(strategy, "_ddp_kwargs", {})
    strategy._ddp_kwargs = {**before, **options}
    try:
        yield
    finally:
        strategy._ddp_kwargs = before


def begin_static_graph(strategy: Any) -> None:
    """Let Lightning treat the next step as the first one of a static graph."""
    strategy._pl_static_graph_delay_done = False


def rendezvous_store() -> Any:
    """Return the store by which the processes of the default group met; None if unknown."""
    module = getattr(dist, "distributed_c10d", None)
    return getattr(module, "_get_default_store", lambda: None)()
