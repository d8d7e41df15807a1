"""Assembles the batches of all data devices on one device.

The batch of each data device is contiguous, and so is its copy to another device. The assembled
rows are interleaved: row ``i`` comes from data device ``(first + i) % D``.
"""

from typing import Any

import torch
from torch import Tensor

from lightning_memmap.errors import with_article
from lightning_memmap.loading.buffers import BufferPool
from lightning_memmap.loading.device_streams import send
from lightning_memmap.loading.nested import (
    check_alike,
    interleave,
    is_on,
    is_variable,
    kind_of,
    named_leaves,
    send_leaf,
    with_leaves,
)
from lightning_memmap.schema.fields import RowList


class Assembler:
    """Assembles batches in buffers that are reused."""

    def __init__(self) -> None:
        self._pool = BufferPool([])

    def assemble(self, batches: list[Any], first: int, num_rows: int, device: torch.device) -> Any:
        """Assemble the batches of all data devices.

        Args:
            batches: The batch of each of the ``D`` data devices, with leaves of equal kinds.
            first: The data device that holds row 0.
            num_rows: Rows of all batches.
            device: The device of the result.
        """
        leaves = _checked_leaves(batches, first, num_rows)
        if len(batches) == 1:
            if all(is_on(leaf, device) for leaf in leaves[0]):
                return batches[0]
            return with_leaves(batches[0], iter([send_leaf(leaf, device) for leaf in leaves[0]]))
        columns = list(zip(*leaves, strict=True))
        dense = [column for column in columns if not is_variable(column[0])]
        buffers = iter(self._buffers([column[0] for column in dense], num_rows, device))
        outs: list[Any] = []
        for column in columns:
            if is_variable(column[0]):
                outs.append(interleave(column, first, num_rows, device))
                continue
            out = next(buffers)
            outs.append(out)
            for index, leaf in enumerate(column):
                # Contiguous between devices, and strided on the device.
                out[(index - first) % len(batches) :: len(batches)].copy_(send(leaf, device))
        return with_leaves(batches[0], iter(outs))

    def _buffers(self, leaves: list[Tensor], num_rows: int, device: torch.device) -> list[Tensor]:
        fields = [(tuple(leaf.shape[1:]), leaf.dtype) for leaf in leaves]
        if device.type != "cpu":
            # torch's caching allocator reuses memory, in stream order.
            return [torch.empty((num_rows, *shape), dtype=d, device=device) for shape, d in fields]
        if self._pool.fields != fields:
            self._pool = BufferPool(fields)
        return self._pool.get(num_rows)


def _checked_leaves(batches: list[Any], first: int, num_rows: int) -> list[list[Any]]:
    """Check that the batches are alike and have all rows, and return the leaves of each."""
    named = [dict(named_leaves(batch)) for batch in batches]
    for index, leaves in enumerate(named):
        rows = len(range((index - first) % len(batches), num_rows, len(batches)))
        for name, leaf in leaves.items():
            _check_leaf(name, leaf, rows, index, len(batches))
    check_alike(
        [{f"batch{n}": kind_of(leaf, True) for n, leaf in leaves.items()} for leaves in named],
        "transform: it",
        "on data device",
        "they are assembled afterwards, and must be alike. A transform whose shapes differ from"
        " call to call runs on the assembled rows instead with transform=OnSuperBatch(...), from"
        " lightning_memmap.transforms",
    )
    return [[leaves[name] for name in named[0]] for leaves in named]


def _check_leaf(name: str, leaf: Any, num_rows: int, index: int, num_devices: int) -> None:
    """Check that a leaf that a transform returned is a tensor with the rows of its batch."""
    if not isinstance(leaf, Tensor | RowList):
        raise TypeError(
            f"transform: it returned {with_article(type(leaf).__name__)} at batch{name}; return"
            " tensors, in any nesting of dicts, lists, tuples and dataclasses; for texts, or other"
            " objects with one value per row, return RowList(values), from"
            " lightning_memmap.loading"
        )
    # The batch of a single device is not assembled, and may be sparse.
    if isinstance(leaf, Tensor) and (num_devices > 1 or leaf.is_nested):
        kind = "nested " if leaf.is_nested else ""
        layout = torch.jagged if leaf.is_nested else torch.strided
        if leaf.layout != layout:
            raise TypeError(
                f"transform: it returned a {kind}tensor of layout {leaf.layout} at batch{name},"
                f" whose rows cannot be assembled: return {layout}, or transform the assembled rows"
                " with transform=OnSuperBatch(...), from lightning_memmap.transforms"
            )
    if (isinstance(leaf, Tensor) and leaf.ndim == 0) or len(leaf) != num_rows:
        size = f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"{len(leaf)} rows"
        raise ValueError(
            f"transform: it returned a tensor of {size} for a batch of {num_rows} rows on data"
            f" device {index}; the first dimension of every tensor must be the rows of the batch"
        )
