"""Dataset order."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from typing_extensions import override

from lightning_memmap.sampling.sampler import Sampler
from lightning_memmap.sampling.shards import Integers


@dataclass(frozen=True)
class SequentialSampler(Sampler):
    """Keeps the rows in dataset order.

    Args:
        shards: The rows, and the shards that they are divided into.
    """

    is_sequential: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "shards", self.shards.ordered)

    @override
    def grid(
        self, epoch: int, first: int, last: int, shards: Integers, starts: Integers
    ) -> Integers:
        return np.add.outer(np.arange(first, last + 1, dtype=np.int64), starts).ravel()
