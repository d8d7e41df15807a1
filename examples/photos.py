"""Classify patches of photographs in PNG files, in several processes.

    python examples/photos.py
    lightning-memmap fit --config examples/configs/photos.yaml
    lightning-memmap compare --config examples/configs/photos.yaml

Decoding a file takes longer than training on it, and a DataLoader decodes every file again in every
epoch. The store has the decoded images, so each epoch only augments them. If the decoded images
don't fit into memory, use ``--encoded true``: the store then keeps the files, and threads decode
them while the model trains. The classes are the photograph of a patch, and whether it is upside
down.

Lightning's own ``ddp`` starts a process for each device. Each process keeps its part of the store
on its device.
"""

import lightning as L
import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from examples.data.photographs import CLASSES, Photos
from examples.networks import convolution
from lightning_memmap import MemmapDataModule
from lightning_memmap.schema import Decode
from lightning_memmap.transforms import RowRandom


def normalize(image: Tensor) -> Tensor:
    """Convert bytes to float32 numbers from -2 to 2."""
    return image.float().sub_(127.5).div_(64)


class CropAndNormalize(nn.Module):
    """Batch transform: crop the middle of each image, and normalise it.

    Args:
        size: Height and width of a crop.
    """

    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.size = size

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Turn ``image``, uint8 of (B, C, H, W), into float32 of (B, C, size, size)."""
        height, width = batch["image"].shape[2:]
        y = (height - self.size) // 2
        x = (width - self.size) // 2
        crop = batch["image"][:, :, y : y + self.size, x : x + self.size]
        return {**batch, "image": normalize(crop)}


class RandomCropAndFlip(CropAndNormalize):
    """Batch transform for training: crop each image at random, mirror half of them, normalise.

    Args:
        size: Height and width of a crop.
    """

    def forward(  # type: ignore[override]  # random numbers for each row
        self, batch: dict[str, Tensor], random: RowRandom
    ) -> dict[str, Tensor]:
        """Transform ``image`` like `CropAndNormalize`, with a random position for each row."""
        image = batch["image"]
        rows, _, height, width = image.shape
        y = random.randint(high=height - self.size + 1)
        x = random.randint(high=width - self.size + 1)
        # A view of every possible crop; one crop is copied for each row.
        crops = image.unfold(2, self.size, 1).unfold(3, self.size, 1)
        chosen = crops[torch.arange(rows, device=image.device), :, y, x]
        mirrored = random.bernoulli()[:, None, None, None]
        return {**batch, "image": normalize(torch.where(mirrored, chosen.flip(-1), chosen))}


class PhotoClassifier(L.LightningModule):
    """A small convolutional network for images of three channels and four classes.

    Args:
        lr: Learning rate of Adam.
        width: Channels of the first layer, a multiple of 4.
    """

    def __init__(self, lr: float = 2e-3, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.val_accuracy = MulticlassAccuracy(len(CLASSES), average="micro")
        self.test_accuracy = MulticlassAccuracy(len(CLASSES), average="micro")
        self.network = nn.Sequential(
            # Smooth: rounding would move all pixels of a plain sky over the edge of a ReLU.
            convolution(3, width, 2, nn.SiLU),
            convolution(width, 2 * width, 2, nn.SiLU),
            convolution(2 * width, 4 * width, 2, nn.SiLU),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(4 * width * 4 * 4, len(CLASSES)),
        )

    def forward(self, image: Tensor) -> Tensor:
        """Logits of shape (B, 4) for normalised images of shape (B, 3, H, W)."""
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


def main(
    devices: int = 2, max_epochs: int = 5, encoded: bool = False, strategy: str = "ddp"
) -> None:
    """Train and test in several processes.

    Args:
        devices: Number of processes, each with a GPU if there is one.
        max_epochs: Epochs to train.
        encoded: Keep the images encoded in the stores.
        strategy: Another strategy trains on the same rows in every step.
    """
    L.seed_everything(0)
    data = MemmapDataModule(
        *(Photos(split, mode=None if encoded else "RGB") for split in ("train", "val", "test")),
        store_dir="stores/photos-encoded" if encoded else "stores/photos",
        batch_size=32,
        transform=RandomCropAndFlip(),
        eval_transform=CropAndNormalize(),
        decode={"image": Decode()} if encoded else None,
    )
    trainer = L.Trainer(
        strategy=strategy,
        devices=devices,
        max_epochs=max_epochs,
        logger=False,
        enable_checkpointing=False,
    )
    model = PhotoClassifier()
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data)


if __name__ == "__main__":
    auto_cli(main)
