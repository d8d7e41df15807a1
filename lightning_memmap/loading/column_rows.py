"""Rows that their columns fetch, where a column does not keep its rows in one tensor, or where no
column is needed."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_memmap.loading.buffers import Buffers
from lightning_memmap.loading.row_source import Leaf, RandomAccessRows
from lightning_memmap.loading.variable_rows import located_rows
from lightning_memmap.sampling import Integers, Sampler
from lightning_memmap.store.columns import Column, ItemRows, OpenColumn
from lightning_memmap.store.row_bytes import rows_bytes


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
    ) -> list[Leaf]:
        fetched, targets = list[Leaf](), iter(() if out is None else out.tensors)
        for column in self._columns:
            if isinstance(column, ItemRows):
                fetched.append(located_rows(column, column.shards.locate(locations.numpy())))
                continue
            found = column.fetch(locations.numpy())
            assert isinstance(found, Tensor)
            if out is not None:
                found = next(targets).copy_(found)
            fetched.append(found.pin_memory() if pin_memory else found)
        return fetched
