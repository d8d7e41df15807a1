"""Names that the README and the pages of ``docs/`` leave to their reader."""

import random
import tarfile
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_memmap import MemmapDataModule
from tests.programs.docs.checks import (
    check_collate,
    check_fine_tuning,
    check_little_padding,
    check_mask_tokens,
    check_rows_differ,
    check_samples,
    epoch_of,
    make_llama,
    make_tokenizer,
    num_rows,
)
from tests.support.models import Points, Regression

__all__ = [
    "L",
    "MemmapDataModule",
    "Model",
    "MyData",
    "Points",
    "augment",
    "check_collate",
    "check_fine_tuning",
    "check_little_padding",
    "check_mask_tokens",
    "check_rows_differ",
    "check_samples",
    "compose",
    "data",
    "epoch_of",
    "make_graphs",
    "make_llama",
    "make_photos",
    "make_tokenizer",
    "model",
    "my_data",
    "normalize",
    "np",
    "num_rows",
    "old_collate",
    "test",
    "torch",
    "train",
    "train_loader",
    "val",
    "val_loader",
    "write_images",
    "write_tars",
]

Model = Regression
model = Regression()
train, val, test = Points(480), Points(96, offset=480), Points(96, offset=576)
data = MemmapDataModule(train, val, test, test, store_dir="stores/prelude", batch_size=8)
train_loader = DataLoader(train, batch_size=16, shuffle=True, drop_last=True)
val_loader = DataLoader(val, batch_size=32)


class MyData(L.LightningDataModule):
    """An existing data module."""

    def train_dataloader(self) -> Any:
        return train_loader

    def val_dataloader(self) -> Any:
        return [val_loader]


my_data = MyData()


def augment(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch transform."""
    return {**batch, "x": batch["x"] + torch.randn_like(batch["x"]) / 100}


def normalize(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch transform of images, or of the points of `MyData`."""
    name = "image" if "image" in batch else "x"
    return {**batch, name: batch[name] / 255}


class Compose:
    """A per-sample callable with the interface of an Albumentations ``Compose``."""

    def __call__(self, image: Any, bboxes: Any, labels: Any) -> dict[str, Any]:
        image = image[:, ::-1] if self.random.random() < 0.5 else image
        return {"image": image, "bboxes": bboxes[1:], "labels": labels[1:]}

    def set_random_seed(self, seed: int) -> None:
        self.random = random.Random(seed)


compose = Compose()


def old_collate(samples: list[dict[str, Tensor]]) -> Any:
    """A ``collate_fn`` that packs the steps of its samples."""
    steps = [sample["steps"] for sample in samples]
    labels = torch.stack([sample["label"] for sample in samples])
    return torch.nn.utils.rnn.pack_sequence(steps, enforce_sorted=False), labels


def make_photos() -> list[dict[str, Any]]:
    """Make images with one to three objects."""
    return [
        {
            "image": torch.full((3, 32, 32), row, dtype=torch.uint8),
            "objects": [
                {"box": [4.0 * i, 4.0 * i, 4.0 * i + 8, 4.0 * i + 8], "label": i}
                for i in range(1 + row % 3)
            ],
        }
        for row in range(96)
    ]


def make_graphs() -> list[dict[str, Any]]:
    """Make rings of 3 to 7 nodes."""
    rings = [torch.arange(3 + row % 5) for row in range(96)]
    return [
        {
            "x": torch.rand(len(nodes), 4),
            "edges": torch.stack([nodes, nodes.roll(-1)], dim=1),
            "y": len(nodes) % 2,
        }
        for nodes in rings
    ]


def write_images(folder: str, count: int = 48) -> None:
    """Write a folder of images of several sizes, with a folder for each class."""
    from PIL import Image

    for row in range(count):
        path = Path(folder, f"class_{row % 3}", f"{row}.jpeg")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40 + row, 48), (5 * row, 0, 0)).save(path)


def write_tars() -> None:
    """Write the tar files ``ds-000.tar`` and ``ds-001.tar``, of 10 samples each."""
    write_images("tars", 1)
    Path("label").write_text("1")
    for name in ("ds-000", "ds-001"):
        with tarfile.open(f"{name}.tar", "w") as tar:
            for row in range(10):
                tar.add("tars/class_0/0.jpeg", f"{name[3:]}{row}.jpg")
                tar.add("label", f"{name[3:]}{row}.cls")
