"""Modules on the meta device: they are initialised where they train, as their construction did."""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_memmap._compat.modules import (
    Place,
    empty_own_tensors,
    has_meta_tensors,
    own_named_tensors,
    trainer_of,
    writes_on_meta,
)
from lightning_memmap._compat.tensors import num_writes
from lightning_memmap.errors import UnsuitableModuleError


def post_order(module: nn.Module) -> Iterator[nn.Module]:
    """Children before their parents, in the order of registration: that in which they were made."""
    for child in module.children():
        yield from post_order(child)
    yield module


class MetaInitializer:
    """Initialises the parameters and buffers of a module that are on the meta device.

    Each submodule with such tensors is initialised by its ``reset_parameters``, as in its
    constructor, and then by ``_init_weights(submodule)`` of the innermost module around it that has
    this method, as in ``self.apply(self._init_weights)``: models of Hugging Face have one. Tensors
    that are on another device already keep their values.

    Args:
        root: The module. Nothing is changed before `initialize` is called.

    Raises:
        UnsuitableModuleError: A tensor would not get the values that it was constructed with:
            nothing initialises it, or something else has set it after its construction; and no
            checkpoint is about to be loaded.
    """

    # Everything is tried out on the meta device before, where it costs no memory: in-place
    # operations there compute nothing, and count.

    def __init__(self, root: L.LightningModule) -> None:
        self._names = {child: name for name, child in root.named_modules()}
        self._order = list(dict.fromkeys(post_order(root)))
        self._own = set(filter(has_meta_tensors, self._order))
        self._affected = {
            child for child in self._order if not self._own.isdisjoint(child.modules())
        }
        self._initializers = dict(_initializers(root, None)) if self._own else {}
        #: By submodule, how often its initialisation writes which tensors.
        self._writes: dict[nn.Module, dict[Place, float]] = {}
        if self._own:
            before = {
                (child, name): (tensor.is_meta, num_writes(tensor))
                for child in self._order
                for name, tensor in own_named_tensors(child)
            }
            # What has memory keeps its values.
            self._kept = {place for place, (is_meta, _) in before.items() if not is_meta}
            affected = [child for child in self._order if child in self._affected]
            attempts = {child: partial(self._try_out, child) for child in affected}
            self._writes = writes_on_meta(self._order, attempts)
            self._check(root, {place: n for place, (is_meta, n) in before.items() if is_meta})

    @torch.no_grad()
    def initialize(self, module: nn.Module, device: torch.device) -> list[Tensor]:
        """Initialise the tensors of one submodule itself; its children must be initialised.

        Returns:
            The tensors that have other values now, also those of submodules of it.
        """
        if module not in self._affected:
            return []
        empty_own_tensors(module, device)
        places = self._writes[module]
        kept = [place for place in places if place in self._kept]
        before = [(child, name, getattr(child, name)) for child, name in kept]
        values = [tensor.clone() for _, _, tensor in before]
        self._run(module)
        for (child, name, tensor), value in zip(before, values, strict=True):
            tensor.copy_(value)
            setattr(child, name, tensor)
        return [getattr(*place) for place in places if place not in self._kept]

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
                f"{self._called(module)} is on the meta device, and its initialisation failed"
                f" there ({type(error).__name__}: {error}): build it on the CPU"
            ) from error

    def _check(self, root: L.LightningModule, versions: dict[Place, int]) -> None:
        """Check what is on the meta device, given how often each tensor has been written."""
        counts: dict[Place, float] = {}
        for writes in self._writes.values():
            for place, count in writes.items():
                counts[place] = counts.get(place, 0) + count
        # A Trainer loads the checkpoint when the strategy has set up everything.
        is_loaded = getattr(trainer_of(root), "ckpt_path", None) is not None
        loaded = set(root.state_dict()) if is_loaded else set()
        missing, changed, adapters = list[Place](), list[Place](), list[Place]()
        tuned = _adapters(self._order)
        for place, version in versions.items():
            child, name = place
            if f"{self._names[child]}.{name}".lstrip(".") in loaded:
                continue
            if child in tuned:
                adapters.append(place)
            elif place not in counts:
                missing.append(place)
            elif version > counts[place]:
                changed.append(place)
        remedy = "build it on the CPU, or give the Trainer a checkpoint of all weights (ckpt_path)"
        if missing:
            raise UnsuitableModuleError(
                f"{self._listed(missing)}: on the meta device, and nothing initialises this: give"
                " the class a method reset_parameters, as torch's own layers have, or a module"
                f" around it a method _init_weights(module); {remedy}"
            )
        if adapters:
            raise UnsuitableModuleError(
                f"{self._listed(adapters)}: an adapter on the meta device, whose first values are"
                f" not those of reset_parameters: {remedy}"
            )
        if changed:
            raise UnsuitableModuleError(
                f"{self._listed(changed)}: on the meta device, and changed after it was constructed"
                " and initialised, which reset_parameters and _init_weights(module) would not"
                f" repeat: do so in one of these methods; {remedy}"
            )

    def _listed(self, places: list[Place]) -> str:
        shown = [f"{self._called(child)}: {name}" for child, name in places[:3]]
        rest = f" and {len(places) - 3} more" if len(places) > 3 else ""
        return "; ".join(shown) + rest

    def _called(self, module: nn.Module) -> str:
        name = self._names[module]
        return f"{name or 'the module itself'} ({type(module).__name__})"


def _initializers(
    module: nn.Module, outer: Callable[[nn.Module], Any] | None
) -> Iterator[tuple[nn.Module, Callable[[nn.Module], Any]]]:
    """By submodule, the innermost ``_init_weights`` around it."""
    own = getattr(module, "_init_weights", None)
    if callable(own) and _takes_module(own):
        outer = own
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


def _adapters(modules: list[nn.Module]) -> set[nn.Module]:
    """The modules inside of the adapters of peft, which name them."""
    found: set[nn.Module] = set()
    for module in modules:
        names = getattr(module, "adapter_layer_names", None)
        for name in names if isinstance(names, (tuple, list)) else ():
            if isinstance(adapter := getattr(module, name, None), nn.Module):
                found.update(adapter.modules())
    return found
