"""The parts of a step, as the Trainer's profiler is told of them."""

import pytest
import torch

from lightning_memmap.compare import measure
from lightning_memmap.compare.measure import StepClock
from lightning_memmap.compare.metrics import PARTS


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
    assert [*first] == [*PARTS]
    spent = {"forward": 1.0, "backward": 3.0, "optimizer": 5.0}
    assert second == {**dict.fromkeys(PARTS, 0.0), **spent}
