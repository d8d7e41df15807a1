"""Collation: the structure of the dataset's samples around fetched columns.

Also the assembly of the batches of a super-batch on one device.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_memmap.errors import with_article
from lightning_memmap.loading.buffers import BufferPool
from lightning_memmap.loading.device_streams import send
from lightning_memmap.loading.nested import named_leaves, rebuilt
from lightning_memmap.loading.transform import DeviceTransform, OnSuperBatch
from lightning_memmap.loading.variable_leaves import (
    interleaved,
    is_on,
    is_variable,
    sent_leaf,
)
from lightning_memmap.loading.variable_rows import VariableRows
from lightning_memmap.schema import RowList

#: Nests one leaf per field like the dataset's samples; see `FormedCollate`.
Collate: TypeAlias = Callable[[Sequence[Tensor | VariableRows]], Any]


class Collator:
    """Collates columns, and assembles the batches of data devices in buffers that it reuses.

    Args:
        collate: Nests one tensor per field like the dataset's samples.
        transform: Runs on each assembled batch; None for no transform.
    """

    def __init__(self, collate: Collate, transform: OnSuperBatch | None = None) -> None:
        self.collate = collate
        self._transform = transform
        self._transforms: dict[torch.device, DeviceTransform] = {}
        self._pool: BufferPool | None = None
        self._pool_key: Any = None

    def finish(self, batch: Any, num_rows: int, device: torch.device, seed: int) -> Any:
        """Run the transform on an assembled batch, if there is one.

        Args:
            batch: The assembled batch.
            num_rows: Its rows.
            device: The device that it is on.
            seed: Seed of the transform's random numbers.

        Returns:
            What the transform returned, or ``batch`` itself where there is no transform.

        Raises:
            TypeError: The transform returned something other than tensors in containers.
            ValueError: The first dimension of a returned tensor is not ``num_rows``.
        """
        if self._transform is None:
            return batch
        if device not in self._transforms:
            self._transforms[device] = DeviceTransform(self._transform, device)
        batch = self._transforms[device](batch, seed)
        for name, leaf in named_leaves(batch):
            _check_leaf(name, leaf, num_rows, "all data devices")
        return batch

    def assemble(self, batches: list[Any], first: int, num_rows: int, device: torch.device) -> Any:
        """Assemble the batches of all data devices on one device.

        Args:
            batches: The batch of each data device, on that device.
            first: The data device whose batch has the first row; see `SuperBatch` for the order of
                rows.
            num_rows: Rows of all batches together.
            device: Where they are assembled.

        Returns:
            A batch of ``num_rows`` rows on ``device``, in the structure of the batches. A single
            batch that is on the device already is returned as it is. On a CPU, the memory of
            several batches is reused once the caller has dropped it.

        Raises:
            TypeError: A batch contains something other than tensors.
            ValueError: A batch has another number of rows than its share, or the batches differ in
                structure, in dtype or in the shape of a row.
        """
        leaves = _checked_leaves(batches, first, num_rows)
        if len(batches) == 1:
            if all(is_on(leaf, device) for leaf in leaves[0]):
                return batches[0]
            outs = [sent_leaf(leaf, device) for leaf in leaves[0]]
        else:
            columns = list(zip(*leaves, strict=True))
            dense = [column for column in columns if not is_variable(column[0])]
            buffers = iter(self._buffers([column[0] for column in dense], num_rows, device))
            outs = []
            for column in columns:
                if is_variable(column[0]):
                    outs.append(interleaved(column, first, num_rows, device))
                    continue
                outs.append(next(buffers))
                for index, leaf in enumerate(column):
                    # Contiguous between devices, and strided on the device.
                    start = (index - first) % len(batches)
                    outs[-1][start :: len(batches)].copy_(send(leaf, device))
        return rebuilt(batches[0], iter(outs))

    def _buffers(self, leaves: list[Tensor], num_rows: int, device: torch.device) -> list[Tensor]:
        fields = [(tuple(leaf.shape[1:]), leaf.dtype) for leaf in leaves]
        if device.type != "cpu":
            # torch's caching allocator reuses memory, in stream order.
            return [torch.empty((num_rows, *shape), dtype=d, device=device) for shape, d in fields]
        if self._pool is None or self._pool_key != (fields, num_rows):
            self._pool, self._pool_key = BufferPool(fields, num_rows), (fields, num_rows)
        return self._pool.get(num_rows).tensors


def _checked_leaves(batches: list[Any], first: int, num_rows: int) -> list[list[Any]]:
    """The leaves of each batch, after checking that they are alike and have all rows."""
    named = [dict(named_leaves(batch)) for batch in batches]
    for index, leaves in enumerate(named):
        rows = len(range((index - first) % len(batches), num_rows, len(batches)))
        if list(leaves) != list(named[0]):
            raise ValueError(
                f"transform: it returned the tensors {list(leaves)} on data device {index} and"
                f" {list(named[0])} on data device 0; it must return the same structure on all"
            )
        for name, leaf in leaves.items():
            _check_leaf(name, leaf, rows, f"data device {index}")
            other = named[0][name]
            if is_variable(leaf) and type(leaf) is type(other):
                continue
            if leaf.shape[1:] != other.shape[1:]:
                raise ValueError(
                    f"transform: it returned rows of shape {tuple(leaf.shape[1:])} at batch{name}"
                    f" on data device {index} and of shape {tuple(other.shape[1:])} on data device"
                    " 0; they are assembled afterwards, and must be alike. A transform whose"
                    " shapes differ from call to call runs on the assembled rows instead with"
                    " transform=OnSuperBatch(...), from lightning_memmap.transforms"
                )
            if leaf.dtype != other.dtype:
                raise ValueError(
                    f"transform: it returned {leaf.dtype} at batch{name} on data device {index}"
                    f" and {other.dtype} on data device 0; it must return one dtype on all"
                )
    return [list(leaves.values()) for leaves in named]


def _check_leaf(name: str, leaf: Any, num_rows: int, place: str) -> None:
    """Check that what a transform returned is a tensor with a row for each row of its batch."""
    if not isinstance(leaf, Tensor | RowList):
        raise TypeError(
            f"transform: it returned {with_article(type(leaf).__name__)} at batch{name}; return"
            " tensors, in any nesting of dicts, lists, tuples and dataclasses"
        )
    if (isinstance(leaf, Tensor) and leaf.ndim == 0) or len(leaf) != num_rows:
        found = f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"{len(leaf)} rows"
        raise ValueError(
            f"transform: it returned a tensor of {found} for a batch of"
            f" {num_rows} rows on {place}; the first dimension of every tensor must be the rows of"
            " the batch"
        )
