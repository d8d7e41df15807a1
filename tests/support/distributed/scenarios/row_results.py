"""Write results per row under any strategy, and return what is expected and what was read."""

from itertools import chain
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lightning_memmap import MemmapDataModule
from lightning_memmap.callbacks import RowResults
from lightning_memmap.errors import MemmapError
from lightning_memmap.ranks import gather_from_ranks
from lightning_memmap.results import Results, read_row_results
from lightning_memmap.sampling import RandomSplit, Weighted
from tests.support.models import Points, Regression, make_trainer


class PerRow(Regression):
    """Returns its loss, the row and the step for each row, and keeps its weights."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__(lr=0.0)
        self.odd_dtype = dtype
        #: By row, the value of its last step in the epoch, as (batch index, row).
        self.last: dict[int, int] = {}

    def configure_model(self) -> None:
        pass

    def per_row(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        losses = (self(batch["x"]) - batch["y"]).square().mean(1)
        step = torch.full_like(batch["row"], batch_idx + 1000 * self.current_epoch)
        if self.odd_dtype is not None and self.global_rank == 1:
            step = step.to(self.odd_dtype)
        rows = batch["row"]
        return {
            "loss": losses.mean(),
            "row_loss": losses,
            "x": batch["x"],
            "row": rows,
            "step": step,
        }

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        for row in batch["row"].tolist():
            self.last[row] = batch_idx + 1000 * self.current_epoch
        return self.per_row(batch, batch_idx)

    def validation_step(
        self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> Any:
        return self.per_row(batch, batch_idx)


KEYS = ["row_loss", "x", "row", "step"]


def table(path: Path) -> dict[str, Any]:
    """Return the last results as lists."""
    return {name: value.tolist() for name, value in read_row_results(path).items()}


def under(
    out: Path, strategy: str | Strategy, devices: int, name: str = "", **options: Any
) -> dict[str, Any]:
    """Train and validate, and return the results of both and each row's last step here."""
    out = out / (name or str(strategy))
    weights = torch.linspace(0.1, 3, 61) if options.pop("weighted", False) else None
    callbacks = [
        RowResults(out / "train", KEYS),
        RowResults(out / "val", KEYS, split="val"),
    ]
    trainer = make_trainer(
        out, strategy=strategy, devices=devices, max_epochs=2, callbacks=callbacks, **options
    )
    data = MemmapDataModule(
        Points(61),
        store_dir=out / "stores",
        batch_size=8 // devices,
        num_shards=4,
        subset=RandomSplit(0.25),
        sampler=None if weights is None else Weighted(weights),
    )
    module = PerRow()
    trainer.fit(module, data)
    trainer.strategy.barrier()
    rows = {row: step for last in gather_from_ranks(module.last) for row, step in last.items()}
    return {
        "train": table(out / "train"),
        "val": table(out / "val"),
        "last": sorted((row, step) for row, step in rows.items() if step >= 1000),
    }


def several(out: Path, strategies: dict[str, Any], devices: int) -> dict[str, Any]:
    """Return the results under several strategies."""
    return {
        name: under(out, strategy, devices, name, weighted=name.endswith("weighted"))
        for name, strategy in strategies.items()
    }


def disagreeing(out: Path) -> dict[str, Any]:
    """Return the error when a rank has results of another dtype."""
    trainer = make_trainer(
        out, strategy="ddp", devices=2, callbacks=[RowResults(out / "train", KEYS)]
    )
    data = MemmapDataModule(Points(61), store_dir=out / "stores", batch_size=4, num_shards=4)
    try:
        trainer.fit(PerRow(torch.int32), data)
    except MemmapError as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": ""}


class ByRow(Regression):
    """Returns a weight that depends on the row alone, and keeps the rows of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[int]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        rows = batch["row"]
        self.steps.append(rows.tolist())
        losses = (self(batch["x"]) - batch["y"]).square().mean(1)
        return {"loss": losses.mean(), "weight": rows % 5 + 0.5}


def from_own_results(out: Path, strategy: str, devices: int) -> dict[str, Any]:
    """Return the rows of each step, of all processes, where epochs depend on results."""
    column = Results(out / "results", "weight", each_epoch=True)
    trainer = make_trainer(
        out,
        strategy=strategy,
        devices=devices,
        max_epochs=3,
        callbacks=[RowResults(out / "results", ["weight"])],
    )
    data = MemmapDataModule(
        Points(61),
        store_dir=out / "stores",
        batch_size=8 // devices,
        num_shards=4,
        sampler=Weighted(column),
    )
    module = ByRow()
    trainer.fit(module, data)
    ranks = gather_from_ranks(module.steps)
    return {"steps": [sorted(chain(*rows)) for rows in zip(*ranks, strict=True)]}
