"""Segment images, and label them in two ways, from PNG files that are decoded once.

    python examples/segmentation.py
    lightning-memmap fit --config examples/configs/segmentation.yaml

A sample is an image, a mask with the class of each pixel, a yes-or-no label and a vector of
labels. The PNG files are decoded while the store is built, and never again. The random
augmentation happens later, on the data devices: each row of each batch is mirrored and turned
independently, image and mask together.

The images are synthetic, since no small public set has all four: one or two circles, crosses and
triangles on a noisy background, striped or not. `Shapes` makes them if they are missing,
and reads your own files from a folder with the same layout.

Albumentations works per sample and on numpy arrays. It would be used like this, with
``PerSample`` from `lightning_memmap.transforms`::

    compose = A.Compose([A.HorizontalFlip(p=0.5), A.RandomRotate90(p=1), A.Rotate(limit=15)])
    augment, convert = PerSample(compose, {"image": "image", "mask": "mask"}), ToTraining()
    MemmapDataModule(..., transform=lambda batch: convert(augment(batch)))
"""

import csv
import math
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics import JaccardIndex, Metric
from torchmetrics.classification import BinaryAccuracy, MultilabelAccuracy

from examples.folders import made_at_once
from lightning_memmap import MemmapDataModule
from lightning_memmap.callbacks import RunSummary

Sample = dict[str, Any]

#: Class ``k + 1`` of a mask is ``KINDS[k]``; class 0 is the background.
KINDS = ("circle", "cross", "triangle")
_NUM_ROWS = {"train": 640, "val": 128, "test": 128}
_SIZE = 32
#: How far each corner of a shape is from its center, in radii.
_REACH = {"circle": [1.0] * 32, "cross": [1.0, 1.0, 0.4] * 4, "triangle": [1.0] * 3}


class Shapes(Dataset[Sample]):
    """Images with masks and labels, from PNG files.

    A sample is ``{"image": RGB image, "mask": grey image, "striped": bool, "kinds": uint8 tensor
    of shape (3,)}``; stored, the images become uint8 of shape (3, H, W) and (1, H, W). The files
    of a split are ``<split>/images/<name>.png``, ``<split>/masks/<name>.png`` with the class of
    each pixel, and ``<split>/labels.csv`` with the columns ``name, striped, circle, cross,
    triangle``.

    Args:
        split: ``train``, ``val`` or ``test``.
        folder: Folder of the files. `make_shapes` makes a split whose folder is missing.

    Raises:
        ValueError: An unknown split.
    """

    def __init__(self, split: str, folder: str | Path = "stores/segmentation-png") -> None:
        if split not in _NUM_ROWS:
            raise ValueError(f"split={split!r}: choose one of {', '.join(_NUM_ROWS)}")
        self.directory = Path(folder) / split
        if not self.directory.exists():
            seed = list(_NUM_ROWS).index(split)
            make_shapes(self.directory, num_rows=_NUM_ROWS[split], seed=seed)
        with open(self.directory / "labels.csv", newline="", encoding="utf-8") as file:
            self.labels = list(csv.DictReader(file))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> Sample:
        labels = self.labels[row]
        name = f"{labels['name']}.png"
        with Image.open(self.directory / "images" / name) as file:
            image = file.convert("RGB")
        with Image.open(self.directory / "masks" / name) as file:
            if file.mode not in ("L", "P"):
                raise ValueError(
                    f"the mask {name} has mode {file.mode}: give one class index per pixel (L or P)"
                )
            mask = torch.from_numpy(np.array(file))[None]
        kinds = torch.tensor([int(labels[kind]) for kind in KINDS], dtype=torch.uint8)
        return {"image": image, "mask": mask, "striped": labels["striped"] == "1", "kinds": kinds}


def make_shapes(directory: Path, *, num_rows: int, seed: int) -> None:
    """Make synthetic images with masks and labels. The same seed gives the same images.

    Args:
        directory: The folder of one split, with the layout that `Shapes` reads.
        num_rows: Number of images.
        seed: Seed of all random numbers.
    """
    rng = np.random.default_rng(seed)
    with made_at_once(directory) as made:
        for kind in ("images", "masks"):
            (made / kind).mkdir()
        with open(made / "labels.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["name", "striped", *KINDS])
            for row in range(num_rows):
                striped = bool(rng.random() < 0.5)
                image, mask = _draw(rng, striped)
                image.save(made / "images" / f"{row:04}.png")
                mask.save(made / "masks" / f"{row:04}.png")
                visible = set(np.unique(np.array(mask)).tolist())
                present = [int(index in visible) for index in range(1, len(KINDS) + 1)]
                writer.writerow([f"{row:04}", int(striped), *present])


def _draw(rng: np.random.Generator, striped: bool) -> tuple[Image.Image, Image.Image]:
    """One RGB image and its mask."""
    base = rng.uniform(80, 170, 3)
    background = base + rng.normal(0, 20, (_SIZE, _SIZE, 3))
    if striped:
        y, x = np.mgrid[:_SIZE, :_SIZE]
        angle = rng.uniform(0, math.pi)
        wave = np.sin((x * math.cos(angle) + y * math.sin(angle)) * 2 * math.pi / 6)
        background += 45 * wave[..., None]
    image = Image.fromarray(background.clip(0, 255).astype(np.uint8))
    mask = Image.new("L", image.size)
    for _ in range(rng.integers(1, 3)):
        kind = int(rng.integers(len(KINDS)))
        radius = rng.uniform(6, 10)
        center = rng.uniform(radius, _SIZE - radius, 2)
        # Far from the background in each channel.
        color = tuple(((base + rng.uniform(100, 155, 3)) % 256).astype(int).tolist())
        reach = np.array(_REACH[KINDS[kind]])[:, None]
        angles = 2 * math.pi * (rng.random() + np.arange(len(reach)) / len(reach))
        directions = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        corners = center + radius * reach * directions
        outline = [(float(x), float(y)) for x, y in corners]
        ImageDraw.Draw(image).polygon(outline, fill=color)
        ImageDraw.Draw(mask).polygon(outline, fill=kind + 1)
    return image, mask


class ToTraining(nn.Module):
    """Batch transform: stored bytes to the dtypes that the network and the losses need."""

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert a batch of B rows.

        Args:
            batch: ``image`` (B, 3, H, W), ``mask`` (B, 1, H, W), ``striped`` (B,) and ``kinds``
                (B, 3), of any dtype, with pixels from 0 to 255.

        Returns:
            ``image`` as float32 from -1 to 1, ``mask`` as int64 of shape (B, H, W), and the labels
            as float32.
        """
        return {
            "image": batch["image"].float().div_(127.5).sub_(1),
            "mask": batch["mask"][:, 0].long(),
            "striped": batch["striped"].float(),
            "kinds": batch["kinds"].float(),
        }


class MirrorAndTurn(nn.Module):
    """Batch transform for training: mirror and turn each row at random, then convert it.

    Half of the rows are mirrored. Each row is turned by 0, 90, 180 or 270 degrees and by a small
    free angle. Image and mask are sampled at the same points: the image is interpolated, and the
    mask, whose classes cannot be mixed, takes the nearest pixel. Reflection fills the border.

    Args:
        max_degrees: Largest free angle in either direction, in degrees.
    """

    def __init__(self, max_degrees: float = 10.0) -> None:
        super().__init__()
        self.max_degrees = max_degrees
        self.convert = ToTraining()

    def forward(self, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Move ``image`` and ``mask``, then convert the batch as `ToTraining` does."""
        image, mask = batch["image"].float(), batch["mask"].float()
        rows, _, height, width = image.shape
        chance = torch.rand(3, rows, generator=generator, device=image.device)
        mirror = torch.where(chance[0] < 0.5, -1.0, 1.0)
        quarters = (chance[1] * 4).floor() * (math.pi / 2)
        angle = quarters + (chance[2] * 2 - 1) * math.radians(self.max_degrees)
        # Maps points of the result to points of the input; both axes run from -1 to 1.
        cos, sin, none = angle.cos(), angle.sin(), torch.zeros_like(angle)
        to_x = torch.stack([mirror * cos, -mirror * sin * (height / width), none], dim=1)
        to_y = torch.stack([sin * (width / height), cos, none], dim=1)
        points = F.affine_grid(
            torch.stack([to_x, to_y], dim=1), list(image.shape), align_corners=False
        )
        moved = {
            "image": _sample(image, points, "bilinear"),
            "mask": _sample(mask, points, "nearest"),
        }
        converted: dict[str, Tensor] = self.convert({**batch, **moved})
        return converted


def _sample(image: Tensor, points: Tensor, mode: str) -> Tensor:
    return F.grid_sample(image, points, mode, padding_mode="reflection", align_corners=False)


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
        self.down = nn.ModuleList(
            [_block(3, width), _block(width, 2 * width), _block(2 * width, 4 * width)]
        )
        self.up = nn.ModuleList([_block(6 * width, 2 * width), _block(3 * width, width)])
        self.mask_head = nn.Conv2d(width, 1 + len(KINDS), 1)
        self.striped_head = nn.Linear(4 * width, 1)
        self.kinds_head = nn.Linear(4 * width, len(KINDS))
        self.metrics = nn.ModuleDict({stage: _metrics() for stage in ("val", "test")})

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the mask (B, 4, H, W), of ``striped`` (B,) and of ``kinds`` (B, 3).

        Args:
            image: float32 of shape (B, 3, H, W), H and W divisible by 4.
        """
        full = self.down[0](image)
        half = self.down[1](F.max_pool2d(full, 2))
        x = quarter = self.down[2](F.max_pool2d(half, 2))
        for block, skipped in zip(self.up, (half, full), strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skipped], dim=1))
        pooled = quarter.mean(dim=(2, 3)), quarter.amax(dim=(2, 3))
        return self.mask_head(x), self.striped_head(pooled[0])[:, 0], self.kinds_head(pooled[1])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The sum of the three losses, logged as ``train_loss``."""
        mask, striped, kinds = self(batch["image"])
        loss = (
            F.cross_entropy(mask, batch["mask"])
            + F.binary_cross_entropy_with_logits(striped, batch["striped"])
            + F.binary_cross_entropy_with_logits(kinds, batch["kinds"])
        )
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log ``val_mask_iou``, ``val_striped_accuracy`` and ``val_kinds_accuracy``."""
        self._evaluate("val", batch)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log ``test_mask_iou``, ``test_striped_accuracy`` and ``test_kinds_accuracy``."""
        self._evaluate("test", batch)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The most likely class of each pixel, int64 of shape (B, H, W)."""
        return torch.argmax(self(batch["image"])[0], dim=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def _evaluate(self, stage: str, batch: dict[str, Tensor]) -> None:
        outputs = self(batch["image"])
        metrics: Any = self.metrics[stage]
        for (name, metric), output in zip(metrics.items(), outputs, strict=True):
            metric(output, batch[name.split("_")[0]].long())
            self.log(f"{stage}_{name}", metric)


def _metrics() -> nn.ModuleDict:
    """Metrics in the order of the network's outputs; each name starts with its field."""
    iou: Metric = JaccardIndex("multiclass", num_classes=1 + len(KINDS))
    return nn.ModuleDict(
        {
            "mask_iou": iou,
            "striped_accuracy": BinaryAccuracy(),
            "kinds_accuracy": MultilabelAccuracy(len(KINDS)),
        }
    )


def _block(channels_in: int, channels_out: int) -> nn.Module:
    layers: list[nn.Module] = []
    for channels in (channels_in, channels_out):
        layers += [
            nn.Conv2d(channels, channels_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers)


def main(
    folder: str = "stores/segmentation-png",
    store_dir: str = "stores/segmentation",
    devices: int | None = None,
    batch_size: int = 4,
    max_epochs: int = 12,
    lr: float = 4e-3,
) -> None:
    """Train with memmap_superbatch, test, and print a summary.

    Args:
        folder: Folder of the PNG files; missing ones are made.
        store_dir: Directory of the stores.
        devices: GPUs, by default all; on a CPU logical data devices, by default 4.
        batch_size: Rows per data device and step.
        max_epochs: Epochs to train.
        lr: Learning rate.
    """
    L.seed_everything(0)
    train, val, test = (Shapes(split, folder) for split in ("train", "val", "test"))
    datamodule = MemmapDataModule(
        train,
        val,
        test,
        store_dir=store_dir,
        batch_size=batch_size,
        transform=MirrorAndTurn(),
        eval_transform=ToTraining(),
    )
    trainer = L.Trainer(
        strategy="memmap_superbatch",
        devices=devices or ("auto" if torch.cuda.is_available() else 4),
        max_epochs=max_epochs,
        callbacks=[RunSummary()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    model = Segmenter(lr)
    trainer.fit(model, datamodule=datamodule)
    trainer.test(model, datamodule=datamodule, verbose=False)


if __name__ == "__main__":
    auto_cli(main)
