"""Lightning's tuner over the loaders of a data module."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_memmap import MemmapDataModule
from tests.support.models import Points, Regression, make_trainer

pytestmark = pytest.mark.slow


def make_data(path: Path, **options: Any) -> MemmapDataModule:
    splits = Points(88), Points(12, 1000)
    return MemmapDataModule(*splits, store_dir=path / "stores", batch_size=2, **options)


class Recorder(Regression):
    """Notes the rows that it is trained on from the start of training on."""

    def on_train_start(self) -> None:
        self.seen.clear()


@pytest.mark.parametrize(
    ("strategy", "devices", "drop_last", "mode", "found"),
    [
        ("auto", 1, False, "power", 128),
        ("memmap_superbatch", 4, False, "binsearch", 32),
        ("memmap_superbatch", 4, True, "power", 16),
        ("memmap_dp", 2, True, "binsearch", 32),
    ],
)
def test_batch_size_finder_ends_with_the_rows_of_a_data_device(
    tmp_path: Path, strategy: str, devices: int, drop_last: bool, mode: Any, found: int
) -> None:
    data = make_data(tmp_path, drop_last=drop_last)
    trainer = make_trainer(
        tmp_path,
        strategy=strategy,
        devices=devices,
        callbacks=[BatchSizeFinder(mode, steps_per_trial=1, init_val=8, margin=0.0)],
        num_sanity_val_steps=0,
    )
    module = Recorder()
    trainer.fit(module, data)
    assert data.batch_size == found
    # The fit that follows uses it.
    num_rows = [len(batch) for batch in module.seen["train"]]
    assert sum(num_rows) >= 88 - drop_last * (devices * found - 1)
    assert max(num_rows) <= found * devices


def test_overfitting_with_a_shuffled_loader_beside_ours_is_possible(tmp_path: Path) -> None:
    class Both(MemmapDataModule):
        def train_dataloader(self) -> Any:
            other = DataLoader(torch.arange(12), batch_size=4, shuffle=True)
            return CombinedLoader({"ours": super().train_dataloader(), "other": other})

    class Module(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.step(batch["ours"], "train")

    data = Both(Points(24), store_dir=tmp_path / "stores", batch_size=4)
    trainer = make_trainer(tmp_path, overfit_batches=2)
    with pytest.warns(UserWarning, match="turning off the train dataloader shuffling"):
        trainer.fit(Module(), data)
    assert trainer.global_step == 2
