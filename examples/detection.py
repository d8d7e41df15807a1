"""Find handwritten digits: images with different numbers of boxes.

    python examples/detection.py
    lightning-memmap fit --config examples/configs/detection.yaml

The store keeps the boxes and labels of all images in one array each, with the offsets of the
images. A batch has a list with one dict for each image, as detectors expect it.

The detector divides an image into cells, four pixels wide and high. The cell in which a digit has
its center names the digit, and says how far the edges of its box are.
"""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from torch import Tensor, nn

from examples.boxes import BoxF1
from examples.data.scenes import Scenes
from examples.digits import Normalize
from examples.networks import convolution
from lightning_memmap import MemmapDataModule

#: Pixels of a cell in each direction; and the class of cells without a digit's center.
CELL = 4
BACKGROUND = 10


class Detector(L.LightningModule):
    """Convolutions, with the logits of 11 classes and the four edges of a box for each cell.

    Args:
        lr: Learning rate of Adam.
        width: Channels of the cells.
    """

    def __init__(self, lr: float = 4e-3, width: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.network = nn.Sequential(
            convolution(1, width // 4, stride=2),
            convolution(width // 4, width // 2, stride=2),
            *(convolution(size, width) for size in (width // 2, width, width, width)),
            nn.Conv2d(width, BACKGROUND + 1 + 4, 1),
        )
        self.val_f1 = BoxF1()
        self.test_f1 = BoxF1()

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, 11, H / 4, W / 4) and boxes in pixels (B, 4, H / 4, W / 4)."""
        logits, edges = self.network(image).split([BACKGROUND + 1, 4], dim=1)
        y, x = (torch.arange(size, device=image.device) + 0.5 for size in logits.shape[2:])
        middle = torch.stack(torch.meshgrid(x, y, indexing="xy"))
        return logits, (middle.repeat(2, 1, 1) + edges) * CELL

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Compute the loss of all cells' classes and of the boxes, logged as ``train_loss``."""
        logits, boxes = self(batch["image"])
        objects = batch["objects"]
        box, label = (torch.cat([image[name] for image in objects]) for name in ("box", "label"))
        row = torch.cat([torch.full_like(image["label"], row) for row, image in enumerate(objects)])
        x, y = ((box[:, :2] + box[:, 2:]) / (2 * CELL)).long().T
        classes = torch.full_like(logits[:, 0], BACKGROUND, dtype=torch.long)
        classes[row, y, x] = label
        # Most cells have no center: they count less.
        weight = torch.tensor([1.0] * BACKGROUND + [0.02], device=label.device)
        distance = F.smooth_l1_loss(boxes[row, :, y, x], box, reduction="sum") / CELL
        loss = F.cross_entropy(logits, classes, weight) + distance / max(box.numel(), 1)
        self.log(
            "train_loss",
            loss,
            on_step=False,
            on_epoch=True,
            sync_dist=True,
            batch_size=len(objects),
        )
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Log ``val_f1``."""
        self.val_f1.update(self.predict_step(batch, batch_idx), batch["objects"])
        self.log("val_f1", self.val_f1, batch_size=len(batch["objects"]))

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Log ``test_f1``."""
        self.test_f1.update(self.predict_step(batch, batch_idx), batch["objects"])
        self.log("test_f1", self.test_f1, batch_size=len(batch["objects"]))

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> list[dict[str, Tensor]]:
        """Predict ``box`` (objects, 4) and ``label`` (objects,) of the digits of each image."""
        logits, boxes = self(batch["image"])
        score, label = logits.softmax(1)[:, :BACKGROUND].max(1)
        # Cells next to the center's may predict the digit, too: keep the highest score.
        is_highest = score == F.max_pool2d(score, 3, stride=1, padding=1)
        is_digit = is_highest & (logits.argmax(1) != BACKGROUND)
        return [
            {"box": image_boxes[:, cells].T, "label": image_label[cells]}
            for image_boxes, image_label, cells in zip(boxes, label, is_digit, strict=True)
        ]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def main(devices: int = 2, max_epochs: int = 10) -> None:
    """Train with memmap_superbatch, and test.

    Args:
        devices: Number of GPUs, or of logical data devices on a CPU.
        max_epochs: Epochs to train.
    """
    L.seed_everything(0)
    data = MemmapDataModule(
        *(Scenes(split) for split in ("train", "val", "test")),
        store_dir="stores/detection",
        batch_size=8,
        transform=Normalize(mean=0.04, std=0.16),
        eval_transform=Normalize(mean=0.04, std=0.16),
    )
    trainer = L.Trainer(
        strategy="memmap_superbatch",
        devices=devices,
        max_epochs=max_epochs,
        logger=False,
        enable_checkpointing=False,
    )
    model = Detector()
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data)


if __name__ == "__main__":
    auto_cli(main)
