"""Means over an epoch that a module logs with ``sync_dist=True`` are those of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.distributed.harness import launch
from tests.support.distributed.scenarios.epoch_means import TRAIN_ROWS, VAL_ROWS

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


@pytest.mark.parametrize(
    ("strategy", "processes", "batch_size", "options"),
    [
        ("memmap_superbatch_ddp", 2, 6, None),
        ("memmap_fsdp2", 2, 6, None),
        ("memmap_pipeline", 2, 12, None),
        ("memmap_pipeline", 4, 6, {"data_parallel_size": 2}),
    ],
)
def test_means_over_an_epoch_are_exact(
    tmp_path: Path, strategy: str, processes: int, batch_size: int, options: dict[str, Any] | None
) -> None:
    for rank in launch(
        "epoch_means.run",
        tmp_path,
        processes=processes,
        strategy=strategy,
        devices=processes,
        batch_size=batch_size,
        strategy_options=options,
    ):
        assert rank["logged"] == RIGHT
        assert rank["large"] == 2**53 // 3
        assert rank["left as it was"][1] == 3
