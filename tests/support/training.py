"""Fit and test a small regression under any strategy, and return what each rank saw."""

from pathlib import Path
from typing import Any

from torch import Tensor
from torchmetrics import MeanMetric

from lightning_memmap import MemmapDataModule
from lightning_memmap.strategies import STRATEGIES
from tests.support.models import (
    Points,
    Regression,
    make_trainer,
    weights,
)


class Recorder(Regression):
    """Regression with a metric that is synchronised over the processes."""

    def __init__(self) -> None:
        super().__init__()
        self.test_mean = MeanMetric()
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.step(batch, "train")
        self.losses.append(loss.item())
        return loss

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.seen.setdefault("test", []).append(batch["row"].tolist())
        self.test_mean.update(batch["y"])
        self.log("test_mean", self.test_mean)


def make_strategy(name: str, options: dict[str, Any] | None) -> Any:
    """A name for the Trainer, or with options an object of this pack."""
    if options is None:
        return name
    return {entry[0]: entry[1] for entry in STRATEGIES}[name](**options)


def fit_and_test(
    out: Path,
    strategy: str,
    devices: int,
    batch_size: int,
    rows: int,
    num_nodes: int = 1,
    strategy_options: dict[str, Any] | None = None,
    skip_steps: list[int] | None = None,
    prefetch: int | None = None,
) -> dict[str, Any]:
    """Train for two epochs and test once."""
    data = MemmapDataModule(
        Points(rows),
        None,
        Points(rows - 3, 5000),
        store_dir=out / "stores",
        batch_size=batch_size,
        skip_steps=skip_steps,
        prefetch=prefetch,
    )
    trainer = make_trainer(
        out,
        strategy=make_strategy(strategy, strategy_options),
        devices=devices,
        num_nodes=num_nodes,
        max_epochs=2,
    )
    module = Recorder()
    trainer.fit(module, data)
    (metrics,) = trainer.test(module, data, verbose=False)
    return {
        "seen": module.seen,
        "losses": module.losses,
        "weights": weights(module),
        "test_mean": metrics["test_mean"],
    }
