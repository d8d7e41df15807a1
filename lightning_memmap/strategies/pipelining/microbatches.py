"""How the rows of a batch are dealt to the micro-batches of a pipeline. Integers, and their use."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from tensordict import TensorDictBase
from torch import Tensor

#: What has rows, and can be indexed by them.
_WITH_ROWS = (Tensor, TensorDictBase)


@dataclass(frozen=True)
class MicroBatches:
    """Deals consecutive rows to micro-batches whose sizes differ by at most one.

    All micro-batches of a pipeline must have one shape. Where the rows do not divide evenly, the
    smaller ones are filled up with a copy of their last row, which no loss and no output contains.
    Where there are fewer rows than micro-batches, the last ones hold a copy of row 0 and weigh 0.
    So a batch of any number of rows goes through the same schedule, and every process knows how
    without asking.

    Args:
        num_rows: Rows of the batch.
        num: Micro-batches.
    """

    num_rows: int
    num: int

    @property
    def size(self) -> int:
        """Rows of each micro-batch, with those that fill it up."""
        return -(-self.num_rows // self.num)

    def rows(self, index: int) -> range:
        """The rows of a micro-batch that are its own; row 0 where there is none left for it."""
        base, more = divmod(self.num_rows, self.num)
        start = index * base + min(index, more)
        count = base + (index < more)
        return range(start, start + count) if count else range(1)

    def weight(self, index: int) -> float:
        """The share of the batch's rows that a micro-batch has; the weights sum to 1."""
        base, more = divmod(self.num_rows, self.num)
        return (base + (index < more)) / self.num_rows

    @cached_property
    def taken(self) -> list[int]:
        """The rows of all micro-batches, ``num * size`` of them, with those that fill up."""
        rows = []
        for own in map(self.rows, range(self.num)):
            rows += [*own, *[own[-1]] * (self.size - len(own))]
        return rows

    @cached_property
    def kept(self) -> list[int]:
        """Where in `taken` the rows of the batch are, in their order."""
        return [
            index * self.size + place
            for index in range(min(self.num, self.num_rows))
            for place in range(len(self.rows(index)))
        ]

    @property
    def is_even(self) -> bool:
        """Whether no row fills up."""
        return self.num_rows % self.num == 0

    def lay_out(self, tensor: Tensor) -> Tensor:
        """The rows as the micro-batches have them, one micro-batch after the other."""
        if self.is_even:
            return tensor
        return tensor[torch.tensor(self.taken, device=tensor.device)]

    def restore(self, outputs: Any) -> Any:
        """The rows of the batch from what came of `lay_out`, in any nesting of tensors."""
        if self.is_even:
            return outputs
        return apply_to_collection(
            outputs, Tensor, lambda t: t[torch.tensor(self.kept, device=t.device)]
        )


def take_rows(batch: Any, rows: range, num_rows: int) -> Any:
    """Some consecutive rows of a batch, in any nesting of tensors.

    Args:
        batch: Each of its tensors has ``num_rows`` rows, or no dimension: those, and what is no
            tensor, stay as they are.
        rows: The rows to take.
        num_rows: Rows of the batch.

    Raises:
        ValueError: A tensor has another number of rows.
    """

    def take(value: Any) -> Any:
        if isinstance(value, Tensor) and not value.ndim:
            return value
        if len(value) != num_rows:
            raise ValueError(
                f"a batch of {num_rows} rows has a tensor of shape {tuple(value.shape)}:"
                " memmap_pipeline divides batches by rows, so the first dimension of every tensor"
                " given to loss(output, batch) must be the rows; leave others out of the batch"
            )
        return value[rows.start : rows.stop]

    if len(rows) == num_rows:
        return batch
    return apply_to_collection(batch, _WITH_ROWS, take)
