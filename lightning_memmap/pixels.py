"""Rows that are images, as pixels that can be shown."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_CHANNELS = (1, 3, 4)
#: A row of two dimensions that is smaller is a table of numbers rather than an image.
_MIN_PIXELS = 5


def pixels_of(row: Tensor) -> NDArray[np.uint8] | None:
    """Convert a row to pixels, if it has the shape of an image."""
    if row.is_complex() or row.dim() not in (2, 3) or 0 in row.shape:
        return None
    if row.dim() == 2:
        if min(row.shape) < _MIN_PIXELS:
            return None
        row = row[None]
    if row.shape[0] in _CHANNELS:
        row = row.movedim(0, -1)
    if row.shape[-1] not in _CHANNELS:
        return None
    numbers = row.double()
    if row.dtype != torch.uint8:
        numbers = numbers.nan_to_num(0.0, 0.0, 0.0)
        low, high = numbers.min(), numbers.max()
        numbers = (numbers - low) * (255 / (high - low if high > low else 1))
    found: NDArray[np.uint8] = numbers.numpy().astype(np.uint8)
    return found
