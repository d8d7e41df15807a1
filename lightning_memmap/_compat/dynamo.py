"""Private names of torch.compile, used without importing it."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn


def compiler_context(module: Any) -> Mapping[str, Any]:
    """Return what Lightning keeps of a module that was compiled; empty for other modules."""
    return getattr(module, "_compiler_ctx", None) or {}


def original_function(function: Callable[..., Any]) -> Any:
    """Return the function that was compiled, however often it was compiled."""
    while (wrapped := getattr(function, "_torchdynamo_orig_callable", None)) is not None:
        function = wrapped
    return function


def original_backend(backend: Any) -> Any:
    """Return the backend passed to torch.compile, without its wrappers."""
    while (wrapped := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = wrapped
    return backend


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module was compiled by itself, in place or as a wrapper around it."""
    if getattr(module, "_compiled_call_impl", None) is not None:
        return True
    # Without the import of this module, which takes a second, nothing was compiled.
    wrapper = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    return isinstance(module, wrapper)
