"""Prefetched steps, by the clock of a comparison, on devices whose operations take time."""

from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import pytest
import torch

from lightning_memmap import MemmapDataModule
from lightning_memmap.compare.measure import StepClock
from tests.programs.simulated_gpu import devices
from tests.support.models import Points, Regression, make_trainer
from tests.support.processes import launch

pytestmark = pytest.mark.gpu


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


def check_is_no_stall(waited: dict[str, float], ahead: dict[str, float]) -> None:
    # A step is made by several operations, which are beside the computing if they come in time.
    assert waited["data"] > 3 * OPERATION_S
    assert ahead["data"] < OPERATION_S
    # The model computes the same in both.
    for part in ("forward", "backward", "optimizer"):
        assert ahead[part] > 2 * OPERATION_S
        assert ahead[part] == pytest.approx(waited[part], rel=0.2)


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize(
    ("strategy", "num_devices"), [("memmap_superbatch", 2), ("memmap_dp", 2), ("auto", 1)]
)
def test_steps_are_prefetched_by_default_and_are_no_stall(
    tmp_path: Path, strategy: str, num_devices: int, residency: str
) -> None:
    waited, ahead = (
        parts_of(tmp_path, strategy, residency, num_devices, prefetch) for prefetch in (0, None)
    )
    check_is_no_stall(waited, ahead)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "memmap_superbatch_ddp"])
def test_steps_of_several_processes_are_prefetched_by_default_and_are_no_stall(
    tmp_path: Path, strategy: str
) -> None:
    ranks = launch(in_processes, tmp_path, processes=2, accelerator="gpu", strategy=strategy)
    for rank in ranks:
        for residency in RESIDENCIES:
            check_is_no_stall(*rank[residency])


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_batches_under_fabric_are_prefetched_on_its_device(tmp_path: Path, residency: str) -> None:
    fabric = L.Fabric(accelerator="gpu", devices=1)
    points = Points(64)
    data = MemmapDataModule(points, store_dir=tmp_path, batch_size=8, residency=residency)
    data.use_fabric(fabric)
    data.prepare_data()
    data.setup("fit")
    loader: Any = data.train_dataloader()
    assert loader.loader.prefetch == 2
    batches: Any = fabric.setup_dataloaders(loader)
    rows = []
    for batch in batches:
        assert batch["x"].device == fabric.device
        rows += batch["row"].tolist()
        torch.testing.assert_close(batch["x"].cpu(), points.x[batch["row"].cpu()])
    assert sorted(rows) == list(range(64))
