"""A k-fold ensemble on a small table: scikit-learn's breast cancer data.

    python examples/kfold.py
    python examples/kfold.py --processes false
    lightning-memmap fit --config examples/configs/kfold.yaml

One store serves all folds: member ``m`` holds out the rows ``i`` with ``i % num_folds == m`` for
early stopping and for choosing its checkpoint, and trains on the others. The members exchange
nothing. Each has its own process, or all are trained sequentially in one. Their results come back
as one table, and the ensemble averages the probabilities of their best checkpoints.

The data (569 rows of 30 features, 2 classes) comes with scikit-learn. It is the Breast Cancer
Wisconsin (Diagnostic) data of the UCI Machine Learning Repository, by William H. Wolberg,
W. Nick Street and Olvi L. Mangasarian.
"""

from collections.abc import Iterable
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_memmap import MemmapDataModule
from lightning_memmap.strategies import IndependentStrategy


class BreastCancer(Dataset[dict[str, Any]]):
    """scikit-learn's breast cancer data: 455 rows for training, 114 for testing.

    A sample is ``{"features": float32 tensor of shape (30,), "label": 0 or 1}``.

    Args:
        split: ``train`` or ``test``.

    Raises:
        ValueError: An unknown split.
    """

    def __init__(self, split: str) -> None:
        bounds = {"train": (0, 455), "test": (455, 569)}
        if split not in bounds:
            raise ValueError(f"split={split!r}: choose one of {', '.join(bounds)}")
        table = load_breast_cancer()
        rows = np.random.RandomState(0).permutation(len(table.target))[slice(*bounds[split])]
        self.features = torch.from_numpy(table.data[rows].astype(np.float32))
        self.labels = table.target[rows].tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"features": self.features[row], "label": self.labels[row]}


class TableClassifier(L.LightningModule):
    """A small network over a row of numbers, which batch norm scales first.

    Args:
        num_features: Numbers in a row.
        hidden: Width of the hidden layer.
        lr: Learning rate of Adam.
    """

    def __init__(self, num_features: int = 30, hidden: int = 32, lr: float = 5e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.network = nn.Sequential(
            nn.BatchNorm1d(num_features),
            nn.Linear(num_features, hidden),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(hidden, 2),
        )
        self.val_accuracy = MulticlassAccuracy(2, average="micro")
        self.test_accuracy = MulticlassAccuracy(2, average="micro")

    def forward(self, features: Tensor) -> Tensor:
        """Logits of shape (B, 2).

        Args:
            features: float32 of shape (B, num_features).
        """
        logits: Tensor = self.network(features)
        return logits

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The cross-entropy of a batch."""
        return F.cross_entropy(self(batch["features"]), batch["label"])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log ``val_loss`` and ``val_accuracy`` on the rows that the fold holds out."""
        logits = self(batch["features"])
        self.val_accuracy(logits, batch["label"])
        self.log("val_loss", F.cross_entropy(logits, batch["label"]))
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log ``test_accuracy``."""
        self.test_accuracy(self(batch["features"]), batch["label"])
        self.log("test_accuracy", self.test_accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def ensemble_accuracy(checkpoints: Iterable[str], data: BreastCancer) -> float:
    """Test an ensemble that averages the probabilities of its members.

    Args:
        checkpoints: Checkpoints of the members.
        data: The rows to test on.

    Returns:
        The accuracy, from 0 to 1.
    """
    probabilities = []
    for checkpoint in checkpoints:
        member = TableClassifier.load_from_checkpoint(
            checkpoint, map_location="cpu", weights_only=True
        ).eval()
        with torch.inference_mode():
            probabilities.append(member(data.features).softmax(1))
    chosen = torch.stack(probabilities).mean(0).argmax(1)
    return (chosen == torch.tensor(data.labels)).float().mean().item()


def main(
    num_folds: int = 5,
    devices: int | None = None,
    store_dir: str = "stores/kfold",
    root_dir: str = "checkpoints/kfold",
    batch_size: int = 16,
    max_epochs: int = 20,
    processes: bool = True,
) -> None:
    """Train a member for each fold, test them, and test their ensemble.

    Args:
        num_folds: Number of folds and of members.
        devices: GPUs, by default all but no more than folds; on a CPU, 1. Member m uses device
            m % devices.
        store_dir: Directory of the stores.
        root_dir: Directory of checkpoints and results, with a folder for each member.
        batch_size: Rows per step of a member.
        max_epochs: The most epochs to train; a member stops once its fold stops improving.
        processes: Whether each member has its own process.
    """
    # The program runs once per process, and all members start with the same weights.
    L.seed_everything(0)
    strategy = IndependentStrategy(
        num_members=num_folds, raise_on_failure=False, processes=processes
    )
    datamodule = MemmapDataModule(
        BreastCancer("train"),
        test_dataset=BreastCancer("test"),
        store_dir=store_dir,
        batch_size=batch_size,
        num_folds=num_folds,
    )
    trainer = L.Trainer(
        strategy=strategy,
        devices=devices or max(1, min(num_folds, torch.cuda.device_count())),
        max_epochs=max_epochs,
        callbacks=[
            ModelCheckpoint(filename="best", monitor="val_loss", enable_version_counter=False),
            EarlyStopping("val_loss", patience=3),
        ],
        default_root_dir=root_dir,
        logger=False,
        enable_model_summary=False,
    )
    model = TableClassifier()
    trainer.fit(model, datamodule=datamodule)
    trainer.test(model, datamodule=datamodule, ckpt_path="best", weights_only=True, verbose=False)
    if strategy.results is not None:
        # Only in the process of the first member.
        checkpoints = [member.checkpoint for member in strategy.results.done if member.checkpoint]
        accuracy = ensemble_accuracy(checkpoints, BreastCancer("test"))
        print(f"Accuracy of the ensemble of {len(checkpoints)} members: {accuracy:.4f}")
        # The ensemble consists of the members that succeeded; a failure is an error all the same.
        strategy.results.check()


if __name__ == "__main__":
    auto_cli(main)
