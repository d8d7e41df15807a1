"""Private names of modules: their dicts, how they were compiled, their device attribute."""

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.device_dtype_mixin import (
    _DeviceDtypeModuleMixin,
    _update_properties,
)
from lightning.fabric.utilities.init import _materialize_distributed_module
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule, innermost_fn

#: What Lightning compiles of a module.
_STEPS = ("forward", "training_step", "validation_step", "test_step", "predict_step")


def set_device_attribute(module: torch.nn.Module, device: torch.device) -> None:
    """Set ``LightningModule.device`` without moving parameters there."""
    _update_properties(module, device=device)


class _SkipBeforeTransfer:
    def __init__(self, module: L.LightningModule, kind: type) -> None:
        self.module = module
        self.kind = kind

    def __call__(self, batch: Any, dataloader_idx: int = 0) -> Any:
        if isinstance(batch, self.kind):
            return batch
        return before_transfer(self.module, batch, dataloader_idx)


def skip_before_transfer(module: L.LightningModule, kind: type) -> None:
    """Let batches of one type skip ``on_before_batch_transfer``, which expects plain ones."""
    module._on_before_batch_transfer = _SkipBeforeTransfer(module, kind)  # type: ignore[method-assign]


def restore_before_transfer(module: L.LightningModule) -> None:
    """Undo `skip_before_transfer`."""
    module.__dict__.pop("_on_before_batch_transfer", None)


def before_transfer(module: L.LightningModule, batch: Any, dataloader_idx: int) -> Any:
    """Run ``on_before_batch_transfer`` of the module, or of its data module, on a plain batch."""
    return type(module)._on_before_batch_transfer(module, batch, dataloader_idx)


def swap_metric_names(module: L.LightningModule, names: Any) -> Any:
    """Set the names of a module's metrics, and return the old ones; None lets Lightning search."""
    before, module._metric_attributes = module._metric_attributes, names
    return before


def module_dicts(
    module: nn.Module,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, nn.Module | None]]:
    """A module's own parameters, buffers and children, by name, including those that are None."""
    return module._parameters, module._buffers, module._modules


#: The attributes that `module_dicts` returns.
MODULE_DICTS = ("_parameters", "_buffers", "_modules")


def lightning_attributes(module: nn.Module, device: torch.device) -> dict[str, Any]:
    """The attributes of a LightningModule that differ in a replica: its device, and the names of
    its metrics, for which Lightning has yet to search."""
    if not isinstance(module, _DeviceDtypeModuleMixin):
        return {}
    return {"_device": device, "_metric_attributes": None}


def is_compiled_inside(module: nn.Module) -> bool:
    """Whether a module has code that was compiled for this object alone."""
    return is_compiled_in_place(module) or isinstance(module, OptimizedModule)


def compiled_steps(module: nn.Module, replica: nn.Module) -> dict[str, Any]:
    """The methods of a compiled LightningModule, compiled for a replica; none if not compiled."""
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


@contextmanager
def uncompiled(module: L.LightningModule) -> Iterator[None]:
    """Meanwhile a compiled LightningModule has its original methods."""
    compiled = {}
    if is_compiled(module):
        compiled = {name: vars(module).pop(name) for name in _STEPS}
        compiled["_compiler_ctx"] = module._compiler_ctx
        module._compiler_ctx = None
    try:
        yield
    finally:
        vars(module).update(compiled)


def compile_as(module: L.LightningModule, other: L.LightningModule) -> None:
    """Compile a module like another one of its class, if only the other is compiled."""
    context = other._compiler_ctx
    if context is None or is_compiled(module):
        return
    originals = {f"original_{name}": getattr(module, name) for name in _STEPS}
    vars(module).update(compiled_steps(other, module))
    module._compiler_ctx = {**context, **originals}


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether ``compile()`` of a module was called, which does not reach copies of it."""
    return module._compiled_call_impl is not None


def materialize(module: nn.Module, device: torch.device) -> None:
    """Allocate and reset a module on a device, if any tensor of it is on the meta device.

    Modules without such a tensor stay as they are.
    """
    _materialize_distributed_module(module, device)


def is_compiled(module: nn.Module) -> bool:
    """Whether the whole module was given to the Trainer as ``torch.compile(module)``."""
    return getattr(module, "_compiler_ctx", None) is not None
