"""Rows that their columns fetch, where a column does not keep its rows in one tensor."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_memmap.loading.buffers import Buffers
from lightning_memmap.loading.row_source import EpochRows, released_error
from lightning_memmap.sampling import Integers, Sampler
from lightning_memmap.store import Store


class ColumnRows:
    """The rows of a store, as `lightning_memmap.store.columns.OpenColumn.fetch` gives them.

    Args:
        store: The open store.
    """

    device = torch.device("cpu")

    def __init__(self, store: Store) -> None:
        self._store: Store | None = store

    @property
    def store(self) -> Store:
        """The open store.

        Raises:
            RuntimeError: It was released.
        """
        if self._store is None:
            raise released_error()
        return self._store

    @property
    def is_released(self) -> bool:
        """Whether the store was released."""
        return self._store is None

    def release(self) -> None:
        """Release the store."""
        self._store = None

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
        return [(field.shape, field.dtype) for field in self.rows.store.schema.fields]

    @property
    def row_bytes(self) -> int:
        return self.rows.store.manifest.row_bytes

    def locate(self, positions: range) -> Integers:
        return self.sampler.dataset_rows(self.number, positions)

    def fetch(
        self, locations: Tensor, out: Buffers | None = None, *, pin_memory: bool = False
    ) -> list[Tensor]:
        fetched = [column.fetch(locations.numpy()) for column in self.rows.store.columns]
        if out is not None:
            for target, found in zip(out.tensors, fetched, strict=True):
                target.copy_(found)
            return out.tensors
        return [found.pin_memory() for found in fetched] if pin_memory else fetched
