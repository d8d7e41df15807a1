"""Private names around DDP."""

from collections.abc import Iterable
from typing import Any


def ignore_in_ddp(module: Any, names: Iterable[str]) -> None:
    """Let DDP send none of these parameters and buffers of a module."""
    name = "_ddp_params_and_buffers_to_ignore"
    setattr(module, name, {*getattr(module, name, ()), *names})


def ddp_option(strategy: Any, name: str, default: Any) -> Any:
    """Return an option that a strategy passes to DDP."""
    return getattr(strategy, "_ddp_kwargs", {}).get(name, default)
