"""Bytes of models and of processes."""

import gc
import os
from subprocess import Popen
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

from lightning_memmap.compare.measure import (
    device_peaks,
    model_bytes,
    process_memory,
)


def test_model_bytes_counts_each_memory_once() -> None:
    gc.collect()  # What other tests left goes now, and not between the two counts.
    lazy = nn.LazyLinear(3)  # Has no memory yet, and no size.
    before = model_bytes([]).get("cpu", {"parameters": 0, "gradients": 0})
    first, second = nn.Linear(100, 50), nn.Linear(50, 100, bias=False)
    second.weight = first.weight  # Tied: one memory.
    optimizer = torch.optim.Adam(first.parameters())
    first(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    found = model_bytes([optimizer])["cpu"]
    assert found["parameters"] - before["parameters"] == 4 * (100 * 50 + 50)
    assert found["gradients"] - before["gradients"] == 4 * (100 * 50 + 50)
    # Two moments as large as the parameters, and a step counter of 4 bytes for each.
    assert found["optimizer"] == 2 * 4 * (100 * 50 + 50) + 2 * 4
    lazy(torch.ones(1, 5))
    grown = model_bytes([optimizer])["cpu"]
    assert grown["parameters"] - found["parameters"] == 4 * (5 * 3 + 3)


def test_process_memory_has_this_process_and_its_children() -> None:
    with Popen(["sleep", "60"]) as child:
        found = process_memory()
        child.kill()
    private, shared = found[str(os.getpid())]
    assert 0 < private < private + shared <= psutil.virtual_memory().total
    assert str(child.pid) in found


def test_peaks_are_those_of_the_gpus_that_this_process_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert device_peaks() == {}
    module = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 3,
        memory_reserved=None,
        max_memory_allocated=[5, 0, 2].__getitem__,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda: module)
    assert device_peaks() == {"0": 5, "2": 2}
