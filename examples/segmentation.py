"""Segment images, and label them in two ways, from PNG files that are decoded once.

    python examples/segmentation.py
    lightning-memmap fit --config examples/configs/segmentation.yaml

A sample is an image, a mask with the class of each pixel, a yes-or-no label and a vector of
labels. Image and mask are mirrored and turned together, later, on the data devices: see
`examples.augmentation`.
"""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from torch import Tensor, nn
from torchmetrics import JaccardIndex, Metric
from torchmetrics.classification import BinaryAccuracy, MultilabelAccuracy

from examples.augmentation import MirrorAndTurn, ToTraining
from examples.data.shapes import KINDS, Shapes
from examples.networks import UNet
from lightning_memmap import MemmapDataModule


class Segmenter(L.LightningModule):
    """A small U-Net with three heads: classes of pixels, a yes-or-no label, and a label vector.

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
        self.metrics = nn.ModuleDict({stage: _metrics() for stage in ("val", "test")})

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
        for name in ("striped", "kinds"):
            loss = loss + F.binary_cross_entropy_with_logits(logits[name], batch[name])
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log ``val_mask_iou``, ``val_striped_accuracy`` and ``val_kinds_accuracy``."""
        self._evaluate("val", batch)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log ``test_mask_iou``, ``test_striped_accuracy`` and ``test_kinds_accuracy``."""
        self._evaluate("test", batch)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Predict the most likely class of each pixel, int64 of shape (B, H, W)."""
        return torch.argmax(self(batch["image"])["mask"], dim=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def _evaluate(self, stage: str, batch: dict[str, Tensor]) -> None:
        logits: dict[str, Tensor] = self(batch["image"])
        metrics: Any = self.metrics[stage]
        for name, metric in metrics.items():
            field = name.partition("_")[0]
            metric(logits[field], batch[field].long())
            self.log(f"{stage}_{name}", metric)


def _metrics() -> nn.ModuleDict:
    """Make the metrics. Each name starts with the field."""
    iou: Metric = JaccardIndex("multiclass", num_classes=1 + len(KINDS))
    accuracies = {
        "striped_accuracy": BinaryAccuracy(),
        "kinds_accuracy": MultilabelAccuracy(len(KINDS)),
    }
    return nn.ModuleDict({"mask_iou": iou, **accuracies})


def main(devices: int = 4, max_epochs: int = 12) -> None:
    """Train with memmap_superbatch, and test.

    Args:
        devices: Number of GPUs, or of logical data devices on a CPU.
        max_epochs: Epochs to train.
    """
    L.seed_everything(0)
    data = MemmapDataModule(
        *(Shapes(split) for split in ("train", "val", "test")),
        store_dir="stores/segmentation",
        batch_size=4,
        transform=MirrorAndTurn(),
        eval_transform=ToTraining(),
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
