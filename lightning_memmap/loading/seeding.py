"""Running code with its own random numbers, without a trace in those of the program."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed torch's generators of the CPU and of a device, the current one; restore them at the end.

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
