"""How long steps wait for their batches, on simulated GPUs whose operations take time."""

from pathlib import Path
from statistics import median
from typing import Any

import lightning as L

from lightning_memmap import MemmapDataModule
from lightning_memmap.compare.measure import StepClock
from tests.programs.simulated_gpu import devices
from tests.support.models import Points, Regression, make_trainer

#: Long beside what the program itself takes for an operation.
OPERATION_S = 2e-3
STEPS = 8
RESIDENCIES = ("device", "host")


class EndOfSteps(L.Callback):
    def __init__(self) -> None:
        self.clock: StepClock | None = None

    def on_train_batch_end(self, *_: Any) -> None:
        assert self.clock is not None
        self.clock.end_step()


def parts_of(
    path: Path, strategy: str, residency: str, num_devices: int, prefetch: int | None
) -> dict[str, float]:
    """Return the median seconds of each part of a step, with prefetched steps or without."""
    end = EndOfSteps()
    trainer = make_trainer(
        path,
        accelerator="gpu",
        devices=num_devices,
        strategy=strategy,
        max_steps=STEPS,
        limit_val_batches=0,
        callbacks=[end],
    )
    end.clock = clock = StepClock(trainer.strategy.root_device)
    clock.watch(trainer)
    data = MemmapDataModule(
        Points(8 * num_devices * STEPS),
        store_dir=path / "stores",
        batch_size=8,
        residency=residency,
        prefetch=prefetch,
        # Four operations.
        transform=lambda batch: {**batch, "x": batch["x"].neg().neg().neg().neg()},
    )
    with devices.operations_take(OPERATION_S):
        devices.reports.clear()
        trainer.fit(Regression(), datamodule=data)
    steps = clock.steps()
    assert len(steps) == STEPS - 1
    return {part: median(step[part] for step in steps) for part in steps[0]}


def in_processes(out: Path, strategy: str) -> dict[str, Any]:
    """Measure each residency, without prefetched steps and with the default, on two devices."""
    return {
        residency: [parts_of(out, strategy, residency, 2, prefetch) for prefetch in (0, None)]
        for residency in RESIDENCIES
    }
