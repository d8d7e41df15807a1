"""The clock of a comparison, on devices whose operations take time."""

from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import pytest
import torch

from lightning_memmap import MemmapDataModule
from lightning_memmap.compare.measure import StepClock
from lightning_memmap.strategies import DataParallelStrategy, SuperBatchStrategy
from tests.models import Points, Regression
from tests.simulated_gpu import devices

pytestmark = pytest.mark.gpu

#: Long beside what the program itself takes for an operation.
OPERATION_S = 2e-3
STEPS = 8


class EndOfSteps(L.Callback):
    def __init__(self, clock: StepClock) -> None:
        self.clock = clock

    def on_train_batch_end(self, *_: Any) -> None:
        self.clock.end_step()


def parts_of(path: Path, strategy: Any, residency: str, prefetch: int) -> dict[str, float]:
    """The median seconds of each part of a step, with steps made ahead or not."""
    clock = StepClock(torch.device("cuda", 0))
    trainer = L.Trainer(
        accelerator="gpu",
        devices=2,
        strategy=strategy(prefetch=prefetch),
        max_steps=STEPS,
        limit_val_batches=0,
        callbacks=[EndOfSteps(clock)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=path,
    )
    clock.watch(trainer)
    data = MemmapDataModule(
        Points(8 * 2 * STEPS),
        store_dir=path / "stores",
        batch_size=8,
        residency=residency,
        # Four operations.
        transform=lambda batch: {**batch, "x": batch["x"].neg().neg().neg().neg()},
    )
    with devices.operations_take(OPERATION_S):
        devices.reports.clear()
        trainer.fit(Regression(), datamodule=data)
    steps = clock.steps()
    assert len(steps) == STEPS - 1
    return {part: median(step[part] for step in steps) for part in steps[0]}


@pytest.mark.parametrize("residency", ["device", "host"])
@pytest.mark.parametrize("strategy", [SuperBatchStrategy, DataParallelStrategy])
def test_steps_that_are_made_ahead_are_no_stall(
    tmp_path: Path, strategy: Any, residency: str
) -> None:
    waited, ahead = (parts_of(tmp_path, strategy, residency, prefetch) for prefetch in (0, 2))
    # A step is made by several operations, which are beside the computing if they come in time.
    assert waited["data"] > 3 * OPERATION_S
    assert ahead["data"] < OPERATION_S
    # The model computes the same in both.
    for part in ("forward", "backward", "optimizer"):
        assert ahead[part] > 2 * OPERATION_S
        assert ahead[part] == pytest.approx(waited[part], rel=0.2)
