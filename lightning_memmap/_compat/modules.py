"""Private names of modules of torch and Lightning."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from lightning.fabric.utilities import device_dtype_mixin
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

#: The class of modules and metrics that know their device.
_KNOWS_DEVICE: Any = getattr(device_dtype_mixin, "_DeviceDtypeModuleMixin", ())


def set_device_attribute(module: nn.Module, device: torch.device) -> None:
    """Set the attribute ``device`` of a module and its submodules, and move nothing."""
    for child in module.modules():
        set_own_device_attribute(child, device)


def set_own_device_attribute(module: nn.Module, device: torch.device) -> None:
    """Set the attribute ``device`` of a module, and move nothing."""
    if isinstance(module, _KNOWS_DEVICE):
        vars(module)["_device"] = device


def apply_to_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace all parameters and buffers of a module, as its method ``to`` does."""
    module._apply(function)  # type: ignore[no-untyped-call]


def own_tensors(module: nn.Module) -> list[Tensor]:
    """List the parameters and buffers of a module itself; tied ones each time."""
    registered = *module._parameters.values(), *module._buffers.values()
    return [tensor for tensor in registered if tensor is not None]


def own_children(module: nn.Module) -> list[nn.Module]:
    """List the children of a module, under each of their names."""
    return [child for child in module._modules.values() if child is not None]


def has_meta_tensors(module: nn.Module) -> bool:
    """Whether a module itself has a parameter or buffer on the meta device."""
    return any(tensor.is_meta for tensor in own_tensors(module))


def materialize(module: nn.Module, device: torch.device) -> None:
    """Initialise the parameters and buffers of a module itself on a device."""
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise TypeError(
            f"{type(module).__name__} has parameters or buffers on the meta device and no method"
            " reset_parameters, which would initialise them: add one, or build it on the CPU"
        )
    module.to_empty(device=device, recurse=False)
    reset()


def materialize_all(module: nn.Module, device: torch.device) -> None:
    """Initialise a module and its submodules on a device, if a tensor is on the meta device."""
    if not any(map(has_meta_tensors, module.modules())):
        return
    module.to_empty(device=device)
    uninitialised = set()
    for child in filter(own_tensors, module.modules()):
        reset = getattr(child, "reset_parameters", None)
        if callable(reset):
            reset()
        else:
            uninitialised.add(type(child).__name__)
    if uninitialised:
        rank_zero_warn(
            f"{', '.join(sorted(uninitialised))}: no method reset_parameters, so that parameters or"
            " buffers which were on the meta device are not initialised"
        )


def skip_transfer_hook(module: Any, kind: type) -> None:
    """Let Lightning call a module's hooks before a transfer for no batch of a class."""

    def before_transfer(batch: Any, dataloader_idx: int = 0) -> Any:
        return (
            batch if isinstance(batch, kind) else run_transfer_hook(module, batch, dataloader_idx)
        )

    module._on_before_batch_transfer = before_transfer


def restore_transfer_hook(module: Any) -> None:
    """Undo `skip_transfer_hook`."""
    vars(module).pop("_on_before_batch_transfer", None)


def run_transfer_hook(module: Any, batch: Any, dataloader_idx: int) -> Any:
    """Call a module's hooks before a transfer."""
    return type(module)._on_before_batch_transfer(module, batch, dataloader_idx)


def is_called_in(module: Any, methods: Collection[str]) -> bool:
    """Whether Lightning is calling one of these methods of a module; True where nobody knows."""
    return not hasattr(module, "_current_fx_name") or module._current_fx_name in methods
