"""An existing data module is converted on every rank, and its data prepared on one."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_memmap import MemmapDataModule
from tests.support.distributed.harness import in_processes, launch
from tests.support.models import Points, Regression, make_trainer, weights

pytestmark = pytest.mark.slow


class Divided(L.LightningDataModule):
    """Divides its rows among processes itself, and notes the hooks that are called.

    Args:
        out: Holds a file once `prepare_data` was called.
        fails_on: The rank whose `setup` fails.
    """

    def __init__(self, out: Path, fails_on: int | None = None) -> None:
        super().__init__()
        self.out = out
        self.fails_on = fails_on
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")
        (self.out / "downloaded").touch()

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        self.calls.append(f"setup {stage}")
        if self.trainer.global_rank == self.fails_on:
            raise OSError("no such dataset")
        assert (self.out / "downloaded").exists()
        self.train, self.val = Points(64), Points(32, 100)

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, 8, sampler=DistributedSampler(self.train))

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, 8, sampler=DistributedSampler(self.val, shuffle=False))


def fit(out: Path, strategy: str) -> dict[str, Any]:
    """Train from the converted data module, and from one written by hand."""
    theirs = Divided(out)
    made = MemmapDataModule.from_datamodule(theirs, store_dir=out / "made")
    datasets = Points(64), Points(32, 100)
    written = MemmapDataModule(*datasets, store_dir=out / "by_hand", batch_size=8)
    found: dict[str, Any] = {}
    for name, data in (("made", made), ("by_hand", written)):
        module = Regression()
        trainer = make_trainer(out, strategy=strategy, devices=2, max_epochs=2)
        trainer.fit(module, data)
        found[name] = {"seen": module.seen, "weights": weights(module)}
    return {
        **found,
        "calls": [str(call).replace("TrainerFn.FITTING", "fit") for call in theirs.calls],
    }


@pytest.mark.parametrize("strategy", ["ddp", "memmap_superbatch_ddp"])
def test_converted_data_module_trains_as_one_written_by_hand(tmp_path: Path, strategy: str) -> None:
    ranks = launch(fit, tmp_path, processes=2, strategy=strategy)
    for rank, result in enumerate(ranks):
        assert result["calls"] == ["prepare_data"] * (rank == 0) + ["setup fit"]
        assert result["made"]["seen"] == result["by_hand"]["seen"]
        assert torch.equal(result["made"]["weights"], result["by_hand"]["weights"])
        assert torch.equal(result["made"]["weights"], ranks[0]["made"]["weights"])
    rows = [row for rank in ranks for step in rank["made"]["seen"]["train"][:4] for row in step]
    assert sorted(rows) == list(range(64))


@in_processes(2)
def test_set_up_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    theirs = Divided(tmp_path, fails_on=1)
    data = MemmapDataModule.from_datamodule(theirs, store_dir=tmp_path / "made")
    trainer = make_trainer(tmp_path, strategy="ddp", devices=2)
    with pytest.raises(Exception, match="no such dataset"):
        trainer.fit(Regression(), data)
