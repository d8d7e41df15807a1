"""Names of modules: their parts, how they were compiled, what they are told of devices."""

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


def tell_device(module: torch.nn.Module, device: torch.device) -> None:
    """Let ``LightningModule.device`` be a device without moving parameters there."""
    _update_properties(module, device=device)


class _Divert:
    def __init__(self, module: L.LightningModule, kind: type) -> None:
        self.module = module
        self.kind = kind

    def __call__(self, batch: Any, dataloader_idx: int = 0) -> Any:
        if isinstance(batch, self.kind):
            return batch
        return before_transfer(self.module, batch, dataloader_idx)


def divert_batches(module: L.LightningModule, kind: type) -> None:
    """Keep batches of a type from ``on_before_batch_transfer``, which is for plain ones."""
    module._on_before_batch_transfer = _Divert(module, kind)  # type: ignore[method-assign]


def end_diversion(module: L.LightningModule) -> None:
    """Undo `divert_batches`."""
    module.__dict__.pop("_on_before_batch_transfer", None)


def before_transfer(module: L.LightningModule, batch: Any, dataloader_idx: int) -> Any:
    """Run ``on_before_batch_transfer`` of the module, or of its data module, on a plain batch."""
    return type(module)._on_before_batch_transfer(module, batch, dataloader_idx)


def swap_metric_names(module: L.LightningModule, names: Any) -> Any:
    """Exchange the names by which a module knows its metrics; they are found anew where None."""
    before, module._metric_attributes = module._metric_attributes, names
    return before


def own_parts(
    module: nn.Module,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, nn.Module | None]]:
    """The parameters, buffers and children of a module alone, by name, None included."""
    return module._parameters, module._buffers, module._modules


#: The attributes that `own_parts` returns.
PARTS = ("_parameters", "_buffers", "_modules")


def lightning_attributes(module: nn.Module, device: torch.device) -> dict[str, Any]:
    """What a replica of a module on a device keeps otherwise: where it is, which
    ``module.device`` tells, and that it has yet to learn the names of its metrics."""
    if not isinstance(module, _DeviceDtypeModuleMixin):
        return {}
    return {"_device": device, "_metric_attributes": None}


def is_compiled_inside(module: nn.Module) -> bool:
    """Whether a module holds code that was compiled for this very object."""
    return is_compiled_in_place(module) or isinstance(module, OptimizedModule)


def compiled_steps(module: nn.Module, replica: nn.Module) -> dict[str, Any]:
    """The methods of a compiled LightningModule, compiled for a replica of it; none for others."""
    context = getattr(module, "_compiler_ctx", None)
    if context is None:
        return {}
    compiled = {}
    for name in _STEPS:
        # A module that was fitted before had been compiled then, and is compiled once more.
        original = innermost_fn(context[f"original_{name}"])
        if isinstance(original, types.MethodType):
            original = types.MethodType(original.__func__, replica)
        compiled[name] = context["dynamo_ctx"](original)
    return compiled


@contextmanager
def uncompiled(module: L.LightningModule) -> Iterator[None]:
    """Meanwhile a compiled LightningModule has the methods that it was compiled from."""
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
    """Compile a module as another one of its class is, if that is compiled and this is not yet."""
    context = other._compiler_ctx
    if context is None or is_compiled(module):
        return
    originals = {f"original_{name}": getattr(module, name) for name in _STEPS}
    vars(module).update(compiled_steps(other, module))
    module._compiler_ctx = {**context, **originals}


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether ``compile()`` of a module was called, which its copies do not learn of."""
    return module._compiled_call_impl is not None


def materialize(module: nn.Module, device: torch.device) -> None:
    """Give memory on a device to a module with parts on the meta device, and reset all of it.

    Modules without any such part stay as they are.
    """
    _materialize_distributed_module(module, device)


def is_compiled(module: nn.Module) -> bool:
    """Whether the whole module was given to the Trainer as ``torch.compile(module)``."""
    return getattr(module, "_compiler_ctx", None) is not None
