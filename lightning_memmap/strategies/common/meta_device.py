"""Initialising modules on the meta device on the device where they train, as constructors do."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_memmap._compat.modules import (
    NamedTensor,
    empty_own_tensors,
    has_meta_tensors,
    own_named_tensors,
    trainer_of,
    writes_on_meta,
)
from lightning_memmap._compat.tensors import num_writes
from lightning_memmap.errors import UnsuitableModuleError, describe_error


def post_order(module: nn.Module) -> Iterator[nn.Module]:
    """Yield children before their parents, in the order in which they were created."""
    for child in module.children():
        yield from post_order(child)
    yield module


class MetaInitializer:
    """Initialises the parameters and buffers of a module that are on the meta device.

    Each submodule with such tensors is initialised by its ``reset_parameters``, as in its
    constructor, and then by ``_init_weights(submodule)`` of the innermost module around it that has
    this method, as in ``self.apply(self._init_weights)``: Hugging Face models have one. Tensors
    on other devices keep their values.

    Args:
        root: The module. Nothing is changed before `initialize` is called.
        not_loaded: Names of tensors that a checkpoint doesn't contain.

    Raises:
        UnsuitableModuleError: A tensor would not have the values of its construction, because
            nothing initialises it, because several modules that share it do, or because something
            has set it afterwards; and no checkpoint is about to be loaded.
    """

    # Every initializer is tried on the meta device first, where it needs no memory: in-place
    # operations compute nothing there, but are counted.

    def __init__(self, root: L.LightningModule, not_loaded: Iterable[str] = ()) -> None:
        self._not_loaded = set(not_loaded)
        self._names = {child: name for name, child in root.named_modules()}
        self._order = list(dict.fromkeys(post_order(root)))
        self._own = set(filter(has_meta_tensors, self._order))
        self._affected = {
            child for child in self._order if not self._own.isdisjoint(child.modules())
        }
        self._initializers = dict(_initializers(root, None)) if self._own else {}
        # By submodule, how often its initialisation writes which tensors.
        self._writes: dict[nn.Module, dict[NamedTensor, float]] = {}
        if self._own:
            before = {
                (child, name): (tensor.is_meta, num_writes(tensor))
                for child in self._order
                for name, tensor in own_named_tensors(child)
            }
            # Tensors with memory keep their values.
            self._kept = {key for key, (is_meta, _) in before.items() if not is_meta}
            affected = [child for child in self._order if child in self._affected]
            attempts = {child: partial(self._try_out, child) for child in affected}
            self._writes = writes_on_meta(self._order, attempts)
            self._check(root, {key: n for key, (is_meta, n) in before.items() if is_meta})

    @torch.no_grad()
    def initialize(self, module: nn.Module, device: torch.device) -> list[Tensor]:
        """Initialise the tensors of one submodule itself, after its children.

        Returns:
            The tensors with new values, which may be in children too.
        """
        if module not in self._affected:
            return []
        empty_own_tensors(module, device)
        written = self._writes[module]
        kept = [key for key in written if key in self._kept]
        before = [(child, name, getattr(child, name)) for child, name in kept]
        values = [tensor.clone() for _, _, tensor in before]
        self._run(module)
        for (child, name, tensor), value in zip(before, values, strict=True):
            tensor.copy_(value)
            setattr(child, name, tensor)
        return [getattr(*key) for key in written if key not in self._kept]

    def _run(self, module: nn.Module) -> None:
        if module in self._own and callable(reset := getattr(module, "reset_parameters", None)):
            reset()
        if module in self._affected and module in self._initializers:
            self._initializers[module](module)

    def _try_out(self, module: nn.Module) -> None:
        try:
            self._run(module)
        except Exception as error:
            raise UnsuitableModuleError(
                f"{self._label(module)} is on the meta device, and its initialisation failed"
                f" there ({describe_error(error)}): build it on the CPU"
            ) from error

    def _check(self, root: L.LightningModule, versions: dict[NamedTensor, int]) -> None:
        """Check the tensors on the meta device.

        Args:
            root: The module.
            versions: How often each tensor has been written since it was created.
        """
        counts: dict[NamedTensor, float] = {}
        for writes in self._writes.values():
            for key, count in writes.items():
                counts[key] = counts.get(key, 0) + count
        # A Trainer loads the checkpoint after the set-up of the strategy.
        is_loaded = getattr(trainer_of(root), "ckpt_path", None) is not None
        loaded = set(root.state_dict()) - self._not_loaded if is_loaded else set()
        missing = list[NamedTensor]()
        changed = list[NamedTensor]()
        adapters = list[NamedTensor]()
        initialized = defaultdict[Tensor, list[NamedTensor]](list)
        in_adapters = _adapter_modules(self._order)
        written = {getattr(*key) for key in counts}
        for key, version in versions.items():
            child, name = key
            if f"{self._names[child]}.{name}".lstrip(".") in loaded:
                continue
            if key in counts:
                initialized[getattr(child, name)].append(key)
            if child in in_adapters:
                adapters.append(key)
            elif getattr(child, name) not in written:
                missing.append(key)
            elif version > counts.get(key, version):
                changed.append(key)
        remedy = (
            "build it on the CPU, or pass a checkpoint of all weights (ckpt_path) to the Trainer"
        )
        for keys, problem in (
            (
                missing,
                "on the meta device, and nothing initialises this: add a method reset_parameters to"
                " the class, as torch's own layers have, or a method _init_weights(module) to a"
                " module around it",
            ),
            (adapters, "an adapter on the meta device, which reset_parameters does not initialise"),
            (
                changed,
                "on the meta device, and changed after its construction and initialisation, which"
                " reset_parameters and _init_weights(module) would not repeat: change it in one of"
                " these methods",
            ),
        ):
            if keys:
                raise UnsuitableModuleError(f"{self._list(keys)}: {problem}; {remedy}")
        for holders in initialized.values():
            if len(holders) > 1:
                raise UnsuitableModuleError(
                    f"{self._list(holders)}: one tensor on the meta device, which each of these"
                    f" modules would initialise: {remedy}"
                )

    def _list(self, keys: list[NamedTensor]) -> str:
        shown = [f"{self._label(child)}: {name}" for child, name in keys[:3]]
        rest = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
        return "; ".join(shown) + rest

    def _label(self, module: nn.Module) -> str:
        name = self._names[module]
        return f"{name or 'the module itself'} ({type(module).__name__})"


def _initializers(
    module: nn.Module, outer: Callable[[nn.Module], Any] | None
) -> Iterator[tuple[nn.Module, Callable[[nn.Module], Any]]]:
    """Yield each submodule with the innermost ``_init_weights`` around it."""
    method = getattr(module, "_init_weights", None)
    if callable(method) and _takes_module(method):
        outer = method
    if outer is not None:
        yield module, outer
    for child in module.children():
        yield from _initializers(child, outer)


def _takes_module(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError):
        return False
    return True


def _adapter_modules(modules: list[nn.Module]) -> set[nn.Module]:
    """Return the modules inside of peft's adapters."""
    inside: set[nn.Module] = set()
    for module in modules:
        names = getattr(module, "adapter_layer_names", None)
        for name in names if isinstance(names, (tuple, list)) else ():
            if isinstance(adapter := getattr(module, name, None), nn.Module):
                inside.update(adapter.modules())
    return inside
