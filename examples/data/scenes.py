"""Scenes of handwritten digits with their boxes, from scikit-learn's digits (BSD licence)."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from examples.data.digits import Digits

#: Height and width of a scene.
SIZE = 48
_NUM_ROWS = {"train": 1600, "val": 256, "test": 256}


class Scenes(Dataset[dict[str, Any]]):
    """Up to five digits of several sizes on a canvas, which don't overlap.

    A sample is ``{"image": uint8 tensor of shape (1, 48, 48), "objects": [{"box": float32
    tensor of left, top, right, bottom in pixels, "label": int from 0 to 9}, ...]}``. A box
    goes around the ink of its digit. A split has the digits of the same split of `Digits`.

    Args:
        split: ``train``, ``val`` or ``test``.

    Raises:
        ValueError: An unknown split.
    """

    def __init__(self, split: str) -> None:
        self.digits = Digits(split)
        self.num_rows = _NUM_ROWS[split]
        self.seed = list(_NUM_ROWS).index(split)

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        rng = np.random.default_rng([self.seed, row])
        image = torch.zeros(1, SIZE, SIZE, dtype=torch.uint8)
        taken = torch.zeros(SIZE, SIZE, dtype=torch.bool)
        objects = []
        for _ in range(rng.integers(6)):
            digit = self.digits[int(rng.integers(len(self.digits)))]
            size = int(rng.integers(10, 19))
            y0, x0 = rng.integers(SIZE - size + 1, size=2).tolist()
            square = (slice(y0, y0 + size), slice(x0, x0 + size))
            if taken[square].any():
                continue
            taken[square] = True
            grey = F.interpolate(digit["image"][None].float(), (size, size), mode="bilinear")
            image[0][square] = grey[0, 0].byte()
            y, x = image[0][square].nonzero().T
            box = [x0 + x.min(), y0 + y.min(), x0 + x.max() + 1, y0 + y.max() + 1]
            objects.append({"box": torch.tensor(box).float(), "label": digit["label"]})
        return {"image": image, "objects": objects}
