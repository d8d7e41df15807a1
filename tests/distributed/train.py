"""What one process of a distributed run does; started by the tests, or by torchrun.

Each rank writes what it saw to ``<out>/rank<r>.pt``.
"""

import argparse
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_memmap import MemmapDataModule
from tests.models import Points, Regression, make_trainer, weights


class Recorder(Regression):
    """Regression with a metric that is synchronised over the processes."""

    def __init__(self) -> None:
        super().__init__()
        self.test_mean = MeanMetric()

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.seen.setdefault("test", []).append(batch["row"].tolist())
        self.test_mean.update(batch["y"])
        self.log("test_mean", self.test_mean)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--num_nodes", type=int, default=1)
    parser.add_argument("--batch_size", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--test_rows", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    data = MemmapDataModule(
        Points(args.rows),
        None,
        Points(args.test_rows, 5000),
        store_dir=args.out / "stores",
        batch_size=args.batch_size,
    )
    trainer = make_trainer(
        args.out,
        strategy=args.strategy,
        devices=args.devices,
        num_nodes=args.num_nodes,
        max_epochs=2,
    )
    module = Recorder()
    trainer.fit(module, data)
    (metrics,) = trainer.test(module, data, verbose=False)
    result: dict[str, Any] = {
        "world_size": trainer.world_size,
        "seen": module.seen,
        "weights": weights(module),
        "test_mean": metrics["test_mean"],
    }
    torch.save(result, args.out / f"rank{trainer.global_rank}.pt")


if __name__ == "__main__":
    main()
