"""Private names of modules of torch and Lightning, and of data modules."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities import device_dtype_mixin
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memmap._compat.dynamo import compiler_context
from lightning_memmap._compat.tensors import num_writes, storage_id
from lightning_memmap.errors import UnsuitableModuleError

#: The class of modules and metrics that know their device.
_KNOWS_DEVICE: Any = getattr(device_dtype_mixin, "_DeviceDtypeModuleMixin", ())


def set_device_attribute(module: nn.Module, device: torch.device) -> None:
    """Set the attribute ``device`` of a module and its submodules, and move nothing."""
    # Its only public setter is `to`, which moves all tensors.
    for child in module.modules():
        set_own_device_attribute(child, device)


def set_own_device_attribute(module: nn.Module, device: torch.device) -> None:
    """Set the attribute ``device`` of a module, and move nothing."""
    if isinstance(module, _KNOWS_DEVICE):
        vars(module)["_device"] = device


def apply_to_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace all parameters and buffers of a module, as its method ``to`` does."""
    module._apply(function)  # type: ignore[no-untyped-call]


def explain_missing_memory(module: nn.Module, reason: str) -> None:
    """Add a reason to torch's error if anything moves a module with tensors on the meta device."""
    # All of `to`, `cpu`, `half` and so on call it.
    vars(module)["_apply"] = partial(_apply_or_raise, module, reason)


def _apply_or_raise(module: nn.Module, reason: str, *args: Any, **kwargs: Any) -> Any:
    try:
        return type(module)._apply(module, *args, **kwargs)  # type: ignore[no-untyped-call]
    except NotImplementedError as error:
        raise UnsuitableModuleError(reason) from error


def own_children(module: nn.Module) -> list[nn.Module]:
    """List the children of a module, under each of their names."""
    return [child for child in module._modules.values() if child is not None]


def has_meta_tensors(module: nn.Module) -> bool:
    """Return whether a module itself has a parameter or buffer on the meta device."""
    return any(tensor.is_meta for _, tensor in own_named_tensors(module))


def trainer_of(module: Any) -> Any:
    """Return the Trainer of a LightningModule, or None."""
    return getattr(module, "_trainer", None)


def own_named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """List the parameters and buffers of a module itself, tied ones under each of their names."""
    registered = *module._parameters.items(), *module._buffers.items()
    return [(name, tensor) for name, tensor in registered if tensor is not None]


def empty_own_tensors(module: nn.Module, device: torch.device) -> None:
    """Move those tensors of a module itself that are on the meta device to another device.

    Parameters stay the same objects, and tied ones tied. Floating-point tensors are filled with
    NaN, so that missing initialisation is noticed.
    """

    def empty(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if tensor.is_floating_point() or tensor.is_complex():
            return torch.full_like(tensor, torch.nan, device=device)
        return torch.empty_like(tensor, device=device)

    if has_meta_tensors(module):
        with same_parameters():
            module._apply(empty, recurse=False)  # type: ignore[no-untyped-call]


@contextmanager
def same_parameters() -> Iterator[None]:
    """Let `Module._apply` keep parameters the same objects, and tied ones tied."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


#: A module, and the name of one of its tensors.
NamedTensor = tuple[nn.Module, str]


def writes_on_meta(
    modules: Sequence[nn.Module], functions: Mapping[nn.Module, Callable[[], Any]]
) -> dict[nn.Module, dict[NamedTensor, float]]:
    """Count what functions write, while all tensors of modules are on the meta device.

    Args:
        modules: The modules. Their tensors are restored afterwards.
        functions: By module, a function that may write tensors of it and its submodules.

    Returns:
        By module, how often each tensor is written; infinity if it is replaced.
    """
    registers: list[Any] = [
        register for module in modules for register in (module._parameters, module._buffers)
    ]
    before = [dict(register) for register in registers]
    memory: dict[int, Tensor] = {}
    state = torch.get_rng_state()
    try:
        for register in registers:
            for name, tensor in register.items():
                if tensor is not None:
                    register[name] = _on_meta(tensor, memory)
        return {module: _count_writes(module, function) for module, function in functions.items()}
    finally:
        torch.set_rng_state(state)
        for register, values in zip(registers, before, strict=True):
            register.clear()
            register.update(values)


def _on_meta(tensor: Tensor, memory: dict[int, Tensor]) -> Tensor:
    """Return a tensor like another one on the meta device, one for each memory."""
    if id(tensor) not in memory:
        empty = torch.empty_like(tensor, device="meta", requires_grad=False)
        is_parameter = isinstance(tensor, nn.Parameter)
        memory[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return memory[id(tensor)]


def _count_writes(module: nn.Module, function: Callable[[], Any]) -> dict[NamedTensor, float]:
    keys = [(child, name) for child in module.modules() for name, _ in own_named_tensors(child)]
    tensors: list[Tensor] = [getattr(child, name) for child, name in keys]
    before = [(tensor, num_writes(tensor)) for tensor in tensors]
    with _WrittenStorages() as written, torch.no_grad():
        function()
    writes: dict[NamedTensor, float] = {}
    for (child, name), (tensor, version) in zip(keys, before, strict=True):
        if getattr(child, name) is not tensor:
            writes[child, name] = float("inf")
        elif storage_id(tensor) in written.ids:
            # torch doesn't count writes through ``tensor.data``.
            writes[child, name] = max(1, num_writes(tensor) - version)
    return writes


class _WrittenStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the storages that operators write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ids: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for index, argument in enumerate(function._schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and isinstance(value, Tensor):
                self.ids.add(storage_id(value))
        return function(*args, **kwargs)


def uncompiled_log(module: Any) -> Callable[..., None] | None:
    """Return a method ``log`` for a compiled module that runs outside of what is compiled.

    torch 2.12 and later cannot compile ``self.log`` of Lightning 2.6.
    """
    if not compiler_context(module) or "log" in vars(module):
        return None
    log: Callable[..., None] = torch.compiler.disable(module.log)  # type: ignore[no-untyped-call]
    return log


def copy_hyperparameters(source: Any, target: Any) -> None:
    """Copy the hyperparameters of a data module, and whether they are logged."""
    names = "_log_hyperparams", "_hparams", "_hparams_name", "_hparams_initial"
    vars(target).update({name: vars(source)[name] for name in names if name in vars(source)})


#: The method by which Lightning calls a module's hooks before a transfer.
TRANSFER_HOOK = "_on_before_batch_transfer"


def transfer_hook_except(module: Any, kind: type) -> Callable[..., Any]:
    """Return a method for `TRANSFER_HOOK` that calls no hook for batches of a class."""

    def before_transfer(batch: Any, dataloader_idx: int = 0) -> Any:
        is_left = isinstance(batch, kind)
        return batch if is_left else run_transfer_hook(module, batch, dataloader_idx)

    return before_transfer


def run_transfer_hook(module: Any, batch: Any, dataloader_idx: int) -> Any:
    """Call a module's hooks before a transfer."""
    return type(module)._on_before_batch_transfer(module, batch, dataloader_idx)


def is_called_in(module: Any, methods: Collection[str]) -> bool:
    """Return whether Lightning is calling one of these methods of a module; True if unknown."""
    return not hasattr(module, "_current_fx_name") or module._current_fx_name in methods


def unless_none(weights_only: bool | None) -> tuple[bool, ...]:
    """Return an argument as arguments: Lightning passes ``weights_only`` only since 2.6."""
    return () if weights_only is None else (weights_only,)
