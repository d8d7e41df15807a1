"""Handwritten digits that scikit-learn ships, cut to their ink: images of different sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from lightning_memmap import MemmapDataModule
from lightning_memmap.errors import SchemaError
from tests.datasets import padded


class CutDigits:
    """Row ``i`` is digit ``i`` without the empty rows and columns around it, and its label."""

    def __init__(self) -> None:
        digits: Any = load_digits()
        self.images = [_cut(torch.from_numpy(image).to(torch.uint8)) for image in digits.images]
        self.labels = digits.target.tolist()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"row": row, "image": self.images[row], "label": str(self.labels[row])}


def _cut(image: Tensor) -> Tensor:
    heights, widths = image.any(1).nonzero().flatten(), image.any(0).nonzero().flatten()
    return image[heights[0] : heights[-1] + 1, widths[0] : widths[-1] + 1]


def test_digits_cut_to_their_ink_are_given_as_they_are(tmp_path: Path) -> None:
    dataset = CutDigits()
    options: dict[str, Any] = {"store_dir": tmp_path, "batch_size": 128, "seed": 3}
    # The first rows that are read happen to have one size.
    with pytest.raises(
        SchemaError, match=r"row 1, field 'image'.* variable={'image': {.*'dims': 2"
    ):
        MemmapDataModule(dataset, **options).prepare_data()
    variable = {"image": {"form": "pad", "dims": 2}}
    data = MemmapDataModule(dataset, dataset, variable=variable, **options)
    data.prepare_data()
    data.setup("fit")
    store = data.stores["train"]
    assert store.schema.fields[1].shape == (None, None)
    assert store.manifest.num_bytes < 1797 * 64
    for loader in (data.train_dataloader(), data.val_dataloader()):
        seen = []
        for batch in loader:
            rows = batch["row"].tolist()
            assert torch.equal(
                batch["image"].values, padded([dataset.images[row] for row in rows], 0, 1, 2)
            )
            assert batch["label"] == [str(dataset.labels[row]) for row in rows]
            seen += rows
        assert sorted(seen) == [*range(1797)]
