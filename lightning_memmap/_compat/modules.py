"""Private names of modules: their dicts, how they were compiled, their device attribute."""

import types
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
    """Set ``LightningModule.device`` without moving parameters there.

    Args:
        module: A LightningModule; its submodules that have such an attribute are set, too.
        device: The new value.
    """
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
    """Let batches of one type skip ``on_before_batch_transfer``, which expects plain ones.

    Args:
        module: The module that Lightning calls; see `restore_before_transfer`.
        kind: The type of the batches.
    """
    module._on_before_batch_transfer = _SkipBeforeTransfer(module, kind)  # type: ignore[method-assign]


def restore_before_transfer(module: L.LightningModule) -> None:
    """Undo `skip_before_transfer`.

    Args:
        module: Any module; one that skips nothing stays as it is.
    """
    module.__dict__.pop("_on_before_batch_transfer", None)


def before_transfer(module: L.LightningModule, batch: Any, dataloader_idx: int) -> Any:
    """Run ``on_before_batch_transfer`` of the module, or of its data module, on a plain batch.

    Args:
        module: A module with a Trainer.
        batch: The batch, on any device.
        dataloader_idx: Index of the loader that it is from.

    Returns:
        What the hook returned.
    """
    return type(module)._on_before_batch_transfer(module, batch, dataloader_idx)


def swap_metric_names(module: L.LightningModule, names: Any) -> Any:
    """Set the names under which Lightning finds a module's metrics.

    Args:
        module: The module.
        names: By the ``id`` of a metric, its name; None lets Lightning search when it next needs
            them.

    Returns:
        The old names, or None if Lightning has not searched yet.
    """
    before, module._metric_attributes = module._metric_attributes, names
    return before


def module_dicts(
    module: nn.Module,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, nn.Module | None]]:
    """A module's own parameters, buffers and children.

    Returns:
        Three dicts by name, which include the names that are None. They are the module's own dicts,
        not copies.
    """
    return module._parameters, module._buffers, module._modules


#: The attributes that `module_dicts` returns.
MODULE_DICTS = ("_parameters", "_buffers", "_modules")


def lightning_attributes(module: nn.Module, device: torch.device) -> dict[str, Any]:
    """The attributes of a LightningModule that differ in a replica.

    Args:
        module: The module that is replicated.
        device: The device of the replica.

    Returns:
        By name: the device, and no names of metrics, for which Lightning then searches the replica.
        Empty for a module that is not Lightning's.
    """
    if not isinstance(module, _DeviceDtypeModuleMixin):
        return {}
    return {"_device": device, "_metric_attributes": None}


def is_compiled_inside(module: nn.Module) -> bool:
    """Whether a module has code that was compiled for this object alone.

    Args:
        module: A module or submodule.

    Returns:
        True after ``module.compile()``, and for what ``torch.compile(submodule)`` returned.
    """
    return is_compiled_in_place(module) or isinstance(module, OptimizedModule)


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


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether ``compile()`` of a module was called, which does not reach copies of it.

    Args:
        module: A module or submodule; what its children are does not count.

    Returns:
        True if the module's own call is compiled.
    """
    return module._compiled_call_impl is not None


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
