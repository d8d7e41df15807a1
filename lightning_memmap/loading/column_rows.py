"""Rows that their columns fetch, where a column does not keep its rows in one tensor, or where no
column is needed."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_memmap.loading.buffers import Buffers
from lightning_memmap.loading.row_source import RandomAccessRows
from lightning_memmap.sampling import Integers, Sampler
from lightning_memmap.store.columns import Column, OpenColumn
from lightning_memmap.store.manifest import rows_bytes


class ColumnRows(RandomAccessRows):
    """The rows of a store, as `lightning_memmap.store.columns.OpenColumn.fetch` gives them. They
    are located by their dataset rows.

    Args:
        columns: The columns of the store that this process needs; there may be none.
        opened: The same columns, open.
    """

    device = torch.device("cpu")

    def __init__(self, columns: Sequence[Column], opened: Sequence[OpenColumn]) -> None:
        self.fields = [(column.field.shape, column.field.dtype) for column in columns]
        num_rows = columns[0].shards.num_rows if columns else 1
        # On average and rounded up.
        self.row_bytes = -(-rows_bytes(columns, range(num_rows)) // num_rows)
        self._columns = opened

    @override
    def release(self) -> None:
        super().release()
        self._columns = ()

    @override
    def locate(self, sampler: Sampler, epoch: int, positions: range) -> Integers:
        return sampler.dataset_rows(epoch, positions)

    @override
    def fetch(
        self, locations: Tensor, out: Buffers | None = None, *, pin_memory: bool = False
    ) -> list[Tensor]:
        fetched = [column.fetch(locations.numpy()) for column in self._columns]
        if out is not None:
            for target, found in zip(out.tensors, fetched, strict=True):
                target.copy_(found)
            return out.tensors
        return [found.pin_memory() for found in fetched] if pin_memory else fetched
