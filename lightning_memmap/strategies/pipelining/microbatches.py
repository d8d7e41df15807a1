"""Which rows of a batch are in which micro-batch of a pipeline."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from tensordict import TensorDictBase
from torch import Tensor

#: Types that are indexed by rows.
_WITH_ROWS = (Tensor, TensorDictBase)


@dataclass(frozen=True)
class MicroBatches:
    """Micro-batches of consecutive rows, whose sizes differ by at most one.

    All micro-batches of a pipeline must have one shape. Where the rows do not divide evenly, the
    smaller ones are padded with a copy of their last row, which no loss and no output includes.
    Where there are fewer rows than micro-batches, the last ones have a copy of row 0 and weight 0.
    So a batch of any number of rows goes through the same schedule, and every process can compute
    how without communication.

    Args:
        num_rows: Rows of the batch.
        num: Number of micro-batches.
    """

    num_rows: int
    num: int

    @property
    def size(self) -> int:
        """Rows of each micro-batch, padding included."""
        return -(-self.num_rows // self.num)

    def rows(self, index: int) -> range:
        """The rows of a micro-batch without padding; row 0 where no row is left for it.

        Args:
            index: The micro-batch, from 0.

        Returns:
            Indices of rows of the batch, at least one.
        """
        base, more = divmod(self.num_rows, self.num)
        start = index * base + min(index, more)
        count = base + (index < more)
        return range(start, start + count) if count else range(1)

    def weight(self, index: int) -> float:
        """The fraction of the batch's rows in a micro-batch; the weights sum to 1.

        Args:
            index: The micro-batch, from 0.

        Returns:
            A number from 0 to 1.
        """
        base, more = divmod(self.num_rows, self.num)
        return (base + (index < more)) / self.num_rows

    @cached_property
    def padded_rows(self) -> list[int]:
        """The rows of all micro-batches one after the other, ``num * size``, padding included."""
        rows = []
        for own in map(self.rows, range(self.num)):
            rows += [*own, *[own[-1]] * (self.size - len(own))]
        return rows

    @cached_property
    def positions(self) -> list[int]:
        """For each row of the batch, its position in `padded_rows`."""
        return [
            index * self.size + offset
            for index in range(min(self.num, self.num_rows))
            for offset in range(len(self.rows(index)))
        ]

    @property
    def is_even(self) -> bool:
        """Whether there is no padding."""
        return self.num_rows % self.num == 0

    def pad(self, tensor: Tensor) -> Tensor:
        """Lay the rows of all micro-batches one after the other, padding included.

        Args:
            tensor: A tensor of shape (num_rows, ...).

        Returns:
            A tensor of shape (num * size, ...) on the same device; the same one if there is no
            padding.
        """
        if self.is_even:
            return tensor
        return tensor[torch.tensor(self.padded_rows, device=tensor.device)]

    def unpad(self, outputs: Any) -> Any:
        """Undo `pad` in the outputs of a pipeline.

        Args:
            outputs: Any nesting of tensors of shape (num * size, ...).

        Returns:
            The same nesting, with tensors of shape (num_rows, ...) on the same devices.
        """
        if self.is_even:
            return outputs
        return apply_to_collection(
            outputs, Tensor, lambda t: t[torch.tensor(self.positions, device=t.device)]
        )


def slice_rows(batch: Any, rows: range, num_rows: int) -> Any:
    """Slice consecutive rows out of a batch, for any nesting of tensors.

    Args:
        batch: Each tensor or TensorDict has ``num_rows`` rows. Tensors without dimensions, and
            other values, stay as they are.
        rows: The rows of the slice.
        num_rows: Rows of the batch.

    Returns:
        The same nesting with views of the rows; the batch itself if the slice has all rows.

    Raises:
        ValueError: A tensor has another number of rows.
    """

    def slice_leaf(value: Any) -> Any:
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
    return apply_to_collection(batch, _WITH_ROWS, slice_leaf)
