"""A k-fold ensemble on a small table: scikit-learn's breast cancer data.

    python examples/kfold.py
    lightning-memmap fit --config examples/configs/kfold.yaml

One store serves all folds: member ``m`` holds out the rows ``i`` with ``i % num_folds == m`` for
early stopping and for choosing its checkpoint, and trains on the others. The members exchange
nothing, and each has its own process. Their results come back as one table, and the ensemble
averages the probabilities of their best checkpoints.
"""

from collections.abc import Iterable

import lightning as L
import torch
from jsonargparse import auto_cli
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn

from examples.classifier import Classifier
from examples.data.breast_cancer import BreastCancer
from lightning_memmap import MemmapDataModule
from lightning_memmap.sampling import KFold
from lightning_memmap.strategies import IndependentStrategy


class TableClassifier(Classifier):
    """A small network over a row of numbers, which batch norm scales first.

    Args:
        num_features: Numbers in a row.
        hidden: Width of the hidden layer.
        lr: Learning rate of Adam.
    """

    def __init__(self, num_features: int = 30, hidden: int = 32, lr: float = 5e-3) -> None:
        super().__init__(2, lr, field="features")
        self.save_hyperparameters()
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
        member = TableClassifier.load_from_checkpoint(checkpoint, weights_only=True).cpu().eval()
        with torch.inference_mode():
            probabilities.append(member(data.features).softmax(1))
    chosen = torch.stack(probabilities).mean(0).argmax(1)
    return (chosen == torch.tensor(data.labels)).float().mean().item()


def main(num_folds: int = 5, max_epochs: int = 20) -> None:
    """Train a member for each fold, test them, and test their ensemble.

    Args:
        num_folds: Number of folds and of members. Member m uses GPU m % GPUs.
        max_epochs: The most epochs to train; a member stops once its fold stops improving.
    """
    # The program runs once per process, and all members start with the same weights.
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
        # Only in the process of the first member.
        checkpoints = [member.checkpoint for member in strategy.results.done if member.checkpoint]
        accuracy = ensemble_accuracy(checkpoints, BreastCancer("test"))
        print(f"Accuracy of the ensemble of {len(checkpoints)} members: {accuracy:.4f}")
        # The ensemble consists of the members that succeeded; a failure is an error all the same.
        strategy.results.check()


if __name__ == "__main__":
    auto_cli(main)
