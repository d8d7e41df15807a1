"""Trains while the store is built, from the last checkpoint if there is one: what tests kill.

``python -m tests.parity.first_epoch_program DIRECTORY`` writes the weights at its end.
"""

import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_memmap import MemmapDataModule
from tests.datasets import Logged
from tests.models import Points, Regression, make_trainer, weights

ROWS = 400


class Slow(Logged):
    """Sleeps before each row."""

    def __getitem__(self, row: int) -> Any:
        time.sleep(0.004)
        return super().__getitem__(row)


def train(path: Path, build: str) -> torch.Tensor:
    """Train for three epochs, and return the weights."""
    data = MemmapDataModule(
        Slow(Points(ROWS), path / "log"),
        Points(40, 5000),
        store_dir=path / "stores",
        batch_size=8,
        num_workers=2,
        fingerprint="1",
        build=build,
    )
    last = path / "last.ckpt"
    saving = ModelCheckpoint(path, save_last=True, every_n_train_steps=3, save_top_k=0)
    trainer = make_trainer(
        path,
        strategy="memmap_superbatch",
        devices=2,
        max_epochs=3,
        callbacks=[saving],
        enable_checkpointing=True,
    )
    module = Regression()
    trainer.fit(module, data, ckpt_path=last if last.exists() else None)
    return weights(module)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    torch.save(train(out, "while_training"), out / "weights.pt")
