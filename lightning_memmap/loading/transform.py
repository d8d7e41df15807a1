"""Runs a user's batch transform on one data device, repeatably."""

import copy
import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

BatchTransform = Callable[..., Any]


class DeviceTransform:
    """A batch transform bound to a data device.

    A transform with a parameter named ``generator`` is given a seeded ``torch.Generator`` of the
    data device. Any other one runs with the global generators of torch, numpy and Python seeded,
    and finds them as they were afterwards.

    Args:
        transform: A callable or module that maps a batch to a batch. A module is copied to the
            device.
        device: The data device.
    """

    def __init__(self, transform: BatchTransform, device: torch.device) -> None:
        self._device = device
        self._transform = transform
        signature_of: Any = transform
        if isinstance(transform, nn.Module):
            self._transform = copy.deepcopy(transform).to(device)
            signature_of = transform.forward
        self._takes_generator = _takes_generator(signature_of)

    def __call__(self, batch: Any, seed: int) -> Any:
        """Transform one batch, with all randomness drawn from the seed."""
        with torch.no_grad():
            if self._takes_generator:
                generator = torch.Generator(self._device).manual_seed(seed)
                return self._transform(batch, generator=generator)
            with _seeded(self._device, seed):
                return self._transform(batch)


def _takes_generator(function: Any) -> bool:
    try:
        return "generator" in inspect.signature(function).parameters
    except ValueError:  # Some builtins have no signature.
        return False


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices, enabled=True):
        torch.default_generator.manual_seed(seed)
        if devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
