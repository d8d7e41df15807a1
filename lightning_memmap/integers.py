"""The type of arrays of row indices, sizes and offsets, in all rooms."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

#: A numpy array of int64.
Integers: TypeAlias = NDArray[np.int64]
