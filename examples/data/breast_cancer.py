"""scikit-learn's breast cancer data: 569 rows of 30 features, 2 classes.

It is the Breast Cancer Wisconsin (Diagnostic) data of the UCI Machine Learning Repository, by
William H. Wolberg, W. Nick Street and Olvi L. Mangasarian.
"""

from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from torch.utils.data import Dataset


class BreastCancer(Dataset[dict[str, Any]]):
    """scikit-learn's breast cancer data: 455 rows for training, 114 for testing.

    A sample is ``{"features": float32 tensor of shape (30,), "label": 0 or 1}``.

    Args:
        split: ``train`` or ``test``.

    Raises:
        ValueError: An unknown split.
    """

    def __init__(self, split: str) -> None:
        bounds = {"train": (0, 455), "test": (455, 569)}
        if split not in bounds:
            raise ValueError(f"split={split!r}: choose one of {', '.join(bounds)}")
        table = load_breast_cancer()
        rows = np.random.RandomState(0).permutation(len(table.target))[slice(*bounds[split])]
        self.features = torch.from_numpy(table.data[rows].astype(np.float32))
        self.labels = table.target[rows].tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"features": self.features[row], "label": self.labels[row]}
