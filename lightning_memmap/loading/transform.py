"""Runs a user's batch transform on one data device, with its own random numbers."""

import copy
import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from reprlib import repr as short_repr
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_memmap.errors import is_argument_mismatch, with_article
from lightning_memmap.loading.device_streams import current
from lightning_memmap.loading.row_random import RowRandom

BatchTransform = Callable[..., Any]


def check_callable(argument: str, value: object) -> None:
    """Check that an argument is callable."""
    if not callable(value):
        raise TypeError(
            f"{argument}={short_repr(value)}: {with_article(type(value).__name__)} is not callable:"
            " pass a function, an nn.Module or an object with __call__"
        )


class OnSuperBatch:
    """Runs a batch transform on the assembled super-batch, and not on each data device.

    A transform on each data device must return the same shapes on all of them, since their batches
    are assembled afterwards. Use this for one that trims to the longest sequence, draws a size, or
    mixes the rows of a step. It runs once a step, on the device where the batch is assembled, with
    all rows of this process in order. Its random numbers do not depend on how many devices hold the
    data.

    Args:
        transform: A callable or module that maps a batch to a batch. It may have a parameter
            ``random`` or ``generator``, like any batch transform.

    Raises:
        TypeError: The transform cannot be called.

    Examples:
        >>> def trim(batch):
        ...     return {**batch, "tokens": batch["tokens"][:, : int(batch["length"].max())]}
        >>> batch = {"tokens": torch.arange(6).view(2, 3), "length": torch.tensor([1, 2])}
        >>> OnSuperBatch(trim)(batch)["tokens"].tolist()
        [[0, 1], [3, 4]]
    """

    def __init__(self, transform: BatchTransform) -> None:
        check_callable("transform", transform)
        self.transform = transform

    def __call__(self, batch: Any, **keywords: Any) -> Any:
        """Transform a batch of all rows."""
        return self.transform(batch, **keywords)


class DeviceTransform:
    """A batch transform bound to a data device."""

    def __init__(self, transform: BatchTransform, device: torch.device) -> None:
        self._device = device
        if isinstance(transform, OnSuperBatch):
            transform = transform.transform
        self._takes_generator = has_parameter(transform, "generator")
        self._takes_random = has_parameter(transform, "random")
        if isinstance(transform, nn.Module):
            transform = copy.deepcopy(transform).to(device)
        self._transform = transform

    def __call__(self, batch: Any, seed: int, rows_random: RowRandom | None = None) -> Any:
        """Transform one batch, with all randomness drawn from the seed and for each row."""
        keywords: dict[str, Any] = {}
        if self._takes_random and rows_random is not None:
            keywords["random"] = rows_random.restarted(self._device)
        with torch.no_grad(), current(self._device):
            if self._takes_generator:
                keywords["generator"] = torch.Generator(self._device).manual_seed(seed)
                return self._transformed(batch, **keywords)
            with seeded_everywhere(self._device, seed):
                return self._transformed(batch, **keywords)

    def _transformed(self, batch: Any, **keywords: Any) -> Any:
        try:
            return self._transform(batch, **keywords)
        except (TypeError, AttributeError) as error:
            is_of_torch = type(self._transform).__module__.startswith("torch")  # And torchvision.
            if not (is_of_torch or is_argument_mismatch(error)):
                raise
            raise TypeError(
                f"transform={short_repr(self._transform)}: it cannot be called with a batch"
                f" ({error}): pass a function of one argument, the {type(batch).__name__} of all"
                " rows of a batch, such as lambda batch: {**batch, 'x': module(batch['x'])}. For a"
                " function of one sample, use PerSample"
            ) from error


def has_parameter(transform: BatchTransform, name: str) -> bool:
    """Return whether a transform has a parameter of a name, such as ``random``."""
    if isinstance(transform, OnSuperBatch):
        transform = transform.transform
    function: Any = transform.forward if isinstance(transform, nn.Module) else transform
    try:
        return name in inspect.signature(function).parameters
    except ValueError:  # Some builtins have no signature.
        return False


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed torch's generators of the CPU and of a device, the current one; restore them at the end.

    A CUDA graph that is replayed within the context draws the numbers of the seed: a replay begins
    with the seed and the offset that the generator has then. The context must not begin or end
    while a graph is captured.

    Args:
        device: The device.
        seed: Seed, ``0 <= seed < 2**63``.
    """
    module: Any = None if device.type == "cpu" else getattr(torch, device.type, None)
    # torch can't save the generator of every accelerator.
    has_state = hasattr(module, "get_rng_state")
    state = torch.default_generator.get_state()
    device_state = module.get_rng_state() if has_state else None
    torch.default_generator.manual_seed(seed)
    if has_state:
        module.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
        if has_state:
            module.set_rng_state(device_state)


@contextmanager
def seeded_everywhere(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the generators of torch, numpy and Python like `seeded`. It takes 20 times as long."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    with seeded(device, seed):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
