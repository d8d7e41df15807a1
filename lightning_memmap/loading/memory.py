"""Rows in memory: in the file mapping of a store, or copied to the host or to a device.

A source addresses its rows by slots. Take 7 rows in 3 shards, and two devices: one holds copies of
the shards 0 and 2, the other of shard 1::

    file mapping      0 3 6 | 1 4 | 2 5    a slot is a file row
    first device      0 3 6 | 2 5          its slots are 0 to 4
      starts          0  -1   3            slot of the first row of each shard, -1 if not held
    positions         0 1 2 3 4 5 6        in dataset order, position p is row p, of shard p % 3
      slots           0 . 3 1 . 4 2        on the first device; undefined for shard 1

Windows over series address steps instead: a slot is the step in memory at which a window starts.
Windows of 3 steps with stride 2, over series a of 5 steps and b of 4, share the step a2::

    steps             a0 a1 a2 a3 a4 b0 b1 b2 b3
    windows           a0-2  a2-4  b0-2
      slots           0     2     5

For rows that differ in length, a slot leads to their items through an index.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from lightning_memmap.integers import Integers, items_per_row, starts_of
from lightning_memmap.loading.buffers import Buffers
from lightning_memmap.loading.device_streams import send, upload
from lightning_memmap.loading.row_source import Cut, FieldRows, RowSource, Take, released_error
from lightning_memmap.loading.variable_rows import Allocate, VariableRows, largest
from lightning_memmap.sampling.pool import Pool, held_windows_by_series
from lightning_memmap.sampling.rows import WindowedRows
from lightning_memmap.sampling.sampler import Sampler
from lightning_memmap.schema.fields import Field, select
from lightning_memmap.store import Store
from lightning_memmap.store.files import copy_segments
from lightning_memmap.store.open_columns import (
    IndexedItems,
    Located,
    MappedRows,
    OpenColumn,
    VariableItems,
    compute_index,
)
from lightning_memmap.store.series import find_file_rows, read_series, view_steps, view_windows

#: Up to this many rows, slots are looked up in a table, of 4 bytes per row for slots below 2**32.
TABLE_ROWS = 2**24
#: Rows that are looked up at once.
_LOOKUP_ROWS = 2**18
#: Bytes of short, scattered items that are concatenated before they are copied.
_CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True, eq=False)
class SlotMap:
    """Maps the rows of a pool to slots.

    Args:
        pool: The rows.
        starts: The slot of the first row of each shard, int64 of shape (C,), if the slots of each
            shard are consecutive; else None.
        to_slots: Maps file rows, or storage ranks of windows, to slots; None if they are equal, or
            with ``starts``.
    """

    pool: Pool
    starts: Integers | None
    to_slots: Callable[[Integers], Integers] | None = None

    @classmethod
    def in_store(cls, store: Store, pool: Pool) -> "SlotMap":
        """Map the rows of a split to slots in the mapped columns of its store."""
        to_slots = store.memory_rows if store.has_gaps else None
        return cls(pool, pool.file_starts if to_slots is None else None, to_slots)

    def slots(self, index: Integers) -> Integers:
        """Return the slots of rows, from their pool indices."""
        file_rows = self.pool.file_rows(index)
        return file_rows if self.to_slots is None else self.to_slots(file_rows)

    def slots_of_shard(self, shard: int) -> Iterator[Integers]:
        """Yield the slots of the rows of a shard, in chunks."""
        index = self.pool.indices(shard)
        for start in range(0, len(index), _LOOKUP_ROWS):
            yield self.slots(index[start : start + _LOOKUP_ROWS])

    def locate(self, sampler: Sampler, epoch: int, positions: Any) -> Integers:
        """Return the slots of the rows at positions of an epoch; see `RowSource.locate`."""
        if self.starts is not None:
            return sampler.locate(epoch, positions, self.starts)
        index = sampler.locate(epoch, positions)
        if self.pool.num_rows > TABLE_ROWS:
            return self.slots(index)
        # No index is out of range, and "wrap" is the fastest mode.
        return self._table.take(index, mode="wrap").astype(np.int64)

    @cached_property
    def _table(self) -> NDArray[np.unsignedinteger[Any]]:
        """The slot of each row by its pool index, of shape (rows of all shards,)."""
        shards = [self.slots(self.pool.indices(shard)) for shard in range(self.pool.num_shards)]
        dtype = np.min_scalar_type(max(int(slots.max(initial=0)) for slots in shards))
        return np.concatenate(shards, dtype=dtype, casting="unsafe")


@dataclass(frozen=True, eq=False)
class VariableField:
    """A field whose rows differ in length."""

    field: Field
    #: Returns a tensor with the items of the rows in some slots, and the range of each row in it.
    items_and_ranges: Callable[[Integers], tuple[Tensor, Located]]
    #: Allocates a copy of the rows, if the memory of the items is about to be reused.
    allocate: Allocate | None = None

    def take(self, slots: Integers, cut: Cut | None) -> VariableRows:
        """Return the rows in some slots, or pieces of them."""
        items, (starts, sizes) = self.items_and_ranges(slots)
        if cut is not None and not self.field.is_text:
            starts = starts + cut.starts
            sizes = cut.lengths[:, None]
        rows = VariableRows(self.field, items, starts, sizes, largest(sizes))
        return rows if self.allocate is None else rows.replaced(allocate=self.allocate).copied()


#: Maps slots to indices in a column, on the same device.
ToIndex: TypeAlias = Callable[[Tensor], Tensor]


class Columns:
    """All fields of some rows, in the memory of one device; text is on the CPU.

    A field is a tensor with one row per index, a view of all windows over its steps, or a
    `VariableField`. If its indices are not the slots, it has a function that maps slots to them.
    """

    def __init__(
        self,
        columns: Sequence[Tensor | VariableField],
        device: torch.device,
        to_index: Sequence[ToIndex | None] | None = None,
    ) -> None:
        self.device = device
        self._columns = [*zip(columns, to_index or [None] * len(columns), strict=True)]

    def take(
        self, slots: Tensor, out: Buffers | None = None, cut: Cut | None = None
    ) -> list[FieldRows]:
        """Copy the rows in some slots into one batch; see `Take`."""
        buffers = iter(out or [])
        leaves: list[FieldRows] = []
        indices: dict[Any, Tensor] = {}
        for column, to_index in self._columns:
            # Rows of variable length are looked up on the CPU, without waiting for the device.
            is_variable = isinstance(column, VariableField)
            if (key := (is_variable, to_index)) not in indices:
                local_slots = slots if is_variable else send(slots, self.device)
                indices[key] = local_slots if to_index is None else to_index(local_slots)
            if isinstance(column, VariableField):
                leaves.append(column.take(indices[key].numpy(), cut))
            else:
                leaves.append(select(column, indices[key], next(buffers, None)))
        return leaves


@dataclass(frozen=True, eq=False)
class SeriesSlots:
    """Maps windows over series to slots: the steps in memory at which they start.

    Args:
        windows: The windows.
        origins: The step in memory at which step 0 of each series is, or would be if only later
            steps are held, int64 of shape (series,).
        starts: The first step in memory of each series, int64 of shape (series,).
        rows: The row of each series in the fields that are not cut, or -1 if it is not held,
            int64 of shape (series,).
        device: The device of the rows.
    """

    windows: WindowedRows
    origins: Integers
    starts: Integers
    rows: Integers
    device: torch.device

    @cached_property
    def shifts(self) -> Integers:
        """By series: slot = shift + stride * storage rank, int64 of shape (series,)."""
        return self.origins - self.windows.starts * self.windows.stride

    @property
    def num_slots(self) -> int:
        """A number above all slots: one past the last step in the files, and one more."""
        return int((self.origins + self.windows.series_lengths.array).max()) + 1

    def slots(self, ranks: Integers) -> Integers:
        """Return the slots of windows, from their storage ranks."""
        shifts = self.shifts
        if len(shifts) > 1:
            shifts = shifts[self.windows.in_series(ranks)[0]]
        return ranks * self.windows.stride + shifts

    def slot_map(self, pool: Pool) -> SlotMap:
        """Make the map of a pool of these windows."""
        return SlotMap(pool, None, self.slots)

    def columns(
        self,
        columns: Sequence[tuple[Field, OpenColumn]],
        steps: Callable[[OpenColumn], Tensor],
        rows: Callable[[OpenColumn], Tensor | VariableField],
    ) -> Columns:
        """Combine windows over the steps of cut fields with the rows of the other fields."""
        is_cut = [field.name in self.windows.fields for field, _ in columns]
        in_memory = [
            view_windows(steps(column), self.windows.length) if cut else rows(column)
            for (_, column), cut in zip(columns, is_cut, strict=True)
        ]
        return Columns(in_memory, self.device, [None if cut else self.rows_of for cut in is_cut])

    def rows_of(self, slots: Tensor) -> Tensor:
        """Return the row of the series of each window, for fields that are not cut."""
        starts, rows = self._by_start[slots.device.type]
        return rows[torch.searchsorted(starts, slots, right=True) - 1]

    @cached_property
    def _by_start(self) -> dict[str, list[Tensor]]:
        """By device: starts and rows of the series that are held, in the order of starts."""
        series = np.flatnonzero((self.rows >= 0) & (self.windows.windows_per_series > 0))
        series = series[np.argsort(self.starts[series])]
        tensors = [torch.from_numpy(values[series]) for values in (self.starts, self.rows)]
        return {
            device.type: [send(tensor, device) for tensor in tensors]
            for device in (torch.device("cpu"), self.device)
        }


class Memory(RowSource):
    """Rows of some shards in the memory of one device."""

    def __init__(self, columns: Columns, slot_map: SlotMap) -> None:
        self.device = columns.device
        #: The fields; None once they are released.
        self.columns: Columns | None = columns
        self._slot_map = slot_map

    @override
    def release(self) -> None:
        super().release()
        self.columns = None

    @override
    def locate(self, sampler: Sampler, epoch: int, positions: range | Integers) -> Integers:
        return self._slot_map.locate(sampler, epoch, positions)

    @override
    def epoch(self, sampler: Sampler, epoch: int, position: int) -> AbstractContextManager[Take]:
        return nullcontext(self.take)

    def take(
        self, slots: Tensor, out: Buffers | None = None, cut: Cut | None = None
    ) -> list[FieldRows]:
        """Copy rows, in any order, into a batch; see `Take`."""
        if self.columns is None:
            raise released_error()
        return self.columns.take(slots, out, cut)


def map_in_place(
    columns: Sequence[tuple[Field, OpenColumn]], slot_map: SlotMap, series: SeriesSlots | None
) -> Memory:
    """Use the rows, or windows over series, in the file mapping of a store. Reads none yet."""
    if series is None:
        in_place = [column_in_place(column) for _, column in columns]
        return Memory(Columns(in_place, torch.device("cpu")), slot_map)
    return Memory(series.columns(columns, view_steps, column_in_place), slot_map)


def column_in_place(column: OpenColumn) -> Tensor | VariableField:
    """Return the rows of a mapped column, not copied."""
    if isinstance(column, VariableItems):
        return VariableField(column.field, column.items_and_ranges)
    return column.tensor.as_subclass(Tensor)


def copy_rows(
    columns: Sequence[tuple[Field, OpenColumn]],
    slot_map: SlotMap,
    shards: list[int],
    device: torch.device,
) -> Memory:
    """Copy shards of a store to the host or to a device, in long reads."""
    pool = slot_map.pool
    sizes = pool.sizes[shards]
    starts = np.full(pool.num_shards, -1, np.int64)
    starts[shards] = starts_of(sizes)

    copies = [
        _copy_column(
            column,
            chain.from_iterable(map(slot_map.slots_of_shard, shards)),
            int(sizes.sum()),
            device,
        )
        for _, column in columns
    ]
    return Memory(Columns(copies, device), SlotMap(pool, starts))


def map_series(store: Store, pool: Pool) -> SeriesSlots:
    """Find the series of a split in the file mapping of its store."""
    windows = pool.rows
    assert isinstance(windows, WindowedRows)
    starts = read_series(store, windows.fields, windows.series).starts
    rows = store.memory_rows(find_file_rows(windows.series))
    return SeriesSlots(windows, starts, starts, rows, torch.device("cpu"))


def copy_windows(
    columns: Sequence[tuple[Field, OpenColumn]],
    mapped: SeriesSlots,
    pool: Pool,
    shards: list[int],
    device: torch.device,
) -> Memory:
    """Copy the steps of windows to the host or to a device, shared steps once."""
    windows = mapped.windows
    first_windows, counts = held_windows_by_series(pool, shards)
    held = np.flatnonzero(counts)
    skipped_steps = first_windows * windows.stride
    lengths = (counts[held] - 1) * windows.stride + windows.length
    starts = np.zeros_like(mapped.origins)
    starts[held] = starts_of(lengths)
    rows = np.full_like(mapped.origins, -1)
    rows[held] = np.arange(len(held))
    series = SeriesSlots(windows, starts - skipped_steps, starts, rows, device)
    segments = (mapped.origins + skipped_steps)[held], lengths
    copies = series.columns(
        columns,
        lambda column: _copy_items(view_steps(column), [segments], int(lengths.sum()), device),
        lambda column: _copy_column(column, [mapped.rows[held]], len(held), device),
    )
    return Memory(copies, series.slot_map(pool))


def _copy_column(
    column: OpenColumn, slots: Iterable[Integers], num_rows: int, device: torch.device
) -> Tensor | VariableField:
    """Copy rows of a column, chunk by chunk of their slots."""
    if isinstance(column, MappedRows):
        segments = ((chunk, np.ones_like(chunk)) for chunk in slots)
        return _copy_items(column.tensor.as_subclass(Tensor), segments, num_rows, device)
    assert isinstance(column, IndexedItems)
    located = [column.locate(chunk) for chunk in slots]
    lengths = [items_per_row(chunk.sizes) for chunk in located]
    num_items = sum(int(chunk.sum()) for chunk in lengths)
    if column.field.is_text:
        device = torch.device("cpu")
    starts = (chunk.starts for chunk in located)
    items = _copy_items(column.items, zip(starts, lengths, strict=True), num_items, device)
    no_rows = np.zeros((0, column.field.num_variable), np.int64)
    index = compute_index(np.concatenate([no_rows, *(chunk.sizes for chunk in located)]))
    return VariableField(
        column.field, IndexedItems(column.field, column.file_rows, items, index).items_and_ranges
    )


def _copy_items(
    source: Tensor,
    segments: Iterable[tuple[Integers, Integers]],
    num_items: int,
    device: torch.device,
) -> Tensor:
    """Copy segments of items, by their starts and lengths, and concatenate them."""
    target = torch.empty((num_items, *source.shape[1:]), dtype=source.dtype, device=device)
    if target.nbytes:
        upload(chain.from_iterable(_read_segments(source, *chunk) for chunk in segments), target)
    return target


def _read_segments(source: Tensor, starts: Integers, lengths: Integers) -> Iterator[Tensor]:
    """Yield segments of items: a view of adjacent ones, or copies, some bytes at a time."""
    if np.array_equal(starts[1:], (starts + lengths)[:-1]):
        if len(starts):
            yield source[int(starts[0]) : int(starts[-1] + lengths[-1])]
        return
    # Merge segments that are adjacent in the source.
    run_starts = np.flatnonzero(np.append(True, starts[1:] != starts[:-1] + lengths[:-1]))
    starts = starts[run_starts]
    lengths = np.add.reduceat(lengths, run_starts)
    targets = starts_of(lengths)
    total = int(lengths.sum())
    item_bytes = source[:1].nbytes
    max_items = max(1, _CHUNK_BYTES // item_bytes)
    for start in range(0, total, max_items):
        stop = min(start + max_items, total)
        starts_here, stops_here = np.clip([targets, targets + lengths], start, stop)
        here = np.flatnonzero(starts_here < stops_here)
        chunk = torch.empty((stop - start, *source.shape[1:]), dtype=source.dtype)
        copy_segments(
            source.view(-1).view(torch.uint8).numpy(),
            (starts + starts_here - targets)[here] * item_bytes,
            chunk.view(-1).view(torch.uint8).numpy(),
            (starts_here - start)[here] * item_bytes,
            (stops_here - starts_here)[here] * item_bytes,
        )
        yield chunk
