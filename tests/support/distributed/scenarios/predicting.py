"""Predict under any strategy into tables, and tell what each rank was told."""

import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_memmap import MemmapDataModule
from lightning_memmap.callbacks import PredictionTable, prediction_table
from lightning_memmap.loading import RowList
from lightning_memmap.store.directory import StoreDirectory
from lightning_memmap.strategies import SuperBatchDDPStrategy
from tests.support.models import Points, Regression, make_trainer


class Failing(Regression):
    """Returns rows of another dtype on the last rank, or dies there in its third step and leaves
    a mark."""

    def __init__(self, dtype: torch.dtype = torch.int64, mark: Path | None = None) -> None:
        super().__init__()
        self.dtype_there = dtype
        self.mark = mark

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        if self.global_rank == 0:
            return super().predict_step(batch, batch_idx)
        if batch_idx == 2 and self.mark is not None:
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        prediction = super().predict_step(batch, batch_idx)
        return {**prediction, "row": prediction["row"].to(self.dtype_there)}


class OfSizes(Regression):
    """Returns rows of one width on each rank, and of several lengths."""

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        rows, width = batch["row"].tolist(), 3 + 2 * self.global_rank
        return {"mask": RowList(torch.full((1 + row % 3, width), row) for row in rows)}


class OfSeveral(Regression):
    """Predicts on several sets of rows."""

    def predict_step(  # type: ignore[override]
        self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int
    ) -> dict[str, Tensor]:
        return super().predict_step(batch, batch_idx)


class Configured(Regression):
    """Says how it is divided, which is not at all: a strategy of several processes asks for it."""

    def configure_model(self) -> None:
        pass


def predict(out: Path, name: str, module: Regression, source: Any, **options: Any) -> str:
    """Predict into the table ``name``; an empty text, or the error."""
    callback = PredictionTable(out / name, overwrite=True)
    trainer = make_trainer(out, **{"strategy": "ddp", "devices": 2} | options, callbacks=[callback])
    key = "dataloaders" if isinstance(source, DataLoader) else "datamodule"
    try:
        trainer.predict(module, **{key: source}, return_predictions=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def tables(out: Path, rows: int) -> dict[str, Any]:
    """Tables that come to be, and others that every rank must refuse."""
    stock = DataLoader(Points(rows), batch_size=4)
    data = MemmapDataModule(
        predict_dataset=Points(rows), store_dir=out / "stores", batch_size=8, num_shards=6
    )
    several = MemmapDataModule(
        predict_dataset={"short": Points(7), "long": Points(rows)},
        store_dir=out / "several stores",
        batch_size=8,
        num_shards=6,
    )
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    # As if another run wrote there: rank zero alone notices.
    other_run = StoreDirectory(out / "held").locked() if rank == 0 else nullcontext()
    with other_run:
        held = predict(out, "held", Regression(), data)
    # An error that the pack does not raise itself, on rank one alone.
    error = MemoryError("too large")
    failing = patch.object(prediction_table, "TableWriter", side_effect=error)
    with failing if rank == 1 else nullcontext():
        unforeseen = predict(out, "unforeseen", Regression(), data)
    return {
        "unforeseen": unforeseen,
        "held": held,
        "data module": predict(out, "data module", Regression(), data),
        "groups": predict(
            out,
            "groups",
            Regression(),
            data,
            strategy=SuperBatchDDPStrategy(data_devices_per_process=2),
            devices=4,
        ),
        "shared": predict(
            out,
            "shared",
            Configured(),
            data,
            strategy=ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2),
        ),
        "stock": predict(out, "stock", Regression(), stock),
        "several": predict(out, "several", OfSeveral(), several),
        "sizes": predict(out, "sizes", OfSizes(), data),
        "twice": predict(out, "twice", Regression(), stock, use_distributed_sampler=False),
        "dtype": predict(out, "dtype", Failing(torch.int32), data),
        "apart": predict(out / str(rank), "apart", Regression(), data),
    }


def die(out: Path, rows: int) -> dict[str, Any]:
    """The last rank dies in its third step."""
    data = MemmapDataModule(predict_dataset=Points(rows), store_dir=out / "stores", batch_size=8)
    return {"error": predict(out, "table", Failing(mark=out / "died"), data)}
