"""Segment images and label them, with image and mask augmented together.

    python examples/segmentation.py
    lightning-memmap fit --config examples/configs/segmentation.yaml

A sample is an image, a mask with the class of each pixel, a yes-or-no label and a vector of labels.
The PNG files are decoded once. In each step, every data device mirrors and turns its images and
their masks together.
"""

import lightning as L
import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from torch import Tensor, nn
from torchmetrics.classification import (
    BinaryAccuracy,
    MulticlassJaccardIndex,
    MultilabelAccuracy,
)

from examples.data.shapes import KINDS, Shapes
from lightning_memmap import MemmapDataModule
from lightning_memmap.transforms import RowRandom


def convert(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert stored bytes: images to -1 to 1, masks to int64 of shape (B, H, W)."""
    return {
        "image": batch["image"].float() / 127.5 - 1,
        "mask": batch["mask"][:, 0].long(),
        "striped": batch["striped"].float(),
        "kinds": batch["kinds"].float(),
    }


def mirror_and_turn(
    batch: dict[str, Tensor], random: RowRandom, max_degrees: float = 10.0
) -> dict[str, Tensor]:
    """Mirror and turn each image with its mask at random, then convert the batch.

    Half of the rows are mirrored. Each is turned by 0, 90, 180 or 270 degrees, and by up to
    ``max_degrees`` in either direction. Image and mask are sampled at the same points: the image is
    interpolated, and the mask takes the nearest pixel, because classes can't be mixed. The border
    is filled by reflection.
    """
    image = batch["image"].float()
    mask = batch["mask"].float()
    _, _, height, width = image.shape
    mirror = torch.where(random.bernoulli(), -1.0, 1.0)
    degrees = 90 * random.randint(high=4) + random.uniform(low=-max_degrees, high=max_degrees)
    angle = torch.deg2rad(degrees)
    cos = angle.cos()
    sin = angle.sin()
    zero = torch.zeros_like(angle)
    # Map points of the result to points of the input; both axes run from -1 to 1.
    to_x = torch.stack([mirror * cos, -mirror * sin * (height / width), zero], dim=1)
    to_y = torch.stack([sin * (width / height), cos, zero], dim=1)
    turn = torch.stack([to_x, to_y], dim=1)
    points = F.affine_grid(turn, list(image.shape), align_corners=False)
    image = F.grid_sample(image, points, "bilinear", "reflection", align_corners=False)
    mask = F.grid_sample(mask, points, "nearest", "reflection", align_corners=False)
    return convert({**batch, "image": image, "mask": mask})


class UNet(nn.Module):
    """A small U-Net.

    Args:
        channels: Channels of the input.
        width: Channels at full resolution.
    """

    def __init__(self, channels: int = 3, width: int = 16) -> None:
        super().__init__()
        self.down_full = double_convolution(channels, width)
        self.down_half = double_convolution(width, 2 * width)
        self.down_quarter = double_convolution(2 * width, 4 * width)
        self.up_half = double_convolution(6 * width, 2 * width)
        self.up_full = double_convolution(3 * width, width)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Compute features at full and at a quarter of the resolution.

        Args:
            image: float32 of shape (B, channels, H, W), H and W divisible by 4.

        Returns:
            Tensors of shape (B, width, H, W) and (B, 4 * width, H / 4, W / 4).
        """
        full = self.down_full(image)
        half = self.down_half(F.max_pool2d(full, 2))
        quarter = self.down_quarter(F.max_pool2d(half, 2))
        x = self.up_half(torch.cat([F.interpolate(quarter, scale_factor=2.0), half], dim=1))
        x = self.up_full(torch.cat([F.interpolate(x, scale_factor=2.0), full], dim=1))
        return x, quarter


def double_convolution(channels_in: int, channels_out: int) -> nn.Module:
    """Make two convolutions, each with batch norm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
        nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
    )


class Segmenter(L.LightningModule):
    """A U-Net with three heads: classes of pixels, a yes-or-no label, and a vector of labels.

    Args:
        lr: Learning rate of Adam.
        width: Channels at full resolution.
    """

    def __init__(self, lr: float = 4e-3, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.network = UNet(width=width)
        self.mask_head = nn.Conv2d(width, 1 + len(KINDS), 1)
        self.striped_head = nn.Linear(4 * width, 1)
        self.kinds_head = nn.Linear(4 * width, len(KINDS))
        self.mask_iou = MulticlassJaccardIndex(1 + len(KINDS))
        self.striped_accuracy = BinaryAccuracy()
        self.kinds_accuracy = MultilabelAccuracy(len(KINDS))

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        """Logits: ``mask`` (B, 4, H, W), ``striped`` (B,) and ``kinds`` (B, 3)."""
        full, quarter = self.network(image)
        return {
            "mask": self.mask_head(full),
            "striped": self.striped_head(quarter.mean(dim=(2, 3)))[:, 0],
            "kinds": self.kinds_head(quarter.amax(dim=(2, 3))),
        }

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Compute the sum of the three losses, logged as ``train_loss``."""
        logits = self(batch["image"])
        loss = F.cross_entropy(logits["mask"], batch["mask"])
        loss = loss + F.binary_cross_entropy_with_logits(logits["striped"], batch["striped"])
        loss = loss + F.binary_cross_entropy_with_logits(logits["kinds"], batch["kinds"])
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log ``val_mask_iou``, ``val_striped_accuracy`` and ``val_kinds_accuracy``."""
        self.evaluate(batch, "val")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log ``test_mask_iou``, ``test_striped_accuracy`` and ``test_kinds_accuracy``."""
        self.evaluate(batch, "test")

    def evaluate(self, batch: dict[str, Tensor], stage: str) -> None:
        """Update the metrics, and log them for ``val`` or ``test``."""
        logits = self(batch["image"])
        self.mask_iou(logits["mask"], batch["mask"])
        self.striped_accuracy(logits["striped"], batch["striped"].long())
        self.kinds_accuracy(logits["kinds"], batch["kinds"].long())
        self.log(f"{stage}_mask_iou", self.mask_iou)
        self.log(f"{stage}_striped_accuracy", self.striped_accuracy)
        self.log(f"{stage}_kinds_accuracy", self.kinds_accuracy)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Predict the most likely class of each pixel, int64 of shape (B, H, W)."""
        return torch.argmax(self(batch["image"])["mask"], dim=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def main(devices: int = 4, max_epochs: int = 12) -> None:
    """Train with memmap_superbatch, and test.

    Args:
        devices: Number of GPUs, or of logical data devices on a CPU.
        max_epochs: Epochs to train.
    """
    L.seed_everything(0)
    data = MemmapDataModule(
        Shapes("train"),
        Shapes("val"),
        Shapes("test"),
        store_dir="stores/segmentation",
        batch_size=4,
        transform=mirror_and_turn,
        eval_transform=convert,
    )
    trainer = L.Trainer(
        strategy="memmap_superbatch",
        devices=devices,
        max_epochs=max_epochs,
        logger=False,
        enable_checkpointing=False,
    )
    model = Segmenter()
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data)


if __name__ == "__main__":
    auto_cli(main)
