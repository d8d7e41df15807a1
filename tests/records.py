"""Rows with lists of records, None and times, known row by row, and plain Python that makes
batches of them."""

import datetime
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_memmap.loading import Padded
from lightning_memmap.schema import Masked
from tests.variable import padded

START = datetime.datetime(2024, 5, 1, 12)


class Scenes(Dataset[dict[str, Any]]):
    """Row ``i`` has its number, a list of objects, captions, and values that may be None.

    Args:
        num_rows: Rows. The first one has no objects.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not 0 <= row < self.num_rows:
            raise IndexError(row)
        random = np.random.default_rng(row)
        size = int(random.integers(1, 4))
        return {
            "row": row,
            "objects": [
                {
                    "box": random.random(4).tolist(),
                    "label": int(random.integers(9)),
                    "name": "żółw" * int(random.integers(3)),
                    "score": None if random.random() < 0.5 else float(random.random()),
                    "mask": torch.from_numpy(random.integers(0, 2, (size, 2)) > 0),
                }
                for _ in range(int(random.integers(4)) if row else 0)
            ],
            "captions": [f"caption {i}" for i in range(int(random.integers(3)))],
            "age": None if row % 3 == 1 else row,
            "title": None if row % 4 == 2 else f"row {row}",
            "sound": None if row % 5 == 3 else torch.arange(row % 7, dtype=torch.float32),
            "at": START + datetime.timedelta(minutes=row),
        }


def objects_of(sample: dict[str, Any]) -> dict[str, Any]:
    """The objects of a sample as a batch gives them row by row."""
    objects = sample["objects"]
    scores = [each["score"] for each in objects]
    masks = [each["mask"] for each in objects]
    return {
        "box": torch.tensor([each["box"] for each in objects], dtype=torch.float64).view(-1, 4),
        "label": torch.tensor([each["label"] for each in objects], dtype=torch.int64),
        "name": [each["name"] for each in objects],
        "score": Masked(
            torch.tensor([score or 0.0 for score in scores], dtype=torch.float64),
            torch.tensor([score is not None for score in scores], dtype=torch.bool),
        ),
        "mask": torch.stack(masks) if masks else torch.zeros(0, 0, 2, dtype=torch.bool),
    }


def assert_is_batch(batch: Any, samples: list[dict[str, Any]]) -> None:
    """A batch of `Scenes`, its objects in any form, has these samples in this order."""
    assert batch["row"].tolist() == [sample["row"] for sample in samples]
    assert_has_objects(batch["objects"], [objects_of(sample) for sample in samples])
    assert batch["captions"] == [sample["captions"] for sample in samples]
    for name in ("age", "title", "sound"):
        found, expected = batch[name], [sample[name] for sample in samples]
        assert found.mask.dtype == torch.bool
        assert found.mask.tolist() == [value is not None for value in expected]
        for a, b in zip(found.rows(), expected, strict=True):
            assert torch.equal(a, b) if isinstance(b, Tensor) else a == b
    assert batch["age"].values.tolist() == [sample["age"] or 0 for sample in samples]
    minutes = [(sample["at"] - START) // datetime.timedelta(microseconds=1) for sample in samples]
    start = int(np.datetime64(START, "us").astype(np.int64))
    assert (batch["at"] - start).tolist() == minutes


def assert_has_objects(found: Any, rows: list[dict[str, Any]]) -> None:
    if isinstance(found, list):
        assert len(found) == len(rows)
        for one, other in zip(found, rows, strict=True):
            assert list(one) == list(other)
            assert one["name"] == other["name"]
            for name in ("box", "label", "mask"):
                assert torch.equal(one[name], other[name]), name
                assert one[name].dtype == other[name].dtype
            assert all(map(torch.equal, one["score"], other["score"]))
        return
    assert found["name"] == [row["name"] for row in rows]
    for name in ("box", "label"):
        assert isinstance(found[name], Padded)
        assert torch.equal(found[name].values, padded([row[name] for row in rows]))
        assert found[name].lengths.tolist() == [len(row[name]) for row in rows]
    masks = found["mask"].rows()
    assert all(torch.equal(a, row["mask"]) for a, row in zip(masks, rows, strict=True))
    score = found["score"]
    for values, mask, row in zip(score.values.rows(), score.mask.rows(), rows, strict=True):
        assert torch.equal(values, row["score"].values)
        assert torch.equal(mask, row["score"].mask)


class Boxes(L.LightningModule):
    """Learns the age of each row, where it has one, from its boxes.

    Attributes:
        seen: The rows of each step, as the dataset and as the loader numbers them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        with torch.no_grad():
            self.net.weight.copy_(torch.tensor([[0.3, -0.2, 0.1, 0.2]]))
            self.net.bias.zero_()
        self.seen: list[list[int]] = []
        self.names: list[list[str]] = []

    def features(self, objects: Any) -> Tensor:
        """The sum of the boxes of each row, of shape (B, 4)."""
        if isinstance(objects, list):
            return torch.stack([each["box"].sum(0) for each in objects]).float()
        # Padding is zeros.
        found: Tensor = objects["box"].values.sum(1).float()
        return found

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        assert torch.equal(batch["row"], batch["row_number"])
        self.seen.append(batch["row"].tolist())
        objects = batch["objects"]
        self.names += (
            [each["name"] for each in objects] if isinstance(objects, list) else objects["name"]
        )
        target = batch["age"].values[:, None] / 100
        return nn.functional.mse_loss(self.net(self.features(objects)), target)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Nothing is validated, but there are rows to validate on."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)
