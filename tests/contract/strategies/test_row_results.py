"""`RowResults` under each strategy: the value of each row is the one of its last step."""

from itertools import chain
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lightning_memmap import MemmapDataModule
from lightning_memmap.callbacks import RowResults
from lightning_memmap.errors import MemmapError, RankMismatchError, StoreError
from lightning_memmap.ranks import gather_from_ranks
from lightning_memmap.results import Results, read_row_results
from lightning_memmap.sampling import RandomSplit, Weighted
from tests.support.models import Points, Regression, make_trainer
from tests.support.processes import each_case, in_processes, launch


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


def read_table(path: Path) -> dict[str, Any]:
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
        "train": read_table(out / "train"),
        "val": read_table(out / "val"),
        "last": sorted((row, step) for row, step in rows.items() if step >= 1000),
    }


NUM_ROWS = 61


def assert_complete(results: dict[str, Any]) -> None:
    """Check the results of a training with constant weights, row by row."""
    points = Points(NUM_ROWS)
    module = Regression()
    train = results["train"]
    val = results["val"]
    expected = dict(results["last"])
    seen = [row for row, is_seen in enumerate(train["seen"]) if is_seen]
    held_out = [row for row, is_seen in enumerate(val["seen"]) if is_seen]
    assert seen == [*expected]
    assert not {*seen} & {*held_out}
    assert len(held_out) == 15
    assert [train["step"][row] for row in seen] == [*expected.values()]
    for table, rows in ((train, seen), (val, held_out)):
        assert {*table["epoch"]} == {1}
        assert len(table["row"]) == NUM_ROWS
        for row in rows:
            loss = (module(points.x[row]) - points.y[row]).square().item()
            assert table["row"][row] == row
            assert table["x"][row] == points.x[row].tolist()
            assert table["row_loss"][row] == pytest.approx(loss, rel=1e-5, abs=1e-7)
        for row in {*range(NUM_ROWS)} - {*rows}:
            assert torch.tensor(table["x"][row]).isnan().all()
            assert table["step"][row] == 0


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("strategy", ["memmap_superbatch", "memmap_dp"])
def test_row_results_in_one_process_equal_rows_computed_alone(
    tmp_path: Path, strategy: str, devices: int
) -> None:
    results = under(tmp_path, strategy, devices)
    assert len(results["last"]) == NUM_ROWS - 15
    assert_complete(results)


@pytest.mark.parametrize(
    "options",
    [
        {"weighted": True},
        {"accumulate_grad_batches": 3},
        {"precision": "bf16-mixed"},
        {"limit_train_batches": 3},
    ],
    ids=lambda options: "-".join(options),
)
def test_row_results_with_options_have_the_last_value(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    results = under(tmp_path, "memmap_superbatch", 2, **options)
    if "precision" in options:
        losses = results["train"].pop("row_loss")
        results["train"]["row_loss"] = results["val"]["row_loss"] = _losses()
        seen = torch.tensor(results["train"]["seen"])
        torch.testing.assert_close(
            torch.tensor(losses)[seen], torch.tensor(_losses())[seen], rtol=0.1, atol=0.05
        )
    assert_complete(results)


def _losses() -> list[float]:
    points = Points(NUM_ROWS)
    losses: list[float] = (Regression()(points.x) - points.y).square().flatten().tolist()
    return losses


@in_processes(2)
def test_row_results_of_two_processes_equal_rows_computed_alone(tmp_path: Path) -> None:
    for _, strategy in each_case(["memmap_superbatch_ddp", "ddp", "memmap_fsdp2"]):
        assert_complete(under(tmp_path, strategy, 2))


def test_row_that_is_drawn_twice_has_the_value_of_one_process(tmp_path: Path) -> None:
    options = {"strategy": "ddp", "devices": 2, "weighted": True}
    alone = under(tmp_path, "memmap_superbatch", 2, weighted=True)
    for rank in launch(under, tmp_path, processes=2, **options):
        assert_complete(rank)
        assert rank["train"]["step"] == alone["train"]["step"]


@in_processes(2)
def test_row_results_of_other_fields_on_a_rank_raise_on_all(tmp_path: Path) -> None:
    callbacks = [RowResults(tmp_path / "train", KEYS)]
    trainer = make_trainer(tmp_path, strategy="ddp", devices=2, callbacks=callbacks)
    data = MemmapDataModule(Points(61), store_dir=tmp_path / "stores", batch_size=4, num_shards=4)
    with pytest.raises(MemmapError) as raised:
        trainer.fit(PerRow(torch.int32), data)
    assert type(raised.value) is (StoreError, RankMismatchError)[trainer.global_rank]
    assert trainer.global_rank or "step int32" in str(raised.value)


class SlowOnRankOne(RowResults):
    def _write_all(self, trainer: Any) -> None:
        sleep(0.3 * trainer.global_rank)
        super()._write_all(trainer)


class CountingRows(TorchCheckpointIO):
    """Counts the rows that have results when a checkpoint is saved."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self.counts: list[int] = []

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        parts = self.results.glob("parts/*/*/marks")
        self.counts.append(sum(marks.read_bytes().count(1) for marks in parts))
        super().save_checkpoint(*args, **kwargs)


@in_processes(2)
def test_checkpoint_is_saved_once_all_ranks_have_written_their_rows(tmp_path: Path) -> None:
    counting = CountingRows(tmp_path / "r")
    trainer = make_trainer(
        tmp_path,
        strategy="ddp",
        devices=2,
        enable_checkpointing=True,
        plugins=[counting],
        callbacks=[
            SlowOnRankOne(tmp_path / "r", ["row"]),
            ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=3),
        ],
    )
    data = MemmapDataModule(Points(61), store_dir=tmp_path / "stores", batch_size=4, num_shards=4)
    trainer.fit(PerRow(), data)
    assert counting.counts == ([24, 48] if trainer.is_global_zero else [])


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


def test_two_processes_train_from_the_results_of_both(tmp_path: Path) -> None:
    alone = from_own_results(tmp_path / "alone", "memmap_superbatch", 2)
    ranks = launch(from_own_results, tmp_path, processes=2, strategy="ddp", devices=2)
    assert ranks[0]["steps"] == ranks[1]["steps"] == alone["steps"]
    assert sorted(chain(*alone["steps"][:8])) == [*range(NUM_ROWS)]
    assert sorted(chain(*alone["steps"][8:16])) != [*range(NUM_ROWS)]
