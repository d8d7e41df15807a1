"""Checkpoints are exchanged with fits through a DataLoader: a program can change over and back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_memmap import MemmapDataModule
from tests.support.models import Points, Regression, make_trainer, weights

NUM_ROWS, BATCH_SIZE = 48, 8


def make_loader(path: Path, name: str) -> Any:
    """Serve the same rows in dataset order, from a store or by torch."""
    if name == "torch":
        return DataLoader(Points(NUM_ROWS), BATCH_SIZE)
    return MemmapDataModule(
        Points(NUM_ROWS), store_dir=path / "stores", batch_size=BATCH_SIZE, shuffle=False
    )


def fit(path: Path, name: str, checkpoint: Path | None = None, **options: Any) -> Regression:
    module = Regression()
    trainer = make_trainer(path, **options)
    trainer.fit(module, make_loader(path, name), ckpt_path=checkpoint)
    trainer.save_checkpoint(path / f"{name}.ckpt")
    return module


@pytest.mark.parametrize(("first", "second"), [("torch", "store"), ("store", "torch")])
def test_checkpoint_of_an_epoch_resumes_with_the_other_loader(
    tmp_path: Path, first: str, second: str
) -> None:
    whole = fit(tmp_path, first, max_epochs=2)
    fit(tmp_path, first, max_epochs=1)
    # Nothing in it needs this package.
    torch.load(tmp_path / f"{first}.ckpt", weights_only=True)
    resumed = fit(tmp_path, second, tmp_path / f"{first}.ckpt", max_epochs=2)
    assert resumed.seen["train"] == whole.seen["train"][6:]
    assert torch.equal(weights(resumed), weights(whole))
