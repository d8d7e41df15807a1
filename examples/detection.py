"""Find handwritten digits in images that have different numbers of them.

    python examples/detection.py
    lightning-memmap fit --config examples/configs/detection.yaml

A sample has an image and a list of objects, each with a box and a label. A batch has the images as
one tensor, and one dict of boxes and labels for each image, as the detectors of torchvision expect.

The detector divides an image into cells of 4x4 pixels. The cell that has the center of a digit
predicts its class, and how far away the edges of its box are.
"""

from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from torch import Tensor, nn
from torchmetrics import Metric

from examples.data.scenes import Scenes
from lightning_memmap import MemmapDataModule

#: Height and width of a cell, in pixels.
CELL = 4
#: The class of cells that have no center of a digit.
BACKGROUND = 10


def normalize(batch: dict[str, Any]) -> dict[str, Any]:
    """Turn ``image``, uint8 of shape (B, 1, H, W), into normalised float32."""
    return {**batch, "image": (batch["image"] / 255 - 0.04) / 0.16}


def convolution(channels_in: int, channels_out: int, stride: int = 1) -> nn.Module:
    """Make a convolution with group norm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False),
        # Unlike batch norm, group norm doesn't depend on how rows are divided over devices.
        nn.GroupNorm(4, channels_out),
        nn.ReLU(),
    )


def iou(first: Tensor, second: Tensor) -> Tensor:
    """Compute the intersection over union of each pair of boxes.

    Args:
        first: Boxes of shape (A, 4): left, top, right, bottom.
        second: Boxes of shape (B, 4).

    Returns:
        Values of shape (A, B).
    """
    corner = torch.maximum(first[:, None, :2], second[None, :, :2])
    opposite = torch.minimum(first[:, None, 2:], second[None, :, 2:])
    common = (opposite - corner).clamp(min=0).prod(2)
    return common / (area(first)[:, None] + area(second)[None] - common)


def area(boxes: Tensor) -> Tensor:
    """Compute the areas of boxes of shape (N, 4)."""
    return (boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(1)


class BoxF1(Metric):
    """The F1 score of predicted objects: 1 if exactly the true objects are predicted.

    A true object counts as predicted if a box of its class has an intersection over union above 0.5
    with its box. Such a box can match only one object, because objects don't overlap.
    """

    full_state_update = False
    num_hits: Tensor
    num_boxes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("num_hits", torch.tensor(0), "sum")
        self.add_state("num_boxes", torch.tensor(0), "sum")

    def update(
        self, predicted: Sequence[dict[str, Tensor]], true: Sequence[dict[str, Tensor]]
    ) -> None:
        """Count a batch.

        Args:
            predicted: For each image, ``box`` of shape (objects, 4) and ``label`` of shape
                (objects,).
            true: ``box`` and ``label`` of the true objects of each image.
        """
        for prediction, target in zip(predicted, true, strict=True):
            is_hit = iou(target["box"], prediction["box"]) > 0.5
            is_hit &= target["label"][:, None] == prediction["label"]
            self.num_hits += is_hit.any(dim=1).sum()
            self.num_boxes += sum(is_hit.shape)

    def compute(self) -> Any:
        """Compute the score, a scalar; 0 without any boxes."""
        return 2 * self.num_hits / self.num_boxes.clamp(min=1)


class Detector(L.LightningModule):
    """A detector that predicts logits of 11 classes and the four edges of a box for each cell.

    Args:
        lr: Learning rate of Adam.
        width: Channels of the last layers, a multiple of 16.
    """

    def __init__(self, lr: float = 4e-3, width: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.network = nn.Sequential(
            convolution(1, width // 4, stride=2),
            convolution(width // 4, width // 2, stride=2),
            convolution(width // 2, width),
            convolution(width, width),
            convolution(width, width),
            convolution(width, width),
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
        """Compute the loss of the cells' classes and of the boxes, logged as ``train_loss``."""
        logits, boxes = self(batch["image"])
        objects = batch["objects"]
        # All objects of the batch, and the row of the image that each is in.
        box = torch.cat([image["box"] for image in objects])
        label = torch.cat([image["label"] for image in objects])
        row = torch.cat([torch.full_like(image["label"], row) for row, image in enumerate(objects)])
        # The cell of each center.
        x, y = ((box[:, :2] + box[:, 2:]) / (2 * CELL)).long().T
        classes = torch.full_like(logits[:, 0], BACKGROUND, dtype=torch.long)
        classes[row, y, x] = label
        # Most cells have no center, so these count less.
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
        # Several cells near a center may predict the same digit: keep the highest score.
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
        Scenes("train"),
        Scenes("val"),
        Scenes("test"),
        store_dir="stores/detection",
        batch_size=8,
        transform=normalize,
        eval_transform=normalize,
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
