"""`PredictionTable` in several processes: one table of all, or none."""

import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_memmap import MemmapDataModule, open_store, verify_store
from lightning_memmap.callbacks import PredictionTable, prediction_table
from lightning_memmap.loading import RowList
from lightning_memmap.schema.fields import Values
from lightning_memmap.schema.schema import Schema
from lightning_memmap.store.directory import StoreDirectory
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.table import TableBuild, TableWriter
from lightning_memmap.strategies import SuperBatchDDPStrategy
from tests.support.datasets import in_dataset_order
from tests.support.models import Points, Regression, make_trainer
from tests.support.processes import launch, launch_any
from tests.support.store.layout import is_empty

pytestmark = pytest.mark.slow


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


ROWS = 101
#: Tables that come to be: of two data-parallel ranks by ddp and with data devices in groups, of two
#: processes that share a rank and its rows, and of a stock loader.
WHOLE = ("data module", "groups", "shared", "stock")


def assert_holds_predictions(path: Path, rows: int = ROWS) -> None:
    points = Points(rows)
    found = in_dataset_order(open_store(path))
    assert found["row"].tolist() == points.row.tolist()
    with torch.no_grad():
        torch.testing.assert_close(found["y"], Regression().net(points.x))
    assert verify_store(path) == []


def test_ddp_tables_of_all_ranks_are_whole_or_refused_by_all(tmp_path: Path) -> None:
    ranks = launch(tables, tmp_path, processes=2, rows=ROWS)
    for rank in ranks:
        for name in (*WHOLE, "several", "sizes"):
            assert rank[name] == "", name
        assert "202 rows were written, and the table has 101" in rank["twice"]
        for name, difference in (("dtype", "row int32"), ("apart", str(tmp_path / "1" / "apart"))):
            assert rank[name].startswith("RankMismatchError: ")
            assert difference in rank[name]
            assert "on rank 0; 101 rows of " in rank[name]
    held = f"StoreError: another process is writing the store at {tmp_path / 'held'}: it "
    held += f"holds {tmp_path / 'held' / '.lock'}; wait for it"
    assert ranks[0]["held"] == held
    assert ranks[1]["held"] == f"RankMismatchError: another process failed. rank 0: {held}"
    assert ranks[0]["unforeseen"].startswith("RankMismatchError: ")
    assert "rank 1: MemoryError: too large" in ranks[0]["unforeseen"]
    assert ranks[1]["unforeseen"] == "MemoryError: too large"
    for name in WHOLE:
        assert_holds_predictions(tmp_path / name)
    # A rank's first batch shows that lengths differ; both together, that widths do.
    sizes = open_store(tmp_path / "sizes")
    assert sizes.schema.fields[0].num_variable == 2
    found = [sizes[row]["mask"] for row in range(ROWS)]
    assert all((mask == row).all() and len(mask) == 1 + row % 3 for row, mask in enumerate(found))
    assert {mask.shape[1] for mask in found} == {3, 5}
    assert_holds_predictions(tmp_path / "several" / "short", 7)
    assert_holds_predictions(tmp_path / "several" / "long")
    assert open_store(tmp_path / "data module").num_shards == 6
    for name in ("held", "unforeseen", "twice", "dtype", "apart"):
        assert all(map(is_empty, tmp_path.rglob(name)))


def test_ddp_rank_killed_in_the_middle_leaves_the_old_table(tmp_path: Path) -> None:
    write_old_table(tmp_path / "table")
    outcome = launch_any(die, tmp_path, processes=2, to_the_last=True, rows=ROWS)
    assert (tmp_path / "died").exists()
    assert outcome.codes != [0]
    assert in_dataset_order(open_store(tmp_path / "table"))["value"].tolist() == [7, 8, 9]
    assert verify_store(tmp_path / "table") == []


def write_old_table(path: Path) -> None:
    values = torch.tensor([7, 8, 9])
    draft = Manifest.draft(3, 2, Schema.from_batch(values))
    build = TableBuild(path, draft)
    writer = TableWriter(path, draft, build.token)
    writer.write(range(3), [Values(values)])
    writer.close()
    build.finish(3)
