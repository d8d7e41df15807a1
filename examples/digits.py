"""Classify small grey images with memmap_superbatch: scikit-learn's digits.

    python examples/digits.py
    lightning-memmap fit --config examples/configs/digits.yaml

The images are stored once, as uint8, and stay in the memory of the data devices. In each step,
every device shifts and normalises its images, and the first device trains on all of them.
"""

import lightning as L
import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from examples.data.digits import Digits
from lightning_memmap import MemmapDataModule
from lightning_memmap.augmentations import Compose, RandomCrop


def normalize(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Turn ``image``, uint8 of shape (B, 1, H, W), into normalised float32."""
    return {**batch, "image": (batch["image"] / 255 - 0.305) / 0.376}


class DigitsClassifier(L.LightningModule):
    """A small convolutional network for grey images of 10 classes, of any size from 8x8.

    Args:
        lr: Learning rate of Adam.
        width: Channels of the first layer, a multiple of 4.
    """

    def __init__(self, lr: float = 2e-3, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.val_accuracy = MulticlassAccuracy(10, average="micro")
        self.test_accuracy = MulticlassAccuracy(10, average="micro")
        # Group norm, unlike batch norm, doesn't depend on how rows are divided over devices.
        self.network = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.GroupNorm(4, 2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False),
            nn.GroupNorm(4, 2 * width),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(4),
            nn.Flatten(),
            nn.Linear(2 * width * 4 * 4, 10),
        )

    def forward(self, image: Tensor) -> Tensor:
        """Logits of shape (B, 10) for normalised float32 images of shape (B, 1, H, W)."""
        return self.network(image)  # type: ignore[no-any-return]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Compute the cross-entropy of a batch, logged as ``train_loss``."""
        loss = F.cross_entropy(self(batch["image"]), batch["label"])
        rows = len(batch["label"])
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=rows)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log ``val_loss`` and ``val_accuracy``."""
        logits = self(batch["image"])
        loss = F.cross_entropy(logits, batch["label"])
        self.val_accuracy(logits, batch["label"])
        self.log("val_loss", loss, sync_dist=True, batch_size=len(logits))
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log ``test_accuracy``."""
        self.test_accuracy(self(batch["image"]), batch["label"])
        self.log("test_accuracy", self.test_accuracy)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Predict the most likely class of each row, int64 of shape (B,)."""
        return torch.argmax(self(batch["image"]), dim=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def main(devices: int = 4, max_epochs: int = 10) -> None:
    """Train with memmap_superbatch, and test.

    Args:
        devices: Number of GPUs, or of logical data devices on a CPU.
        max_epochs: Epochs to train.
    """
    L.seed_everything(0)
    data = MemmapDataModule(
        Digits("train"),
        Digits("val"),
        Digits("test"),
        store_dir="stores/digits",
        batch_size=16,
        transform=Compose([RandomCrop(padding=1), normalize]),
        eval_transform=normalize,
    )
    trainer = L.Trainer(
        strategy="memmap_superbatch",
        devices=devices,
        max_epochs=max_epochs,
        logger=False,
        enable_checkpointing=False,
    )
    model = DigitsClassifier()
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data)


if __name__ == "__main__":
    auto_cli(main)
