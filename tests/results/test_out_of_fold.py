"""Results of several members, joined: the rows that each fold held out in one table."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_memmap import MemmapDataModule
from lightning_memmap.callbacks import RowResults
from lightning_memmap.errors import StoreError
from lightning_memmap.results import Results, read_row_results
from lightning_memmap.sampling import KFold, Subset
from lightning_memmap.sampling.columns import DatasetIdentity
from tests.support.models import Points, Regression, make_trainer
from tests.support.preloaded import run

NUM_ROWS = 61


class HeldOut(Regression):
    """Returns what it predicts for rows that it validates on."""

    def __init__(self, offset: float = 0) -> None:
        super().__init__()
        self.offset = offset

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        prediction = self(batch["x"]) + self.offset
        return {"prediction": prediction, "row": batch["row"], "fold": self.fold(batch["row"])}

    def fold(self, row: Tensor) -> Tensor:
        return torch.full_like(row, int(self.offset))


def fit_member(path: Path, member: int, fold: int, num_epochs: int = 1) -> HeldOut:
    module = HeldOut(member)
    trainer = make_trainer(
        path,
        max_epochs=num_epochs,
        limit_val_batches=None,
        callbacks=[RowResults(path / f"fold_{member}", ["prediction", "row", "fold"], split="val")],
    )
    data = MemmapDataModule(
        Points(NUM_ROWS),
        store_dir=path / "stores",
        batch_size=8,
        subset=KFold(3, seed=1),
        member=fold,
    )
    trainer.fit(module, data)
    return module


def test_each_row_has_the_prediction_of_the_member_that_held_it_out(tmp_path: Path) -> None:
    modules = [fit_member(tmp_path, fold, fold, num_epochs=1 + fold) for fold in range(3)]
    table = read_row_results(tmp_path / "fold_{member}")
    assert table.batch_size == (NUM_ROWS,)
    assert table["seen"].all()
    assert torch.equal(table["row"], torch.arange(NUM_ROWS))
    assert sorted(table["fold"].bincount().tolist()) == [20, 20, 21]
    assert torch.equal(table["epoch"], table["fold"])
    points = Points(NUM_ROWS)
    for fold, module in enumerate(modules):
        rows = table["fold"] == fold
        expected = module(points.x[rows]) + fold
        torch.testing.assert_close(table["prediction"][rows], expected.detach())
    column = Results(tmp_path / "fold_{member}", function=lambda joined: joined["prediction"][:, 0])
    assert torch.equal(
        torch.from_numpy(column.read(DatasetIdentity(NUM_ROWS, {})).values),
        table["prediction"][:, 0],
    )


def test_rows_of_several_members_have_the_mean(tmp_path: Path) -> None:
    for member in range(6):
        fit_member(tmp_path, member, member % 3)
    with pytest.raises(StoreError, match="fold"):
        read_row_results(tmp_path / "fold_{member}")
    members = [read_row_results(tmp_path / f"fold_{member}") for member in range(6)]
    for member in range(6):
        results = RowResults(tmp_path / "means" / str(member), ["prediction"], split="val")
        make_trainer(tmp_path, callbacks=[results]).validate(
            HeldOut(member),
            MemmapDataModule(
                Points(NUM_ROWS),
                store_dir=tmp_path / "stores",
                subset=KFold(3, seed=1),
                member=member % 3,
            ),
            verbose=False,
        )
    table = read_row_results(tmp_path / "means" / "{member}")
    predictions = torch.stack([member["prediction"] for member in members])
    assert predictions.isnan().sum() == 4 * NUM_ROWS
    assert table["seen"].all()
    # Untrained weights are equal, and members add their numbers.
    expected = Regression()(Points(NUM_ROWS).x)[:, 0]
    folds = torch.stack([members[fold]["seen"] * fold for fold in range(3)]).sum(0)
    torch.testing.assert_close(table["prediction"][:, 0], (expected + folds + 1.5).detach())


def test_row_that_no_member_held_out_is_masked(tmp_path: Path) -> None:
    fit_member(tmp_path, 0, 0)
    fit_member(tmp_path, 2, 2)
    table = read_row_results(tmp_path / "fold_{member}")
    assert 0 < int((~table["seen"]).sum()) < 22
    assert torch.equal(table["prediction"][:, 0].isnan(), ~table["seen"])
    with pytest.raises(ValueError, match="keep"):
        read_row_results(tmp_path / "fold_{member}", "all")
    with pytest.raises(StoreError, match="none"):
        read_row_results(tmp_path / "none_{member}")
    with pytest.raises(ValueError, match="member"):
        Results(tmp_path / "fold_{member}", "prediction", each_epoch=True)
    assert Subset(field=Results(tmp_path / "fold_{member}", "row"), values=[1])


def test_members_of_different_datasets_are_an_error(tmp_path: Path) -> None:
    fit_member(tmp_path, 0, 0)
    results = tmp_path / "fold_1"
    make_trainer(tmp_path, callbacks=[RowResults(results, ["row"], split="val")]).validate(
        HeldOut(),
        MemmapDataModule(None, Points(NUM_ROWS, offset=1), store_dir=tmp_path / "other"),
        verbose=False,
    )
    assert read_row_results(results)["row"].tolist() == [*range(1, NUM_ROWS + 1)]
    with pytest.raises(StoreError, match="another dataset"):
        read_row_results(tmp_path / "fold_{member}")


PROGRAM = """
from pathlib import Path

import lightning as L
import torch

from lightning_memmap import MemmapDataModule
from lightning_memmap.callbacks import RowResults
from lightning_memmap.results import read_row_results
from lightning_memmap.sampling import KFold
from lightning_memmap.strategies import IndependentStrategy
from tests.results.test_out_of_fold import NUM_ROWS, HeldOut
from tests.support.models import Points

strategy = IndependentStrategy(num_members=3)
trainer = L.Trainer(
    accelerator="cpu",
    strategy=strategy,
    devices=3,
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir="members",
    callbacks=[RowResults("results/fold_{member}", ["prediction", "row"], split="val")],
)
data = MemmapDataModule(Points(NUM_ROWS), store_dir="stores", batch_size=8, subset=KFold(3))
trainer.fit(HeldOut(), data)
if strategy.results is not None:
    strategy.results.check()
    table = read_row_results("results/fold_{member}")
    assert table["seen"].all()
    assert torch.equal(table["row"], torch.arange(NUM_ROWS))
    print("joined", table["prediction"].isfinite().sum().item())
"""


@pytest.mark.slow
def test_members_of_memmap_independent_are_joined_by_one_call(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = run(program, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"joined {NUM_ROWS}" in done.stdout
