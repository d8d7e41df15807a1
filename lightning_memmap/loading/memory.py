"""Rows in memory: in the file mapping of a store, or copied to the host or to a device.

A row is told by its slot: its place in the memory of a store, or the step at which a window begins.
Of each field something is there: a row, the items of a row that differs in length, or the steps of
a window. Steps that windows have in common are there once.
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

from lightning_memmap.loading.buffers import Buffers
from lightning_memmap.loading.device_streams import send, upload
from lightning_memmap.loading.row_source import Leaf, RowSource, Take, released_error
from lightning_memmap.loading.variable_rows import Allocate, VariableRows, largest
from lightning_memmap.sampling.pool import Pool, window_spans
from lightning_memmap.sampling.rows import Integers, WindowedRows, starts_of
from lightning_memmap.sampling.sampler import Sampler
from lightning_memmap.schema.fields import Field, select
from lightning_memmap.store import Store
from lightning_memmap.store.open_columns import (
    ItemRows,
    Located,
    MappedRows,
    OpenColumn,
    RaggedRows,
    packed_index,
)
from lightning_memmap.store.segments import copy_segments
from lightning_memmap.store.series import read_series, series_places, steps_of, windows_over

#: Up to so many rows, a table has their slots, in 4 bytes each where these are below 2**32.
TABLE_ROWS = 2**24
#: Rows that are looked up at once, and bytes of items that lie apart and are copied at once.
_LOOKUP_ROWS, _COPY_BYTES = 2**18, 64 * 2**20


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
        return cls(pool, pool.file_starts if slots is None else None, slots)

    def of(self, index: Integers) -> Integers:
        """The slots of rows, by their index in the pool."""
        return self.moved(self.pool.file_rows(index))

    def moved(self, places: Integers) -> Integers:
        """The slots of places in the files."""
        return places if self.slots is None else self.slots(places)

    def of_shard(self, shard: int) -> Iterator[Integers]:
        """The slots of the rows of a shard, some at a time."""
        index = self.pool.index(shard)
        for first in range(0, len(index), _LOOKUP_ROWS):
            yield self.of(index[first : first + _LOOKUP_ROWS])

    def locate(self, sampler: Sampler, epoch: int, positions: range) -> Integers:
        """The slots of the rows that supply positions."""
        if self.starts is not None:
            return sampler.index(epoch, positions, self.starts)
        begins, is_large = self.pool.file_starts, self.pool.num_rows > TABLE_ROWS
        if begins is not None and (is_large or self.is_cheap):
            return self.moved(sampler.index(epoch, positions, begins))
        rows = sampler.index(epoch, positions)
        if is_large:
            return self.of(rows)
        # No row is outside: "wrap" is the fastest mode.
        return self._table.take(rows, mode="wrap").astype(np.int64)

    @cached_property
    def _table(self) -> NDArray[np.unsignedinteger[Any]]:
        """The slot of each row, shard after shard, of shape (rows of all shards,)."""
        located = [self.of(self.pool.index(shard)) for shard in range(self.pool.num_shards)]
        dtype = np.min_scalar_type(max(int(each.max(initial=0)) for each in located))
        return np.concatenate(located, dtype=dtype, casting="unsafe")


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of a field that differ in length, by their slots."""

    field: Field
    #: The items that rows are among, and where they are.
    among: Callable[[Integers], tuple[Tensor, Located]]
    allocate: Allocate | None = None

    def take(self, slots: Integers) -> VariableRows:
        """The rows in some slots."""
        items, (starts, sizes) = self.among(slots)
        rows = VariableRows(self.field, items, starts, sizes, largest(sizes))
        return rows if self.allocate is None else rows.but(allocate=self.allocate).copied()


#: From slots to the places at which a column has their rows, on the same device.
Find: TypeAlias = Callable[[Tensor], Tensor]


class Columns:
    """The fields of rows in one place in memory; text is on the CPU even so.

    A field is a tensor with a row at each place, a view of all windows over steps, or rows that
    differ in length. Where its places are not the slots, there is a function that finds them.
    """

    def __init__(
        self,
        columns: Sequence[Tensor | Ragged],
        device: torch.device,
        finds: Sequence[Find | None] | None = None,
    ) -> None:
        self.device = device
        self._columns = [*zip(columns, finds or [None] * len(columns), strict=True)]
        #: The fields whose rows have one shape.
        self.tensors = [each for each in columns if isinstance(each, Tensor)]

    def take(self, slots: Tensor, out: Buffers | None = None) -> list[Leaf]:
        """Copy the rows in some slots into one batch; see `Take`."""
        memory, taken, places = iter(out or []), list[Leaf](), dict[Any, Tensor]()
        for column, find in self._columns:
            # Rows that differ in length are found on the CPU: nothing waits for the device.
            is_ragged = isinstance(column, Ragged)
            if (key := (is_ragged, find)) not in places:
                here = slots if is_ragged else send(slots, self.device)
                places[key] = here if find is None else find(here)
            if isinstance(column, Ragged):
                taken.append(column.take(places[key].numpy()))
            else:
                taken.append(select(column, places[key], next(memory, None)))
        return taken


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
        return self.begins - self.line.starts * self.line.stride

    @property
    def num_slots(self) -> int:
        """One more than the last step of the files."""
        return int((self.begins + self.line.steps.array).max()) + 1

    def slots(self, places: Integers) -> Integers:
        """The slots of windows, by their places on the line."""
        shifts = self.shifts
        if len(shifts) > 1:
            shifts = shifts[self.line.in_series(places)[0]]
        return places * self.line.stride + shifts

    def places(self, pool: Pool) -> Places:
        """Where windows lie."""
        return Places(pool, None, self.slots, is_cheap=len(self.line.counts) == 1)

    def columns(
        self,
        columns: Sequence[tuple[Field, OpenColumn]],
        steps: Callable[[OpenColumn], Tensor],
        rows: Callable[[OpenColumn], Tensor | Ragged],
    ) -> Columns:
        """Windows over the steps of fields that are cut, and a row for each series of others."""
        is_cut = [field.name in self.line.fields for field, _ in columns]
        found = [
            windows_over(steps(column), self.line.length) if cut else rows(column)
            for (_, column), cut in zip(columns, is_cut, strict=True)
        ]
        return Columns(found, self.device, [None if cut else self.rows_of for cut in is_cut])

    def rows_of(self, slots: Tensor) -> Tensor:
        """Where the other fields are of the series that windows are of, on the same device."""
        starts, rows = self._by_start[slots.device.type]
        return rows[torch.searchsorted(starts, slots, right=True) - 1]

    @cached_property
    def _by_start(self) -> dict[str, list[Tensor]]:
        here = np.flatnonzero((self.rows >= 0) & (self.line.counts > 0))
        here = here[np.argsort(self.starts[here])]
        found = [torch.from_numpy(each[here]) for each in (self.starts, self.rows)]
        return {
            device.type: [send(each, device) for each in found]
            for device in (torch.device("cpu"), self.device)
        }


class Memory(RowSource):
    """Rows of some shards in one place in memory."""

    def __init__(self, columns: Columns, places: Places) -> None:
        self.device = columns.device
        #: The fields; None once they are released.
        self.columns: Columns | None = columns
        self._places = places

    @override
    def release(self) -> None:
        super().release()
        self.columns = None

    @override
    def locate(self, sampler: Sampler, epoch: int, positions: range) -> Integers:
        return self._places.locate(sampler, epoch, positions)

    @override
    def epoch(self, sampler: Sampler, epoch: int, position: int) -> AbstractContextManager[Take]:
        return nullcontext(self.take)

    def take(self, slots: Tensor, out: Buffers | None = None) -> list[Leaf]:
        """Copy rows, in any order, into a batch; see `Take`."""
        if self.columns is None:
            raise released_error()
        return self.columns.take(slots, out)


def mapped(
    columns: Sequence[tuple[Field, OpenColumn]], places: Places, series: SeriesPlaces | None
) -> Memory:
    """The rows, or windows over series, in the file mapping of a store. Nothing is read yet."""
    if series is None:
        return Memory(Columns([in_place(c) for _, c in columns], torch.device("cpu")), places)
    return Memory(series.columns(columns, steps_of, in_place), places)


def in_place(column: OpenColumn) -> Tensor | Ragged:
    """The rows of an open column where they are."""
    if isinstance(column, RaggedRows):
        return Ragged(column.field, column.among)
    return column.tensor.as_subclass(Tensor)


def copied_rows(
    columns: Sequence[tuple[Field, OpenColumn]],
    places: Places,
    shards: list[int],
    device: torch.device,
) -> Memory:
    """Rows of a store that are copied to the host or to a device, in long reads."""
    pool = places.pool
    sizes, starts = pool.sizes[shards], np.full(pool.num_shards, -1, np.int64)
    starts[shards] = starts_of(sizes)

    found = [
        _copied_column(
            column, chain.from_iterable(map(places.of_shard, shards)), int(sizes.sum()), device
        )
        for _, column in columns
    ]
    return Memory(Columns(found, device), Places(pool, starts))


def series_in(store: Store, pool: Pool) -> SeriesPlaces:
    """Where the series of a split are in the file mapping of its store."""
    line = pool.rows
    assert isinstance(line, WindowedRows)
    begins = read_series(store, line.fields, line.series).begins
    rows = store.in_memory(series_places(line.series))
    return SeriesPlaces(line, begins, begins, rows, torch.device("cpu"))


def copied_windows(
    columns: Sequence[tuple[Field, OpenColumn]],
    mapped: SeriesPlaces,
    pool: Pool,
    shards: list[int],
    device: torch.device,
) -> Memory:
    """Windows over series whose steps are copied to the host or to a device, each of them once."""
    line = mapped.line
    firsts, counts = window_spans(pool, shards)
    used = np.flatnonzero(counts)
    lengths = (counts[used] - 1) * line.stride + line.length
    starts, rows = np.zeros_like(mapped.begins), np.full_like(mapped.begins, -1)
    starts[used] = starts_of(lengths)
    rows[used] = np.arange(len(used))
    series = SeriesPlaces(line, starts - firsts * line.stride, starts, rows, device)
    pieces = mapped.begins[used] + firsts[used] * line.stride, lengths
    found = series.columns(
        columns,
        lambda column: _copied_items(steps_of(column), [pieces], int(lengths.sum()), device),
        lambda column: _copied_column(column, [mapped.rows[used]], len(used), device),
    )
    return Memory(found, series.places(pool))


def _copied_column(
    column: OpenColumn, slots: Iterable[Integers], count: int, device: torch.device
) -> Tensor | Ragged:
    """Copy rows of a column, of which some are given at once."""
    if isinstance(column, MappedRows):
        pieces = ((each, np.ones_like(each)) for each in slots)
        return _copied_items(column.tensor.as_subclass(Tensor), pieces, count, device)
    assert isinstance(column, ItemRows)
    found = [column.at(each) for each in slots]
    lengths = [each.sizes.prod(axis=1) for each in found]
    pairs = zip((each.starts for each in found), lengths, strict=True)
    num_items = sum(int(each.sum()) for each in lengths)
    device = torch.device("cpu") if column.field.is_text else device
    items = _copied_items(column.items, pairs, num_items, device)
    none = np.zeros((0, column.field.num_variable), np.int64)
    index = packed_index(np.concatenate([none, *(each.sizes for each in found)]))
    return Ragged(column.field, ItemRows(column.field, column.shards, items, index).among)


def _copied_items(
    source: Tensor, pieces: Iterable[tuple[Integers, Integers]], count: int, device: torch.device
) -> Tensor:
    """Copy pieces of items, by their begins and lengths, one after another."""
    target = torch.empty((count, *source.shape[1:]), dtype=source.dtype, device=device)
    if target.nbytes:
        upload(chain.from_iterable(_parts(source, *each) for each in pieces), target)
    return target


def _parts(source: Tensor, begins: Integers, lengths: Integers) -> Iterator[Tensor]:
    """Pieces of items: long ones as they lie, and short ones packed together."""
    # Pieces that follow one another are one.
    firsts = np.flatnonzero(np.append(True, begins[1:] != begins[:-1] + lengths[:-1]))
    firsts = firsts[: len(begins)]
    begins, lengths = begins[firsts], np.add.reduceat(lengths, firsts) if len(firsts) else lengths
    ends, size = np.cumsum(lengths), source[:1].nbytes
    first = done = 0
    while first < len(ends):
        most = done + max(1, _COPY_BYTES // size)
        end = max(first + 1, int(np.searchsorted(ends, most, side="right")))
        if end == first + 1:
            yield source[int(begins[first]) : int(begins[first] + lengths[first])]
        else:
            packed = torch.empty((int(ends[end - 1]) - done, *source.shape[1:]), dtype=source.dtype)
            here = slice(first, end)
            memory = source.view(-1).view(torch.uint8).numpy()
            target = packed.view(-1).view(torch.uint8).numpy()
            places = (ends - lengths)[here] - done
            copy_segments(memory, begins[here] * size, target, places * size, lengths[here] * size)
            yield packed
        first, done = end, int(ends[end - 1])
