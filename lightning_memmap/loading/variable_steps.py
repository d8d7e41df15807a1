"""What is made of the rows of several small steps at once."""

from bisect import bisect_right
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.sampling import Integers

#: Small steps are copied together, up to this number of bytes.
_TOGETHER_BYTES = 2**22


class Together:
    """The values of consecutive steps, of which those of small ones are made together: a call costs
    as much for the rows of one step as for those of many.

    Args:
        items: How many items the values of each step have, int64 of shape (steps,).
        item_bytes: Bytes of an item.
        make: Makes the values of the steps from one up to another, of shape (items, *item shape).
    """

    def __init__(
        self, items: Integers, item_bytes: int, make: Callable[[int, int], Tensor]
    ) -> None:
        self._edges: list[int] = [0, *np.cumsum(items).tolist()]
        self._most_items = _TOGETHER_BYTES // item_bytes
        self._make = make
        self._first = self._end = 0
        self._made = torch.empty(0)

    def of_step(self, step: int) -> Tensor:
        """The values of a step, of shape (items, *item shape)."""
        edges = self._edges
        if not self._first <= step < self._end:
            limit = edges[step] + self._most_items
            end = max(step + 1, bisect_right(edges, limit) - 1)
            # The memory of the steps before may be used again, while it is in the caches.
            self._made, self._end = torch.empty(0), self._first
            # Ordinary tensors in inference mode too: it may be over before the last of the steps.
            with torch.inference_mode(False):
                self._made = self._make(step, end)
            self._first, self._end = step, end
        first = edges[self._first]
        return self._made[edges[step] - first : edges[step + 1] - first]
