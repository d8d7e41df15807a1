"""Classify small grey images: scikit-learn's digits.

    python examples/digits.py
    lightning-memmap fit --config examples/configs/digits.yaml

The images are stored once as uint8 and stay resident on the data devices. Random shifts and the
conversion to normalised floats happen later, to each batch, on the data device that fetched it.
"""

import lightning as L
import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from examples.data.digits import Digits
from examples.networks import convolution
from lightning_memmap import MemmapDataModule
from lightning_memmap.transforms import RowRandom


class Normalize(nn.Module):
    """Batch transform: uint8 images to normalised floats.

    Args:
        mean: Mean of the pixels, scaled from 0..255 to 0..1.
        std: Their standard deviation.
    """

    def __init__(self, mean: float, std: float) -> None:
        super().__init__()
        self.mean = mean
        self.std = std

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert ``image``, uint8 of shape (B, C, H, W), to float32 of the same shape."""
        image = batch["image"].float().div_(255).sub_(self.mean).div_(self.std)
        return {**batch, "image": image}


class ShiftAndNormalize(Normalize):
    """Batch transform for training: shift each image a little, then normalise it.

    Args:
        mean: See `Normalize`.
        std: See `Normalize`.
        max_shift: The most pixels that an image moves in each direction, onto a black border.
    """

    def __init__(self, mean: float, std: float, max_shift: int = 1) -> None:
        super().__init__(mean, std)
        self.max_shift = max_shift

    def forward(  # type: ignore[override]  # random numbers for each row
        self, batch: dict[str, Tensor], random: RowRandom
    ) -> dict[str, Tensor]:
        """Transform ``image``, uint8 of shape (B, C, H, W); each row moves independently."""
        image = batch["image"]
        device = image.device
        rows, channels, height, width = image.shape
        num_shifts = 2 * self.max_shift + 1
        shift = random.randint(2, high=num_shifts)
        y = (torch.arange(height, device=device) + shift[:, :1])[:, None, :, None]
        x = (torch.arange(width, device=device) + shift[:, 1:])[:, None, None, :]
        row = torch.arange(rows, device=device).view(-1, 1, 1, 1)
        channel = torch.arange(channels, device=device).view(-1, 1, 1)
        shifted = F.pad(image, [self.max_shift] * 4)[row, channel, y, x]
        return super().forward({**batch, "image": shifted})


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
        self.network = nn.Sequential(
            convolution(1, width),
            convolution(width, 2 * width),
            nn.MaxPool2d(2),
            convolution(2 * width, 2 * width),
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
        *(Digits(split) for split in ("train", "val", "test")),
        store_dir="stores/digits",
        batch_size=16,
        transform=ShiftAndNormalize(mean=0.305, std=0.376),
        eval_transform=Normalize(mean=0.305, std=0.376),
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
