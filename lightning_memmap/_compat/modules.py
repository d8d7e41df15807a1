"""Private names of modules: how they were compiled."""

import types
from typing import Any

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule, innermost_fn

#: What Lightning compiles of a module.
_STEPS = ("forward", "training_step", "validation_step", "test_step", "predict_step")


def is_compiled_inside(module: nn.Module) -> bool:
    """Whether a module has code that was compiled for this object alone."""
    return module._compiled_call_impl is not None or isinstance(module, OptimizedModule)


def compiled_steps(module: nn.Module, replica: nn.Module) -> dict[str, Any]:
    """The methods of a compiled LightningModule, compiled for a replica."""
    context = getattr(module, "_compiler_ctx", None)
    if context is None:
        return {}
    compiled = {}
    for name in _STEPS:
        # A module that is fitted again was compiled before: this unwraps the first compilation.
        original = innermost_fn(context[f"original_{name}"])
        if isinstance(original, types.MethodType):
            original = types.MethodType(original.__func__, replica)
        compiled[name] = context["dynamo_ctx"](original)
    return compiled
