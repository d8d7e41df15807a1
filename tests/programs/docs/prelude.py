"""Names that the README and the pages of ``docs/`` leave to their reader."""

from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

from lightning_memmap import MemmapDataModule
from tests.support.models import Points, Regression

__all__ = [
    "L",
    "MemmapDataModule",
    "Model",
    "augment",
    "compose",
    "data",
    "epoch_of",
    "model",
    "np",
    "test",
    "torch",
    "train",
    "val",
]

Model = Regression
model = Regression()
train, val, test = Points(480), Points(96, offset=480), Points(96, offset=576)
data = MemmapDataModule(train, val, test, test, store_dir="stores/prelude", batch_size=8)


def augment(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch transform."""
    return {**batch, "x": batch["x"] + torch.randn_like(batch["x"]) / 100}


def compose(image: object, mask: object) -> dict[str, object]:
    """A per-sample callable with the interface of an Albumentations ``Compose``."""
    return {"image": image, "mask": mask}


def epoch_of(data: MemmapDataModule) -> list[Any]:
    """The training batches of an epoch."""
    data.prepare_data()
    data.setup("fit")
    return list(data.train_dataloader())
