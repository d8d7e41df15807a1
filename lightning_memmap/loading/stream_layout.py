"""What a stream has in memory of each window of an epoch, and which reads bring it there.

A row is told by its place in the files, and a window over series by the first of its steps: these
are slots. With windows over series, the steps that several of them have in common are read once,
and the other fields, which have one value for each series, are copied from the file mapping.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.loading.buffers import Buffers, byte_pool
from lightning_memmap.loading.memory import Columns, Ragged, in_place
from lightning_memmap.loading.places import Places, SeriesPlaces
from lightning_memmap.loading.row_file import RowFile
from lightning_memmap.loading.row_source import FieldRows, Leaf
from lightning_memmap.loading.runs import ItemSpace, Read, Runs, scratch_memory
from lightning_memmap.loading.window_sizes import (
    largest_of_any,
    largest_window,
    largest_window_steps,
)
from lightning_memmap.sampling import Integers, ReadWindows
from lightning_memmap.schema import Field
from lightning_memmap.store.open_columns import ItemRows, Located, OpenColumn
from lightning_memmap.store.series import windows_over


class _RaggedMemory:
    """Items of a window, and where in them the row at each place of the window begins."""

    def __init__(self, rows: ItemRows, space: ItemSpace, num_rows: int) -> None:
        field = rows.field
        self._rows, self._space = rows, space
        self.items = space.allocate(field.item_shape, field.dtype)
        self._starts = np.zeros(num_rows, np.int64)
        self._sizes = np.zeros((num_rows, field.num_variable), np.int64)
        # The memory will be read over.
        self.column = Ragged(field, self.items, self._at, byte_pool())

    def _at(self, places: Integers) -> Located:
        return Located(self._starts[places], self._sizes[places])

    def reads(self, slots: Integers, places: Integers) -> Iterator[Read]:
        """The reads that bring rows to memory. It is noted here where they go."""
        found = self._rows.at(slots)
        runs = self._space.place(found)
        self._starts[places] = runs.of(found.starts)
        self._sizes[places] = found.sizes
        yield from self._space.reads(runs, [self.items])


class StreamMemory:
    """The memory of a window, on the CPU, with undefined content."""

    def __init__(self, layout: "StreamLayout") -> None:
        self._layout = layout
        self.items, self.ragged = list[Tensor](), list[_RaggedMemory]()
        self._runs = Runs(*np.zeros((3, 1), np.int64))
        series, columns = layout.series, list[Tensor | Ragged]()
        for index, (field, rows) in enumerate(layout.columns):
            if index in layout.ragged and isinstance(rows, ItemRows):
                memory = _RaggedMemory(rows, layout.ragged[index], layout.space.num_items)
                self.ragged.append(memory)
                columns.append(memory.column)
            elif not layout.has_items(index):
                columns.append(in_place(rows))
            else:
                item = field if series is None else replace(field, shape=field.shape[1:])
                self.items.append(layout.space.allocate(item.item_shape, field.dtype))
                columns.append(
                    self.items[-1]
                    if series is None
                    else windows_over(self.items[-1], series.line.length)
                )
        self._columns = Columns(columns, torch.device("cpu"), series, layout.is_cut)

    def reads(self, windows: ReadWindows, epoch: int, number: int) -> Iterator[Read]:
        """The reads that fill a window, which several threads may do at once."""
        space = self._layout.space
        self._runs = runs = space.place(self._layout.located(windows, epoch, number))
        yield from space.reads(runs, self.items)
        if self.ragged:
            counts = runs.ends - runs.begins
            shifts = np.repeat(runs.begins - (np.cumsum(counts) - counts), counts)
            slots = shifts + np.arange(len(shifts))
            for each in self.ragged:
                yield from each.reads(slots, runs.of(slots))

    def fetch(self, slots: Tensor, out: Buffers) -> list[Leaf]:
        """Copy rows into a batch."""
        return self._columns.take(torch.from_numpy(self._runs.of(slots.numpy())), slots, out)


class StreamLayout:
    """How the rows of some shards are read, window by window."""

    def __init__(
        self,
        columns: Sequence[tuple[Field, OpenColumn]],
        files: Sequence[RowFile | None],
        places: Places,
        num_slots: int,
        *,
        held: Sequence[int],
        windows: ReadWindows,
        series: SeriesPlaces | None = None,
    ) -> None:
        if len(windows) * num_slots >= 2**63:
            raise ValueError(
                f"shuffle_window={windows.rows}: an epoch would be read in {len(windows)} windows,"
                f" of {num_slots - 1} places of the files: choose a larger one"
            )
        self.num_slots, self._places, self.columns = num_slots, places, columns
        self._pool, self._held = windows.sampler.pool, np.array(held, np.int64)
        self.series, count = series, len(held)
        most = count * windows.longest
        if series is not None:
            most = largest_window_steps(held, windows)
            if self._pool.is_striped:
                # In dataset order, series that follow one another are in all shards of the store.
                count = self._pool.num_shards
        # Re-striped rows and index views lie apart, and are read with what is between them.
        is_apart = series is None and places.starts is None and places.slots is None
        count = 0 if is_apart else count
        self.is_cut = [series is not None and series.is_cut(field) for field, _ in columns]
        #: The fields as batches have them.
        self.batched = [
            field.windowed(series.line.length) if series is not None and cut else field
            for (field, _), cut in zip(columns, self.is_cut, strict=True)
        ]
        largest_items = largest_window if windows.has_runs else largest_of_any
        #: By the place of a field whose rows differ in length and are read, room for its items.
        self.ragged = {
            index: ItemSpace(
                field.name, [file], largest_items(rows, places, held, windows.longest), count
            )
            for index, ((field, rows), file) in enumerate(zip(columns, files, strict=True))
            if series is None and isinstance(rows, ItemRows)
        }
        chosen = [file for index, file in enumerate(files) if self.has_items(index)]
        #: Room for the rows that have one shape, or for steps.
        self.space = ItemSpace(columns[0][0].name, chosen, most, count)

    def has_items(self, index: int) -> bool:
        """Whether a field has a row of one shape, or a step, at each place."""
        return index not in self.ragged if self.series is None else self.is_cut[index]

    @property
    def fields(self) -> list[FieldRows]:
        """Shape of one row and dtype of each field."""
        return [(field.shape, field.dtype) for field in self.batched]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all fields, on average over the store where rows differ."""
        found = [field.row_bytes for field in self.batched if not field.num_variable]
        ragged = [rows for index, (_, rows) in enumerate(self.columns) if index in self.ragged]
        return sum(found) + sum(
            -(-rows.items.nbytes // len(rows.index))
            for rows in ragged
            if isinstance(rows, ItemRows)
        )

    def locate(self, windows: ReadWindows, epoch: int, positions: range) -> Integers:
        """Where rows are in the files, if these came again for each block."""
        found = self._places.locate(windows.sampler, epoch, positions)
        for number, here in windows.parts(positions):
            found[here] += number * self.num_slots
        return found

    def scratch(self) -> memoryview:
        """Scratch memory for the reads of one thread; see `scratch_memory`."""
        return scratch_memory(max((each.item_bytes for each in self.batched), default=1))

    def located(self, windows: ReadWindows, epoch: int, number: int) -> Located:
        """The items of a window in the files: the first of each run, and their number."""
        if self.series is not None:
            return located_steps(self.series, self._held, windows, epoch, number)
        starts, sizes = self._places.starts, self._pool.sizes[self._held]
        if starts is not None and windows.has_runs:
            runs = windows.runs(epoch, number)
            begins = np.array([run.start for run in runs])
            ends = np.minimum(np.array([run.stop for run in runs]), sizes[:, None])
            counts = np.maximum(0, ends - begins).ravel()
            firsts = (starts[self._held, None] + begins).ravel()
            return Located(firsts[counts > 0], counts[counts > 0, None])
        rows = distinct(self._places.of(*windows.offsets(epoch, number, self._held)))
        return Located(rows, np.ones((len(rows), 1), np.int64))

    def share_used(self, windows: ReadWindows) -> float:
        """Estimate the share of the bytes read that is used, from the first window."""
        found = self.located(windows, 0, 0)
        if self.series is None:
            # As if rows that differ in length did not.
            return self.space.share_used(found, max(1, self.row_bytes))
        # In dataset order, neighbours belong to all shards in turn.
        line, pool = self.series.line, self._pool
        part = len(self._held) / pool.num_shards if pool.is_striped else 1.0
        used = min(1.0, part * line.length / line.stride)
        pairs = zip(self.columns, self.is_cut, strict=True)
        sizes = [field.step_bytes for (field, _), is_cut in pairs if is_cut]
        return used * self.space.share_used(found, max([1, *sizes]))


def located_steps(
    series: SeriesPlaces, held: Integers, windows: ReadWindows, epoch: int, number: int
) -> Located:
    """The steps of a window of the epoch: the first of each run, and their number."""
    line, pool = series.line, windows.sampler.pool
    if windows.has_runs:
        runs, num_shards = windows.runs(epoch, number), pool.num_shards
        if pool.is_striped:
            edges = [(run.start * num_shards, run.stop * num_shards) for run in runs]
            found = line.stretches(num_shards, edges, held.tolist())
        else:
            sizes = zip(pool.starts[held], pool.sizes[held], strict=True)
            edges = [
                (start + run.start, start + min(run.stop, size))
                for start, size in sizes
                for run in runs
            ]
            found = line.stretches(num_shards, edges, None)
        numbers, firsts, counts = found
    else:
        firsts = distinct(pool.places(*windows.offsets(epoch, number, held)))
        numbers, counts = line.in_series(firsts).series, np.ones_like(firsts)
    lengths = (counts - 1) * line.stride + line.length
    return Located(firsts * line.stride + series.shifts[numbers], lengths[:, None])


def distinct(numbers: Integers) -> Integers:
    """The different numbers, ascending. numpy's `unique` takes four times as long."""
    ordered = np.sort(numbers)
    found: Integers = ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]
    return found
