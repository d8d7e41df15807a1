"""Counting the items of a loss in a batch, where only its tensors tell them."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_memmap.errors import with_article
from lightning_memmap.loading.device_streams import send
from lightning_memmap.loading.step_weight import StepWeight
from lightning_memmap.loading.super_batch import SuperBatch

#: Returns the items of each row of a batch, of shape (B,).
CountInBatch: TypeAlias = Callable[[Any], Tensor]


def weight_of_batch(count: CountInBatch, super_batch: SuperBatch, batch: Any) -> StepWeight:
    """Count the items in what a loader yields for a step.

    Args:
        count: Counts the items of each row.
        super_batch: The super-batch of the step.
        batch: The batch that it was assembled to, or itself if its batches stay on their devices.
    """
    num_rows = super_batch.num_rows
    if batch is not super_batch:
        by_row = _items_by_row(count, batch, num_rows)
        return StepWeight(by_row.sum(), None, by_row)
    num_devices = len(super_batch.batches)
    parts = []
    for index, part in enumerate(super_batch.batches):
        rows = range((index - super_batch.first) % num_devices, num_rows, num_devices)
        parts.append((rows, _items_by_row(count, part, len(rows))))
    by_row = parts[0][1].new_empty(num_rows)
    for rows, items in parts:
        by_row[rows.start :: num_devices] = send(items, by_row.device)
    return StepWeight(by_row.sum(), None, by_row)


def _items_by_row(count: CountInBatch, batch: Any, num_rows: int) -> Tensor:
    """Count the items of each row of a batch, and check the result."""
    with torch.no_grad():
        items: object = count(batch)
    if not isinstance(items, Tensor) or items.shape != (num_rows,):
        shape = f"shape {tuple(items.shape)}" if isinstance(items, Tensor) else None
        raise ValueError(
            f"weight: its function returned {shape or with_article(type(items).__name__)} for a"
            f" batch of {num_rows} rows: return a tensor with the number of items of each row, such"
            " as (batch['labels'] != -100).sum(1)"
        )
    # Sums of narrower numbers are inexact. Apple's GPUs have no float64.
    return items.float() if items.device.type == "mps" else items.double()
