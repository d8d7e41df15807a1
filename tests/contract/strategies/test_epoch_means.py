"""Means over an epoch that a module logs with ``sync_dist=True`` are those of one process."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_memmap import MemmapDataModule
from tests.support.models import Points, Regression, make_trainer
from tests.support.processes import each_case, in_processes
from tests.support.training import make_strategy

#: Neither two nor four processes divide them, nor the rows of their last steps.
TRAIN_ROWS, VAL_ROWS = 101, 39


class Logging(Regression):
    """Logs, in training and validation, a constant and the numbers of its rows."""

    def step(self, batch: dict[str, Tensor], stage: str) -> Tensor:
        rows = batch["row"].float()
        for name, value, reduction in (
            ("one", 1.0, "mean"),
            ("row", rows.mean(), "mean"),
            ("double", batch["row"].double().mean(), "mean"),
            ("sum", rows.sum(), "sum"),
            ("max", rows.max(), "max"),
        ):
            self.log(
                f"{stage}_{name}",
                value,
                on_step=False,
                on_epoch=True,
                sync_dist=True,
                batch_size=len(rows),
                reduce_fx=reduction,
            )
        return self.loss(self(batch["x"]), batch)


RIGHT = {
    "train_one": (torch.float32, 1.0),
    "train_row": (torch.float32, (TRAIN_ROWS - 1) / 2),
    "train_double": (torch.float64, (TRAIN_ROWS - 1) / 2),
    "train_sum": (torch.float32, sum(range(TRAIN_ROWS))),
    "train_max": (torch.float32, TRAIN_ROWS - 1),
    "val_one": (torch.float32, 1.0),
    "val_row": (torch.float32, 1000 + (VAL_ROWS - 1) / 2),
    "val_double": (torch.float64, 1000 + (VAL_ROWS - 1) / 2),
    "val_sum": (torch.float32, sum(range(1000, 1000 + VAL_ROWS))),
    "val_max": (torch.float32, 1000 + VAL_ROWS - 1),
}


@in_processes(2)
def test_means_over_an_epoch_are_exact(tmp_path: Path) -> None:
    for _, (strategy, batch_size) in each_case(
        [("memmap_superbatch_ddp", 6), ("memmap_fsdp2", 6), ("memmap_pipeline", 12)]
    ):
        check_means(tmp_path, strategy, 2, batch_size, None)


@in_processes(4)
def test_means_over_an_epoch_of_two_pipelines_are_exact(tmp_path: Path) -> None:
    check_means(tmp_path, "memmap_pipeline", 4, 6, {"data_parallel_size": 2})


def check_means(
    out: Path, strategy: str, devices: int, batch_size: int, options: dict[str, Any] | None
) -> None:
    data = MemmapDataModule(
        Points(TRAIN_ROWS),
        Points(VAL_ROWS, 1000),
        store_dir=out / "stores",
        batch_size=batch_size,
    )
    trainer = make_trainer(out, strategy=make_strategy(strategy, options), devices=devices)
    trainer.fit(Logging(), data)
    logged = {name: (mean.dtype, mean.item()) for name, mean in trainer.callback_metrics.items()}
    assert logged == RIGHT
    # A count of more digits than a float32 has.
    count = torch.tensor(2**53 // 3)
    assert trainer.strategy.reduce(count).item() == count
    counts = torch.tensor([trainer.global_rank, 3], dtype=torch.float64)
    assert trainer.strategy.reduce(counts) is not counts
    assert counts.tolist() == [trainer.global_rank, 3]
