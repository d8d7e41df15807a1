"""The parts of a step, and the bytes of models and processes."""

import gc
import os
from subprocess import Popen
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

from lightning_memmap.compare import measure
from lightning_memmap.compare.figures import STEP_PARTS
from lightning_memmap.compare.measure import (
    StepClock,
    device_peaks,
    model_bytes,
    process_memory,
)


@pytest.fixture
def tick(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time: its only element."""
    now = [100.0]
    monkeypatch.setattr(measure, "perf_counter", lambda: now[0])
    return now


def spend(clock: StepClock, tick: list[float], action: str, seconds: float) -> None:
    clock.start(action)
    tick[0] += seconds
    clock.stop(action)


def test_parts_are_those_of_the_trainers_actions(tick: list[float]) -> None:
    clock = StepClock(torch.device("cpu"))
    # A step of the warm-up.
    spend(clock, tick, "backward", 30.0)
    clock.end_step()
    spend(clock, tick, "[_TrainingEpochLoop].train_dataloader_next", 1.0)
    spend(clock, tick, "[Strategy]DDPStrategy.batch_to_device", 2.0)
    spend(clock, tick, "[LightningModule]Net.transfer_batch_to_device", 50.0)
    spend(clock, tick, "[Callback]Other.on_train_batch_start", 50.0)
    clock.start("[LightningModule]Net.optimizer_step")
    spend(clock, tick, "[Strategy]DDPStrategy.training_step", 4.0)
    spend(clock, tick, "backward", 8.0)
    tick[0] += 16.0
    clock.stop("[LightningModule]Net.optimizer_step")
    tick[0] += 69.0
    clock.end_step()
    # The next one starts from nothing; in manual optimization all is within the training step.
    clock.start("[Strategy]DDPStrategy.training_step")
    tick[0] += 1.0
    spend(clock, tick, "backward", 3.0)
    spend(clock, tick, "optimizer_step", 5.0)
    clock.stop("[Strategy]DDPStrategy.training_step")
    clock.end_step()
    first, second = clock.steps()
    assert first == {
        "data": 1.0,
        "transfer": 2.0,
        "forward": 4.0,
        "backward": 8.0,
        "optimizer": 16.0,
        "other": 169.0,
    }
    assert [*first] == [*STEP_PARTS]
    spent = {"forward": 1.0, "backward": 3.0, "optimizer": 5.0}
    assert second == {**dict.fromkeys(STEP_PARTS, 0.0), **spent}


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
