"""Rows in memory: in the file mapping of a store, or copied to the host or to a device.

Every field has something at each slot: a row, the items of a row that differs in length, or the
window that begins there. Steps that windows have in common are there once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_memmap.loading.buffers import Buffers, copy_rows, copy_windows
from lightning_memmap.loading.device_streams import send, upload
from lightning_memmap.loading.places import Places, SeriesPlaces
from lightning_memmap.loading.row_source import (
    Leaf,
    RowSource,
    fixed_fields,
    released_error,
)
from lightning_memmap.loading.variable_rows import Allocate, VariableRows, largest
from lightning_memmap.sampling import Integers, Pool, Sampler, WindowedRows, spans_of
from lightning_memmap.schema import Field
from lightning_memmap.store import Store
from lightning_memmap.store.growing import GrowingItems
from lightning_memmap.store.open_columns import ItemRows, Located, OpenColumn, packed_index
from lightning_memmap.store.segments import pack_segments
from lightning_memmap.store.series import read_series, series_places, steps_of, windows_over

#: Rows that are looked up at once, and bytes of items that lie apart and are copied at once.
_LOOKUP_ROWS, _COPY_BYTES = 2**18, 64 * 2**20


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of a field that differ in length, by their places in memory."""

    field: Field
    items: Tensor
    at: Callable[[Integers], Located]
    allocate: Allocate | None = None

    def take(self, places: Integers) -> VariableRows:
        """The rows at some places."""
        starts, sizes = self.at(places)
        rows = VariableRows(self.field, self.items, starts, sizes, largest(sizes))
        return rows if self.allocate is None else replace(rows, allocate=self.allocate).copied()


@dataclass(frozen=True, eq=False)
class _GrowingRagged(Ragged):
    """Rows of a store that is being built, which are copied: they lie in several files."""

    column: GrowingItems = field(kw_only=True)

    @override
    def take(self, places: Integers) -> VariableRows:
        items, sizes, _ = self.column.read(places)
        assert sizes is not None
        lengths = sizes.prod(axis=1)
        starts = np.cumsum(lengths) - lengths
        return VariableRows(self.field, items, starts, sizes, largest(sizes))


class Columns:
    """The fields of rows in one place in memory; text is on the CPU even so.

    A field is a tensor with a row for each place, rows that differ in length, or a view of all
    windows. With windows over series, the fields that are not cut have one row for each series.
    """

    def __init__(
        self,
        columns: Sequence[Tensor | Ragged],
        device: torch.device,
        series: SeriesPlaces | None = None,
        is_cut: Sequence[bool] = (),
    ) -> None:
        self.device = device
        self.fields = [
            (each.field.shape, each.field.dtype)
            if isinstance(each, Ragged)
            else (tuple(each.shape[1:]), each.dtype)
            for each in columns
        ]
        self._fixed = fixed_fields(self.fields)
        self.row_bytes = sum(torch.Size(shape).numel() * d.itemsize for shape, d in self._fixed)
        self._series = series
        cut = is_cut or [False] * len(columns)
        self._columns = [*zip(columns, cut, strict=True)]
        dense = [c for c, is_cut in self._columns if isinstance(c, Tensor) and not is_cut]
        #: The rows of the fields that have one shape, and are not cut into windows.
        self.dense = Buffers.of(dense)

    def take(
        self, places: Tensor, slots: Tensor, out: Buffers | None, pin_memory: bool = False
    ) -> list[Leaf]:
        """Copy the rows at some places into one batch; slots tell which series windows are of."""
        rows = places
        if self._series is not None:
            rows = self._series.rows_of(send(slots, self.device))
        if self.device.type != "cpu":
            places, rows = send(places, self.device), send(rows, self.device)
            return [
                column.take(rows.cpu().numpy())
                if isinstance(column, Ragged)
                else column.index_select(0, places if is_cut else rows)
                for column, is_cut in self._columns
            ]
        out = out or Buffers.empty(self._fixed, len(places), pin_memory=pin_memory)
        leaves, targets, dense = list[Leaf](), iter(range(len(out.tensors))), list[int]()
        for column, is_cut in self._columns:
            if isinstance(column, Ragged):
                leaves.append(column.take(rows.numpy()))
                continue
            index = next(targets)
            leaves.append(out.tensors[index])
            if is_cut:
                copy_windows(column, places, out.tensors[index])
            else:
                dense.append(index)
        copy_rows(self.dense, rows, out if len(dense) == len(out.tensors) else out[dense])
        return leaves


class Memory(RowSource):
    """Rows of some shards in one place in memory."""

    def __init__(self, columns: Columns, places: Places) -> None:
        self.device, self.fields = columns.device, columns.fields
        self.row_bytes = columns.row_bytes
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

    def fetch(
        self, slots: Tensor, out: Buffers | None = None, *, pin_memory: bool = False
    ) -> list[Leaf]:
        """Copy rows into a batch; see `EpochRows.fetch`."""
        if self.columns is None:
            raise released_error()
        return self.columns.take(slots, slots, out, pin_memory)


def mapped(
    columns: Sequence[tuple[Field, OpenColumn]], places: Places, series: SeriesPlaces | None
) -> Memory:
    """The rows, or windows over series, in the file mapping of a store. Nothing is read yet."""
    if series is None:
        return Memory(Columns([in_place(c) for _, c in columns], torch.device("cpu")), places)
    length, is_cut = series.line.length, [series.is_cut(field) for field, _ in columns]
    found = [
        windows_over(steps_of(column), length) if cut else in_place(column)
        for (_, column), cut in zip(columns, is_cut, strict=True)
    ]
    return Memory(Columns(found, series.device, series, is_cut), places)


def in_place(column: OpenColumn) -> Tensor | Ragged:
    """The rows of an open column where they are."""
    if isinstance(column, GrowingItems):
        return _GrowingRagged(column.field, column.items, column.at, column=column)
    if isinstance(column, ItemRows):
        return Ragged(column.field, column.items, column.at)
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
    starts[shards] = np.cumsum(sizes) - sizes

    def slots() -> Iterator[Integers]:
        for shard, size in zip(shards, sizes.tolist(), strict=True):
            for first in range(0, size, _LOOKUP_ROWS):
                offsets = np.arange(first, min(first + _LOOKUP_ROWS, size), dtype=np.int64)
                yield places.of(np.full_like(offsets, shard), offsets)

    count = int(sizes.sum())
    found = [_copied_column(column, slots(), count, device) for _, column in columns]
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
    firsts, counts = spans_of(pool, shards)
    used = np.flatnonzero(counts)
    lengths = (counts[used] - 1) * line.stride + line.length
    starts, rows = np.zeros_like(mapped.begins), np.full_like(mapped.begins, -1)
    starts[used] = np.cumsum(lengths) - lengths
    rows[used] = np.arange(len(used))
    series = SeriesPlaces(line, starts - firsts * line.stride, starts, rows, device)
    pieces = mapped.begins[used] + firsts[used] * line.stride, lengths
    found, is_cut = list[Tensor | Ragged](), [series.is_cut(field) for field, _ in columns]
    for (_, column), cut in zip(columns, is_cut, strict=True):
        if cut:
            steps = _copied_items(steps_of(column), [pieces], int(lengths.sum()), device)
            found.append(windows_over(steps, line.length))
        else:
            found.append(_copied_column(column, [mapped.rows[used]], len(used), device))
    return Memory(Columns(found, device, series, is_cut), series.places(pool))


def _copied_column(
    column: OpenColumn, slots: Iterable[Integers], count: int, device: torch.device
) -> Tensor | Ragged:
    """Copy rows of a column, of which some are given at once."""
    if not isinstance(column, ItemRows):
        pieces = ((each, np.ones_like(each)) for each in slots)
        return _copied_items(column.tensor.as_subclass(Tensor), pieces, count, device)
    found = [column.at(each) for each in slots]
    lengths = [each.sizes.prod(axis=1) for each in found]
    pairs = zip((each.starts for each in found), lengths, strict=True)
    num_items = sum(int(each.sum()) for each in lengths)
    device = torch.device("cpu") if column.field.is_text else device
    items = _copied_items(column.items, pairs, num_items, device)
    none = np.zeros((0, column.field.num_variable), np.int64)
    index = packed_index(np.concatenate([none, *(each.sizes for each in found)]))
    rows = ItemRows(column.field, column.shards, items, index)
    return Ragged(rows.field, items, rows.at)


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
            pack_segments(memory, begins[here] * size, target, lengths[here] * size)
            yield packed
        first, done = end, int(ends[end - 1])
