"""Where the rows of a split lie in memory: by row, or by the step at which a window begins."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_memmap.loading.device_streams import send
from lightning_memmap.sampling import Integers, Pool, Sampler, WindowedRows
from lightning_memmap.schema import Field
from lightning_memmap.store import Store

#: Up to so many rows, a table has their slots, in 4 bytes each where these are below 2**32.
TABLE_ROWS = 2**24


@dataclass(frozen=True, eq=False)
class Places:
    """Finds the rows of a split in memory."""

    pool: Pool
    starts: Integers | None
    slots: Callable[[Integers], Integers] | None = None
    is_cheap: bool = False

    @classmethod
    def in_store(cls, store: Store, pool: Pool) -> "Places":
        """Where the rows of a split lie in the mapped columns of its store."""
        slots = store.in_memory if store.has_gaps else None
        return cls(pool, pool.begins if slots is None else None, slots)

    def of(self, shards: Integers, offsets: Integers) -> Integers:
        """The slots of rows, by their shards and their offsets within these."""
        return self.moved(self.pool.places(shards, offsets))

    def moved(self, places: Integers) -> Integers:
        """The slots of places in the files."""
        return places if self.slots is None else self.slots(places)

    def locate(self, sampler: Sampler, epoch: int, positions: range) -> Integers:
        """The slots of the rows that supply positions."""
        if self.starts is not None:
            return sampler.row_offsets(epoch, positions, self.starts)
        begins, is_large = self.pool.begins, self.pool.num_rows > TABLE_ROWS
        if begins is not None and (is_large or self.is_cheap):
            return self.moved(sampler.row_offsets(epoch, positions, begins))
        if is_large:
            return self.of(*sampler.at(epoch, positions))
        rows = sampler.row_offsets(epoch, positions, self.pool.starts)
        # No row is outside: "wrap" is the fastest mode.
        return self._table.take(rows, mode="wrap").astype(np.int64)

    @cached_property
    def _table(self) -> NDArray[np.unsignedinteger[Any]]:
        """The slot of each row, shard after shard, of shape (rows of all shards,)."""
        sizes = self.pool.sizes.tolist()
        located = [self.of(np.full(n, c), np.arange(n)) for c, n in enumerate(sizes)]
        dtype = np.min_scalar_type(max(int(each.max(initial=0)) for each in located))
        return np.concatenate(located, dtype=dtype, casting="unsafe")


@dataclass(frozen=True, eq=False)
class SeriesPlaces:
    """Where series are in memory: a window's slot is the step at which it begins."""

    line: WindowedRows
    begins: Integers
    starts: Integers
    rows: Integers
    device: torch.device

    @cached_property
    def shifts(self) -> Integers:
        """By series, what is added to the place of a window, in strides, to find its slot."""
        return self.begins - (self.line.ends - self.line.counts) * self.line.stride

    @property
    def num_slots(self) -> int:
        """One more than the last step of the files."""
        return int((self.begins + self.line.steps.array).max()) + 1

    def slots(self, places: Integers) -> Integers:
        """The slots of windows, by their places on the line."""
        shifts = self.shifts
        if len(shifts) > 1:
            shifts = shifts[self.line.in_series(places).series]
        return places * self.line.stride + shifts

    def is_cut(self, field: Field) -> bool:
        """Whether a field is cut into windows; the others have one row for each series."""
        return field.name in self.line.fields

    def places(self, pool: Pool) -> Places:
        """Where windows lie."""
        return Places(pool, None, self.slots, is_cheap=len(self.line.counts) == 1)

    def rows_of(self, slots: Tensor) -> Tensor:
        """Where the other fields are of the series that windows are of, on the same device."""
        starts, rows = self._by_start
        return rows[torch.searchsorted(starts, slots, right=True) - 1]

    @cached_property
    def _by_start(self) -> tuple[Tensor, Tensor]:
        here = np.flatnonzero((self.rows >= 0) & (self.line.counts > 0))
        here = here[np.argsort(self.starts[here])]
        starts, rows = (torch.from_numpy(each[here]) for each in (self.starts, self.rows))
        return send(starts, self.device), send(rows, self.device)
