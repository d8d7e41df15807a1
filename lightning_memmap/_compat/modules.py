"""Private names of modules: how they were compiled, their device attribute."""

import types
from typing import Any

import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.init import _materialize_distributed_module
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule, innermost_fn

#: What Lightning compiles of a module.
_STEPS = ("forward", "training_step", "validation_step", "test_step", "predict_step")


def set_device_attribute(module: torch.nn.Module, device: torch.device) -> None:
    """Set ``LightningModule.device`` without moving parameters there.

    Args:
        module: A LightningModule; its submodules that have such an attribute are set, too.
        device: The new value.
    """
    _update_properties(module, device=device)


def is_compiled_inside(module: nn.Module) -> bool:
    """Whether a module has code that was compiled for this object alone.

    Args:
        module: A module or submodule.

    Returns:
        True after ``module.compile()``, and for what ``torch.compile(submodule)`` returned.
    """
    return module._compiled_call_impl is not None or isinstance(module, OptimizedModule)


def compiled_steps(module: nn.Module, replica: nn.Module) -> dict[str, Any]:
    """The methods of a compiled LightningModule, compiled for a replica.

    Args:
        module: The LightningModule that may be compiled.
        replica: The object that the methods are bound to.

    Returns:
        By name, ``forward`` and the four steps; empty if the module is not compiled.
    """
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


def materialize(module: nn.Module, device: torch.device) -> None:
    """Allocate and reset a module on a device, if any tensor of it is on the meta device.

    All of its tensors then lose their values and are initialised by ``reset_parameters`` of each
    submodule that has one. Lightning warns of the others, whose memory is uninitialised. Modules
    without a tensor on the meta device stay as they are.

    Args:
        module: The module.
        device: The new device of all of its tensors.
    """
    _materialize_distributed_module(module, device)


def is_compiled(module: nn.Module) -> bool:
    """Whether the whole module was given to the Trainer as ``torch.compile(module)``.

    Args:
        module: The module without its wrapper; any other module than a LightningModule is not
            compiled in this sense.

    Returns:
        True if it is a LightningModule that was compiled so.
    """
    return getattr(module, "_compiler_ctx", None) is not None
