"""The parts of a step, as the Trainer's profiler is told of them."""

from types import SimpleNamespace

import pytest
import torch

from lightning_memmap.compare.report.records import PARTS
from lightning_memmap.compare.run import clock as clock_module
from lightning_memmap.compare.run import memory
from lightning_memmap.compare.run.clock import StepClock
from lightning_memmap.compare.run.measure import synchronizer


@pytest.fixture
def tick(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time: its only element."""
    now = [100.0]
    monkeypatch.setattr(clock_module, "perf_counter", lambda: now[0])
    return now


def spend(clock: StepClock, tick: list[float], action: str, seconds: float) -> None:
    clock.start(action)
    tick[0] += seconds
    clock.stop(action)


def test_parts_are_those_of_the_trainers_actions(tick: list[float]) -> None:
    clock = StepClock(lambda: None)
    spend(clock, tick, "[_TrainingEpochLoop].train_dataloader_next", 1.0)
    spend(clock, tick, "[Strategy]DDPStrategy.batch_to_device", 2.0)
    spend(clock, tick, "[LightningModule]Net.transfer_batch_to_device", 50.0)
    spend(clock, tick, "[Callback]Other.on_train_batch_start", 50.0)
    clock.start("[LightningModule]Net.optimizer_step")
    spend(clock, tick, "[Strategy]DDPStrategy.training_step", 4.0)
    spend(clock, tick, "[Strategy]DDPStrategy.backward", 8.0)
    tick[0] += 16.0
    clock.stop("[LightningModule]Net.optimizer_step")
    parts = clock.take(200.0)
    assert parts == {
        "data": 1.0,
        "transfer": 2.0,
        "forward": 4.0,
        "backward": 8.0,
        "optimizer": 16.0,
        "other": 169.0,
    }
    assert tuple(parts) == PARTS


def test_next_step_starts_from_nothing(tick: list[float]) -> None:
    clock = StepClock(lambda: None)
    spend(clock, tick, "[Strategy]X.backward", 3.0)
    clock.take(3.0)
    assert set(clock.take(0.0).values()) == {0.0}


def test_device_is_waited_for_only_when_asked(tick: list[float]) -> None:
    waits: list[None] = []
    clock = StepClock(lambda: waits.append(None))
    spend(clock, tick, "[Strategy]X.backward", 1.0)
    assert not waits
    clock.is_synchronizing = True
    spend(clock, tick, "[Strategy]X.backward", 1.0)
    spend(clock, tick, "run_training_batch", 1.0)
    assert len(waits) == 2


def test_wait_is_for_the_gpus_that_hold_tensors_of_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[int] = []
    gpus = SimpleNamespace(device_count=lambda: 3, memory_reserved=[0, 2**20, 0].__getitem__)
    monkeypatch.setattr(memory, "_counting_module", lambda: gpus)
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    synchronizer(torch.device("cuda", 1))()
    assert waited == [1]
