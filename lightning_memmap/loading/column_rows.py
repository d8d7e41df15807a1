"""Rows that their columns fetch, where a column does not keep its rows in one tensor, or where no
column is needed."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_memmap.loading.buffers import Buffers
from lightning_memmap.loading.row_source import EpochRows, released_error
from lightning_memmap.sampling import Integers, Sampler
from lightning_memmap.store.columns import Column, OpenColumn
from lightning_memmap.store.manifest import rows_bytes


class ColumnRows:
    """The rows of a store, as `lightning_memmap.store.columns.OpenColumn.fetch` gives them.

    Args:
        columns: The columns of the store that this process needs; there may be none.
        opened: The same columns, open.
    """

    device = torch.device("cpu")

    def __init__(self, columns: Sequence[Column], opened: Sequence[OpenColumn]) -> None:
        self.fields = [(column.field.shape, column.field.dtype) for column in columns]
        num_rows = columns[0].shards.num_rows if columns else 1
        #: Bytes of one row, on average and rounded up.
        self.row_bytes = -(-rows_bytes(columns, range(num_rows)) // num_rows)
        self._columns: Sequence[OpenColumn] | None = opened

    @property
    def columns(self) -> Sequence[OpenColumn]:
        """The open columns.

        Raises:
            RuntimeError: They were released.
        """
        if self._columns is None:
            raise released_error()
        return self._columns

    @property
    def is_released(self) -> bool:
        """Whether the columns were released."""
        return self._columns is None

    def release(self) -> None:
        """Release the columns."""
        self._columns = None

    def check_sampler(self, sampler: Sampler) -> None:
        """Accept any order; see `RowSource.check_sampler`."""

    def epoch(
        self, sampler: Sampler, epoch: int, position: int
    ) -> AbstractContextManager[EpochRows]:
        """The rows in the order of an epoch; see `RowSource.epoch`."""
        return nullcontext(_ColumnEpoch(self, sampler, epoch))


@dataclass(frozen=True)
class _ColumnEpoch:
    """Rows of columns in the order of one epoch. They are located by their dataset rows."""

    rows: ColumnRows
    sampler: Sampler
    number: int

    @property
    def device(self) -> torch.device:
        return self.rows.device

    @property
    def fields(self) -> Sequence[tuple[tuple[int, ...], torch.dtype]]:
        return self.rows.fields

    @property
    def row_bytes(self) -> int:
        return self.rows.row_bytes

    def locate(self, positions: range) -> Integers:
        return self.sampler.dataset_rows(self.number, positions)

    def fetch(
        self, locations: Tensor, out: Buffers | None = None, *, pin_memory: bool = False
    ) -> list[Tensor]:
        fetched = [column.fetch(locations.numpy()) for column in self.rows.columns]
        if out is not None:
            for target, found in zip(out.tensors, fetched, strict=True):
                target.copy_(found)
            return out.tensors
        return [found.pin_memory() for found in fetched] if pin_memory else fetched
