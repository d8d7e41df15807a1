"""Windows over series, in one place in memory: each step is there once."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from lightning_memmap.loading.buffers import Buffers, copy_windows
from lightning_memmap.loading.device_streams import has_streams, send
from lightning_memmap.loading.resident import ResidentRows, mapped_tensor, read_slice
from lightning_memmap.loading.row_source import Leaf, RandomAccessRows, fixed_fields
from lightning_memmap.loading.store_offsets import TABLE_ROWS, StoreOffsets
from lightning_memmap.loading.upload import Uploader
from lightning_memmap.loading.variable_rows import VariableRows, located_rows
from lightning_memmap.sampling import Integers, Pool, Sampler, WindowedRows, spans_of
from lightning_memmap.schema import Field
from lightning_memmap.store import Store
from lightning_memmap.store.columns import ItemRows, OpenColumn, packed_index
from lightning_memmap.store.series import read_series, series_places, steps_of, windows_over

#: Steps that lie apart are copied from a file in pieces of this size.
_COPY_BYTES = 64 * 2**20


class SeriesPlaces(NamedTuple):
    """Where the series of a source are, with an entry for each in the order of a file."""

    begins: Integers
    """The step of the memory at which the first window of each begins, or would: int64."""
    starts: Integers
    """The first step of the memory that belongs to each, int64."""
    rows: Integers
    """Where the other fields of each are, int64. -1 for a series without a window here."""


class WindowRows(RandomAccessRows):
    """Windows over series in one place in memory.

    Args:
        fields: The fields as batches have them.
        cut: For each of them that is cut into windows its steps, of shape (steps, *step shape);
            None for the others.
        others: The rows of these others; None where there are none.
        places: Where the series are.
        offsets: Where the windows are on the line of all windows.
        device: Where the steps are.
    """

    def __init__(
        self,
        fields: Sequence[Field],
        cut: Sequence[Tensor | None],
        others: ResidentRows | None,
        places: SeriesPlaces,
        offsets: StoreOffsets,
        device: torch.device,
    ) -> None:
        line = offsets.pool.rows
        assert isinstance(line, WindowedRows)
        self.device = device
        self.fields = [(field.shape, field.dtype) for field in fields]
        fixed = fixed_fields(self.fields)
        self.row_bytes = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in fixed)
        self._windows = [
            None if steps is None else windows_over(steps, line.length) for steps in cut
        ]
        self._others = others
        self.line, self._offsets = line, offsets
        #: Which fields are cut.
        self.is_cut = [steps is not None for steps in cut]
        #: By series, what is added to the place of a window on the line, in strides, to find the
        #: step at which it begins.
        self.shifts = places.begins - (line.ends - line.counts) * line.stride
        # The other way round: the series of a step.
        here = np.flatnonzero((places.rows >= 0) & (line.counts > 0))
        here = here[np.argsort(places.starts[here])]
        self._starts = send(torch.from_numpy(places.starts[here]), device)
        self._rows = send(torch.from_numpy(places.rows[here]), device)

    @property
    def num_places(self) -> int:
        """One more than the last step of the files."""
        line = self.line
        begins = (line.ends - line.counts) * line.stride + self.shifts
        return int((begins + line.steps.array).max()) + 1

    @override
    def release(self) -> None:
        super().release()
        self._windows, self._others = [], None

    @override
    def locate(self, sampler: Sampler, epoch: int, positions: range) -> Integers:
        places = self._offsets.locate(sampler, epoch, positions)
        shifts = self.shifts
        if len(shifts) > 1:
            if self.line.num_rows <= TABLE_ROWS:
                # No place is outside: "wrap" is the fastest mode.
                return self._begins.take(places, mode="wrap").astype(np.int64)
            shifts = shifts[self.line.in_series(places).series]
        places *= self.line.stride
        places += shifts
        return places

    @cached_property
    def _begins(self) -> NDArray[np.integer[Any]]:
        """The step at which each window begins, in the order of the line, of shape (windows,).

        To search for a window's series takes as long as to copy a short window.
        """
        begins = np.repeat(self.shifts, self.line.counts)
        stride = self.line.stride
        begins += np.arange(0, len(begins) * stride, stride)
        return begins.astype(np.min_scalar_type(int(begins.max())))

    @override
    def fetch(
        self, locations: Tensor, out: Buffers | None = None, *, pin_memory: bool = False
    ) -> list[Leaf]:
        if self.device.type == "cpu":
            if out is None:
                fields = fixed_fields(self.fields)
                out = Buffers.empty(fields, len(locations), pin_memory=pin_memory)
            return self.copy(self._windows, locations, locations, out)
        rest = self._fetch_others(locations, None)
        here = send(locations, self.device)
        return [
            next(rest) if windows is None else windows.index_select(0, here)
            for windows in self._windows
        ]

    def copy(
        self,
        windows: Sequence[Tensor | None],
        starts: Tensor,
        locations: Tensor,
        out: Buffers,
    ) -> list[Leaf]:
        """Copy windows into one batch, on a CPU."""
        rest = self._fetch_others(locations, out)
        targets = iter(self._targets(out, True).tensors)
        leaves = list[Leaf]()
        for each in windows:
            if each is None:
                leaves.append(next(rest))
            else:
                leaves.append(target := next(targets))
                copy_windows(each, starts, target)
        return leaves

    def _fetch_others(self, locations: Tensor, out: Buffers | None) -> Iterator[Leaf]:
        if self._others is None:
            return iter(())
        here = send(locations, self.device)
        rows = self._rows[torch.searchsorted(self._starts, here, right=True) - 1]
        if self._others.has_variable:
            rows = rows.cpu()
        return iter(self._others.fetch(rows, None if out is None else self._targets(out, False)))

    def _targets(self, out: Buffers, is_cut: bool) -> Buffers:
        """The buffers of the fields that are cut into windows, or of the others."""
        fixed = [
            windows is not None
            for windows, (shape, _) in zip(self._windows, self.fields, strict=True)
            if None not in shape
        ]
        chosen = [index for index, found in enumerate(fixed) if found == is_cut]
        return Buffers(
            [out.tensors[index] for index in chosen], [out.rows[index] for index in chosen]
        )


def window_rows(
    store: Store,
    needed: Sequence[tuple[Field, OpenColumn]],
    pool: Pool,
    chosen: Sequence[int],
    device: torch.device | None,
) -> WindowRows:
    """The windows over the rows of a store that some shards have."""
    line = pool.rows
    assert isinstance(line, WindowedRows)
    rows = store.in_memory(series_places(line.series))
    begins = starts = read_series(store, line.fields, line.series).begins
    is_cut = [field.name in line.fields for field, _ in needed]
    fields = [
        field.windowed(line.length) if cut else field
        for (field, _), cut in zip(needed, is_cut, strict=True)
    ]
    columns = [column for _, column in needed]
    steps = [steps_of(c) if cut else None for c, cut in zip(columns, is_cut, strict=True)]
    others = [mapped_tensor(column) for column, cut in zip(columns, is_cut, strict=True) if not cut]
    place = torch.device("cpu")
    if device is not None:
        place = device
        firsts, counts = spans_of(pool, chosen)
        used = np.flatnonzero(counts)
        lengths = (counts[used] - 1) * line.stride + line.length
        pieces = begins[used] + firsts[used] * line.stride
        steps = [
            None if each is None else _copied_steps(field, each, pieces, lengths, device)
            for field, each in zip(fields, steps, strict=True)
        ]
        others = [_copied_others(other, rows[used], device) for other in others]
        starts, rows = np.zeros_like(begins), np.full_like(rows, -1)
        starts[used] = np.cumsum(lengths) - lengths
        begins = starts - firsts * line.stride
        rows[used] = np.arange(len(used))
    return WindowRows(
        fields,
        steps,
        ResidentRows(others, place, np.zeros(0, np.int64)) if others else None,
        SeriesPlaces(begins, starts, rows),
        StoreOffsets(pool, line.num_rows),
        place,
    )


def _copied_steps(
    field: Field, steps: Tensor, starts: Integers, lengths: Integers, device: torch.device
) -> Tensor:
    """Copy pieces of the steps of a field, one piece after the other."""
    target = torch.empty((int(lengths.sum()), *steps.shape[1:]), dtype=steps.dtype, device=device)
    if not target.nbytes:
        return target
    # Pieces that follow one another are one.
    edges = np.flatnonzero(starts[1:] != starts[:-1] + lengths[:-1]) + 1
    starts = starts[np.append(0, edges)]
    lengths = np.add.reduceat(lengths, np.append(0, edges))
    ends = np.cumsum(lengths)
    item = replace(field, shape=(None, *field.shape[1:]))
    most = max(1, _COPY_BYTES // item.item_bytes)
    with ExitStack() as stack:
        uploader = stack.enter_context(Uploader(device)) if has_streams(device) else None
        first = done = 0
        while first < len(ends):
            end = max(first + 1, int(np.searchsorted(ends, done + most, side="right")))
            if end == first + 1:
                source = steps[int(starts[first]) : int(starts[first] + lengths[first])]
            else:
                sizes = lengths[first:end, None]
                source = VariableRows(item, steps, starts[first:end], sizes, ()).packed()
            piece = target[done : done + len(source)]
            if uploader is None:
                piece.copy_(source)
            else:
                uploader.copy(piece, partial(read_slice, source))
            first, done = end, done + len(source)
    return target


def _copied_others(
    column: Tensor | ItemRows, rows: Integers, device: torch.device
) -> Tensor | ItemRows:
    if isinstance(column, Tensor):
        return column.index_select(0, torch.from_numpy(rows)).to(device)
    found = located_rows(column, rows)
    items = found.packed() if column.field.is_text else found.packed().to(device)
    return ItemRows(column.field, column.shards, items, packed_index(found.sizes))
