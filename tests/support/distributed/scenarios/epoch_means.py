"""What a module logs as means over an epoch, on several processes."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_memmap import MemmapDataModule
from tests.support.distributed.scenarios.training import make_strategy
from tests.support.models import Points, Regression, make_trainer

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


def run(
    out: Path,
    strategy: str,
    devices: int,
    batch_size: int,
    strategy_options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train and validate for an epoch. The means, as dtype and value."""
    data = MemmapDataModule(
        Points(TRAIN_ROWS),
        Points(VAL_ROWS, 1000),
        store_dir=out / "stores",
        batch_size=batch_size,
    )
    trainer = make_trainer(out, strategy=make_strategy(strategy, strategy_options), devices=devices)
    trainer.fit(Logging(), data)
    strategy_made = trainer.strategy
    counts = torch.tensor([trainer.global_rank, 3])
    return {
        "logged": {
            name: (value.dtype, value.item()) for name, value in trainer.callback_metrics.items()
        },
        # A count of more digits than a float32 has.
        "large": strategy_made.reduce(torch.tensor(2**53 // 3)).item(),
        "left as it was": (strategy_made.reduce(counts) is not counts) and counts.tolist(),
    }
