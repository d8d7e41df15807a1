"""scikit-learn's digits (BSD licence)."""

from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset


class Digits(Dataset[dict[str, Any]]):
    """scikit-learn's digits: 1,257 rows to train on, 270 to validate and 270 to test.

    A sample is ``{"image": uint8 tensor of shape (1, 8, 8), "label": int from 0 to 9}``.

    Args:
        split: ``train``, ``val`` or ``test``.

    Raises:
        ValueError: An unknown split.
    """

    def __init__(self, split: str) -> None:
        bounds = {"train": (0, 1257), "val": (1257, 1527), "test": (1527, 1797)}
        if split not in bounds:
            raise ValueError(f"split={split!r}: choose one of {', '.join(bounds)}")
        digits = load_digits()
        # The file is sorted by writer: after a permutation, every split has all writers.
        rows = np.random.RandomState(0).permutation(len(digits.target))[slice(*bounds[split])]
        # Grey levels are 0 to 16 in the file and 0 to 255 here.
        grey = np.rint(digits.images[rows] * (255 / 16)).astype(np.uint8)
        self.images = torch.from_numpy(grey)[:, None]
        self.labels = digits.target[rows].tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"image": self.images[row], "label": self.labels[row]}
