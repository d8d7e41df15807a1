"""Fit and test a small regression under any strategy, and tell what each rank saw."""

from pathlib import Path
from typing import Any

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


def fit_and_test(
    out: Path,
    strategy: str,
    devices: int,
    batch_size: int,
    rows: int,
    num_nodes: int = 1,
) -> dict[str, Any]:
    """Train for two epochs and test once."""
    data = MemmapDataModule(
        Points(rows),
        None,
        Points(rows - 3, 5000),
        store_dir=out / "stores",
        batch_size=batch_size,
    )
    trainer = make_trainer(
        out, strategy=strategy, devices=devices, num_nodes=num_nodes, max_epochs=2
    )
    module = Recorder()
    trainer.fit(module, data)
    (metrics,) = trainer.test(module, data, verbose=False)
    return {"seen": module.seen, "weights": weights(module), "test_mean": metrics["test_mean"]}
