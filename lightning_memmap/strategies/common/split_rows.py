"""Dividing the rows of a batch among devices or micro-batches."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_memmap.integers import even_range
from lightning_memmap.loading.nested import named_leaves, with_leaves
from lightning_memmap.loading.step_weight import positive_total
from lightning_memmap.schema.fields import RowList
from lightning_memmap.tensordict_types import tensordict_types


def types_with_rows() -> tuple[Any, ...]:
    """Return the types whose first dimension may be the rows of a batch."""
    return Tensor, *tensordict_types()


def row_count(value: Any) -> int:
    """Return the rows of a tensor, a TensorDict or a `RowList`; -1 for anything else."""
    if isinstance(value, RowList):
        return len(value)
    return value.shape[0] if isinstance(value, types_with_rows()) and len(value.shape) > 0 else -1


def split_rows(
    batch: Any, row_ranges: Sequence[range], devices: Sequence[torch.device]
) -> list[Any]:
    """Return one batch for each range of rows, on its device.

    Args:
        batch: A batch. Leaves without rows are in every part.
        row_ranges: The rows of each part, which together are all rows. A part without rows has a
            copy of the first row, which the caller must not count.
        devices: The device of each part.

    Raises:
        ValueError: A leaf has another number of rows, or is a nested tensor.
    """
    leaves = [*named_leaves(batch)]
    num_rows = sum(map(len, row_ranges))
    for name, leaf in leaves:
        if getattr(leaf, "is_nested", False):
            raise ValueError(
                f"batch{name} is a nested tensor, which torch cannot divide by rows: store its"
                " field in the form 'pad' or 'list'"
            )
        if row_count(leaf) not in (-1, num_rows):
            raise ValueError(
                f"batch{name} does not have {num_rows} rows, as the input of the module does: the"
                " first dimension of every tensor must be the rows; omit others from the batch"
            )
    return [
        with_leaves(batch, (_select(leaf, rows or range(1), device) for _, leaf in leaves))
        for rows, device in zip(row_ranges, devices, strict=False)
    ]


def _select(leaf: Any, rows: range, device: torch.device) -> Any:
    selected = slice(rows.start, rows.stop, rows.step)
    if isinstance(leaf, RowList):
        return RowList(leaf[selected])
    return leaf if row_count(leaf) < 0 else leaf[selected].contiguous().to(device)


def even_ranges(num_items: int, num_parts: int) -> list[range]:
    """Divide ``range(num_items)`` into consecutive ranges whose sizes differ by at most one."""
    return [even_range(index, num_parts, num_items) for index in range(num_parts)]


def items_of_ranges(by_row: Any, row_ranges: Sequence[range]) -> list[Any]:
    """Add up the items of the rows in each range.

    Args:
        by_row: The items of each row, an array or tensor of shape (B,).
        row_ranges: Rows.

    Returns:
        A number for each range, or a tensor without dimensions.
    """
    return [by_row[rows.start : rows.stop : rows.step].sum() for rows in row_ranges]


def fractions_of(weights: Sequence[Any]) -> list[Any]:
    """Divide weights, numbers or tensors without dimensions, by their sum; 0 stays 0."""
    total = sum(weights)
    divisor = positive_total(total) if isinstance(total, Tensor) else total or 1
    return [weight / divisor for weight in weights]


def scale_loss(loss: Tensor, scale: Any) -> Tensor:
    """Multiply a loss by a number, or by a tensor without dimensions, in the dtype of the loss."""
    return loss * (scale.to(loss) if isinstance(scale, Tensor) else scale)
