"""Cross-validation: a model for each fold, each in a process, and the ensemble of all of them.

    python examples/kfold.py
    lightning-memmap fit --config examples/configs/kfold.yaml

One store serves all folds. Model ``m`` validates on the rows ``i`` with ``i % num_folds == m``, for
early stopping and for its best checkpoint, and trains on all others. The models don't communicate.
At the end, one table shows the results of all models, and the ensemble averages the probabilities
of their best checkpoints. The data is scikit-learn's breast cancer table.
"""

from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from examples.data.breast_cancer import BreastCancer
from lightning_memmap import MemmapDataModule
from lightning_memmap.sampling import KFold
from lightning_memmap.strategies import IndependentStrategy


class TableClassifier(L.LightningModule):
    """A small network over the numbers of a row, which batch norm scales first.

    Args:
        num_features: Numbers in a row.
        hidden: Width of the hidden layer.
        lr: Learning rate of Adam.
    """

    def __init__(self, num_features: int = 30, hidden: int = 32, lr: float = 5e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.val_accuracy = MulticlassAccuracy(2, average="micro")
        self.test_accuracy = MulticlassAccuracy(2, average="micro")
        self.network = nn.Sequential(
            nn.BatchNorm1d(num_features),
            nn.Linear(num_features, hidden),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(hidden, 2),
        )

    def forward(self, features: Tensor) -> Tensor:
        """Logits of shape (B, 2) for features of shape (B, num_features)."""
        return self.network(features)  # type: ignore[no-any-return]

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Compute the cross-entropy of a batch, logged as ``train_loss``."""
        loss = F.cross_entropy(self(batch["features"]), batch["label"])
        rows = len(batch["label"])
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=rows)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Log ``val_loss`` and ``val_accuracy``."""
        logits = self(batch["features"])
        loss = F.cross_entropy(logits, batch["label"])
        self.val_accuracy(logits, batch["label"])
        self.log("val_loss", loss, sync_dist=True, batch_size=len(logits))
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Log ``test_accuracy``."""
        self.test_accuracy(self(batch["features"]), batch["label"])
        self.log("test_accuracy", self.test_accuracy)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Predict the most likely class of each row, int64 of shape (B,)."""
        return torch.argmax(self(batch["features"]), dim=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def ensemble_accuracy(checkpoints: Iterable[str], data: BreastCancer) -> float:
    """Test an ensemble that averages the probabilities of its models.

    Args:
        checkpoints: Checkpoints of the models.
        data: The rows to test on.

    Returns:
        The accuracy, from 0 to 1.
    """
    probabilities = []
    for checkpoint in checkpoints:
        model = TableClassifier.load_from_checkpoint(checkpoint, weights_only=True).cpu().eval()
        with torch.inference_mode():
            probabilities.append(model(data.features).softmax(1))
    predicted = torch.stack(probabilities).mean(0).argmax(1)
    return (predicted == torch.tensor(data.labels)).float().mean().item()


def main(num_folds: int = 5, max_epochs: int = 20) -> None:
    """Train a model for each fold, test the models, and test their ensemble.

    Args:
        num_folds: Number of folds and of models. Model m uses GPU m % GPUs.
        max_epochs: The most epochs to train. A model stops once its fold stops improving.
    """
    # This program runs once in each process, and all models start with the same weights.
    L.seed_everything(0)
    strategy = IndependentStrategy(num_members=num_folds, raise_on_failure=False)
    data = MemmapDataModule(
        BreastCancer("train"),
        test_dataset=BreastCancer("test"),
        store_dir="stores/kfold",
        batch_size=16,
        subset=KFold(num_folds, shuffle=False),
    )
    trainer = L.Trainer(
        strategy=strategy,
        devices=max(1, min(num_folds, torch.cuda.device_count())),
        max_epochs=max_epochs,
        callbacks=[
            ModelCheckpoint(filename="best", monitor="val_loss", enable_version_counter=False),
            EarlyStopping("val_loss", patience=3),
        ],
        default_root_dir="checkpoints/kfold",
        logger=False,
        enable_model_summary=False,
    )
    model = TableClassifier()
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data, ckpt_path="best", weights_only=True, verbose=False)
    if strategy.results is not None:
        # Only the process of the first model has the results.
        checkpoints = [member.checkpoint for member in strategy.results.done if member.checkpoint]
        accuracy = ensemble_accuracy(checkpoints, BreastCancer("test"))
        print(f"Accuracy of the ensemble of {len(checkpoints)} models: {accuracy:.4f}")
        # The ensemble has the models that succeeded. If one failed, raise its error now.
        strategy.results.check()


if __name__ == "__main__":
    auto_cli(main)
