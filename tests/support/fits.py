"""Fits of points that save many checkpoints, and may be ended in any of their steps."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_memmap import MemmapDataModule
from tests.support.models import Points, make_trainer
from tests.support.versions import weights_only

NUM_ROWS = 61
NUM_SHARDS = 4


class EndError(Exception):
    """Ends a training."""


def fit(
    path: Path,
    module: L.LightningModule,
    *callbacks: L.Callback,
    checkpoint: Path | None = None,
    max_epochs: int = 3,
    devices: int = 1,
    offset: int = 0,
    **options: Any,
) -> None:
    """Train with 15 steps in each epoch of `NUM_ROWS` rows, and save a checkpoint of every fifth
    step, ``step=5.ckpt``, and of the end of each epoch, ``end-epoch=0.ckpt``.

    Args:
        path: Folder of the checkpoints and the store.
        module: The module.
        *callbacks: Further callbacks, which precede those that save checkpoints.
        checkpoint: The checkpoint to resume from.
        max_epochs: The number of epochs.
        devices: Data devices.
        offset: Of the rows, so that datasets differ.
        **options: Options of the data module.
    """
    trainer = make_trainer(
        path,
        strategy="memmap_superbatch",
        devices=devices,
        max_epochs=max_epochs,
        enable_checkpointing=True,
        callbacks=[
            *callbacks,
            ModelCheckpoint(path, "{step}", save_top_k=-1, every_n_train_steps=5),
            ModelCheckpoint(path, "end-{epoch}", save_top_k=-1, every_n_epochs=1),
        ],
    )
    data = MemmapDataModule(
        Points(NUM_ROWS, offset),
        store_dir=path / "stores",
        batch_size=4 // devices,
        num_shards=NUM_SHARDS,
        **options,
    )
    trainer.fit(module, data, ckpt_path=checkpoint, **weights_only(checkpoint is not None))
