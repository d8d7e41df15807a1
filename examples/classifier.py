"""The steps of a classifier, shared by small examples; `examples.digits` has all in one file."""

from typing import Any, Literal

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy


class Classifier(L.LightningModule):
    """The steps of a classifier, trained with Adam.

    Subclasses define ``forward``, from the field to logits of shape (B, num_classes).

    Args:
        num_classes: Number of classes.
        lr: Learning rate.
        field: The field of a batch that is the input. The classes are the field ``label``.
        average: ``micro`` for the accuracy of all rows, ``macro`` for the mean over classes.
    """

    def __init__(
        self,
        num_classes: int = 10,
        lr: float = 2e-3,
        field: str = "image",
        average: Literal["micro", "macro"] = "micro",
    ) -> None:
        super().__init__()
        self.lr = lr
        self.field = field
        self.val_accuracy = MulticlassAccuracy(num_classes, average=average)
        self.test_accuracy = MulticlassAccuracy(num_classes, average=average)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Compute the cross-entropy of a batch, logged as ``train_loss``."""
        loss = F.cross_entropy(self(batch[self.field]), batch["label"])
        rows = len(batch["label"])
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=rows)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Log ``val_loss`` and ``val_accuracy``."""
        logits = self(batch[self.field])
        label = batch["label"]
        loss = F.cross_entropy(logits, label)
        self.val_accuracy(logits, label)
        self.log("val_loss", loss, sync_dist=True, batch_size=len(label))
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Log ``test_accuracy``."""
        self.test_accuracy(self(batch[self.field]), batch["label"])
        self.log("test_accuracy", self.test_accuracy)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Predict the most likely class of each row, int64 of shape (B,)."""
        return torch.argmax(self(batch[self.field]), dim=1)

    def configure_optimizers(self) -> Any:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.lr)
