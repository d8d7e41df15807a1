"""The type of arrays of row indices, sizes and offsets, in all rooms; and some of many indices."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

#: A numpy array of int64.
Integers: TypeAlias = NDArray[np.int64]


def evenly_spaced(num: int, most: int) -> list[int]:
    """Choose at most ``most`` of ``num`` indices, from the first to the last."""
    return sorted(set(np.linspace(0, num - 1, min(num, most)).round().astype(int).tolist()))
