"""Where the rows of a window lie in memory, and how they are read from the files.

Whatever is read are items of a file: rows of one shape, the items of rows that differ in length, or
the steps of series. Items that follow one another in a file are a run, and do so in memory too.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.loading.buffers import Buffers, GrowingPool, copy_rows
from lightning_memmap.loading.row_file import RowFile, aligned_memory
from lightning_memmap.loading.row_source import Leaf
from lightning_memmap.loading.store_offsets import StoreOffsets
from lightning_memmap.loading.variable_rows import VariableRows, largest
from lightning_memmap.loading.window_reads import (
    Pieces,
    Read,
    block_rows,
    reads_in_place,
    reads_of_pieces,
    scratch_memory,
)
from lightning_memmap.loading.window_rows import WindowRows
from lightning_memmap.loading.window_sizes import (
    largest_of_any,
    largest_window,
    largest_window_steps,
)
from lightning_memmap.sampling import Integers, ReadWindows
from lightning_memmap.schema import Field
from lightning_memmap.store.columns import ItemRows, Located
from lightning_memmap.store.series import windows_over

#: Runs of a shard in a window that are few: it may wrap around, and reach into another store.
MAX_RUNS = 6
#: What may stay free so that a disk can write to memory directly: bytes at each end of a run, or
#: a share of the memory.
_MAX_FREE_BYTES, _MAX_FREE = 64 * 2**10, 1 / 64


class Runs(NamedTuple):
    """Runs of items of a file, and where they are in memory."""

    begins: Integers
    """The first item of each run, int64 of shape (runs,), ascending."""
    ends: Integers
    """One past its last one."""
    places: Integers
    """Where it begins in memory."""

    def of(self, items: Integers) -> Integers:
        """Where items of the runs are in memory."""
        if len(self.begins) == 1:
            return items + (self.places - self.begins)
        runs = np.searchsorted(self.begins, items, side="right") - 1
        found: Integers = items + (self.places - self.begins)[runs]
        return found


class ItemSpace:
    """The memory of a window for items of some files, at the same places in each of them.

    Where runs are few, each begins as far from the beginning of a block in memory as it does in the
    file, so that a disk can write it directly. Otherwise items are copied there, read together with
    those near them.

    Args:
        name: The field, for messages.
        files: The files of the items; None for one without bytes.
        max_items: Items in a window at most.
        max_runs: How many runs are few.
    """

    def __init__(
        self, name: str, files: Sequence[RowFile | None], max_items: int, max_runs: int
    ) -> None:
        self._name, self._files, self._max_runs = name, files, max_runs
        opened = [file for file in files if file is not None]
        limit = _MAX_FREE_BYTES // max(1, sum(file.row_bytes for file in opened))
        of_share = max_items * _MAX_FREE / (2 * max_runs) if max_runs else 0
        blocks = [block_rows(file) for file in opened]
        #: A run's place is, modulo this, its first item: whole blocks of as many files as may be.
        self._unit = max((each for each in blocks if each <= max(1, limit, of_share)), default=1)
        #: Items that there is room for.
        self.num_items = max_items + 2 * (self._unit - 1) * max_runs

    def place(self, found: Located) -> Runs:
        """Find places for items."""
        begins, ends = runs_of(found)
        unit = self._unit if len(begins) <= self._max_runs else 1
        free = begins % unit
        taken = -(-(free + ends - begins) // unit) * unit
        if int(taken.sum()) > self.num_items:
            raise ValueError(
                f"residency='stream': a window has {int((ends - begins).sum())} items of field"
                f" {self._name!r}, and windows of rows that follow one another have"
                f" {self.num_items} at most: let window_runs of the sampler return such rows"
            )
        return Runs(begins, ends, np.cumsum(taken) - taken + free)

    def reads(self, runs: Runs, memory: Sequence[Tensor]) -> Iterator[Read]:
        """The reads that bring the items of all files to their places."""
        for file, items in zip(self._files, memory, strict=True):
            if file is None or not items.numel():
                continue
            target = items.view(-1).view(torch.uint8).view(-1, file.row_bytes)
            if len(runs.begins) > self._max_runs:
                yield from reads_of_pieces(file, *runs, target)
                continue
            for index, place in enumerate(runs.places.tolist()):
                run = Runs(*(each[index : index + 1] for each in runs))
                if self._unit % block_rows(file):
                    yield from reads_of_pieces(file, *run, target)
                    continue
                rows = range(int(run.begins[0]), int(run.ends[0]))
                yield from reads_in_place(file, rows, place, target)

    def allocate(self, item_shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory that a disk can write items to, of shape (num_items, *item_shape)."""
        num_bytes = self.num_items * math.prod(item_shape) * dtype.itemsize
        flat = torch.frombuffer(aligned_memory(max(1, num_bytes)), dtype=torch.uint8)[:num_bytes]
        return flat.view(dtype).view(self.num_items, *item_shape)

    def share_used(self, found: Located, item_bytes: int) -> float:
        """The share of the items read that are wanted, where gaps between runs are read too."""
        begins, ends = runs_of(found)
        pieces = Pieces.of(begins, ends, item_bytes)
        if len(begins) <= self._max_runs or not pieces.num_read:
            return 1.0
        return pieces.num_used / pieces.num_read


def runs_of(found: Located) -> tuple[Integers, Integers]:
    """The first item of each run, and one past its last one, ascending."""
    lengths = found.sizes.prod(axis=1)
    order = np.argsort(found.starts, kind="stable")
    begins = found.starts[order]
    ends = np.maximum.accumulate(begins + lengths[order])
    firsts = np.flatnonzero(np.append(True, begins[1:] > ends[:-1])[: len(begins)])
    return begins[firsts], ends[np.append(firsts, len(order))[1:] - 1]


@dataclass(frozen=True, eq=False)
class _RaggedLayout:
    """The rows of a field that differ in length: where its items lie, and room for those."""

    rows: ItemRows
    space: ItemSpace

    def allocate(self, num_rows: int) -> "_RaggedMemory":
        field = self.rows.field
        items = self.space.allocate(field.item_shape, field.dtype)
        sizes = np.zeros((num_rows, field.num_variable), np.int64)
        return _RaggedMemory(self, items, np.zeros(num_rows, np.int64), sizes, GrowingPool())


@dataclass(frozen=True, eq=False)
class _RaggedMemory:
    """Items of a window, and where in them the row at each place of the window begins."""

    layout: _RaggedLayout
    items: Tensor
    starts: Integers
    sizes: Integers
    pool: GrowingPool

    def reads(self, locations: Integers, places: Integers) -> Iterator[Read]:
        """The reads that bring rows to memory. It is noted here where they go."""
        found = self.layout.rows.at(locations)
        runs = self.layout.space.place(found)
        self.starts[places] = runs.of(found.starts)
        self.sizes[places] = found.sizes
        yield from self.layout.space.reads(runs, [self.items])

    def rows(self, places: Integers) -> VariableRows:
        """A copy of the rows at some places: the memory will be read over."""
        sizes = self.sizes[places]
        field = self.layout.rows.field
        rows = VariableRows(field, self.items, self.starts[places], sizes, largest(sizes))
        return rows.copied(self.pool.get)


class StreamMemory:
    """The memory of a window."""

    def __init__(self, layout: "StreamLayout") -> None:
        self._layout = layout
        self._items = [
            layout.space.allocate(field.item_shape, field.dtype) for field in layout.item_fields
        ]
        if layout.windows is None:
            self._rows = Buffers.of(self._items)
        else:
            views = iter(windows_over(steps, layout.windows.line.length) for steps in self._items)
            self._windows = [next(views) if cut else None for cut in layout.windows.is_cut]
        self.ragged = [each.allocate(layout.space.num_items) for each in layout.ragged]
        self._runs = Runs(*np.zeros((3, 1), np.int64))

    def reads(self, windows: ReadWindows, epoch: int, number: int) -> Iterator[Read]:
        """The reads that fill a window, which several threads may do at once.

        A read raises OSError where the disk cannot be read, and StoreError where a file is shorter
        than it was.
        """
        found = self._layout.located(windows, epoch, number)
        self._runs = runs = self._layout.space.place(found)
        yield from self._layout.space.reads(runs, self._items)
        if self.ragged:
            counts = runs.ends - runs.begins
            shifts = np.repeat(runs.begins - (np.cumsum(counts) - counts), counts)
            locations = shifts + np.arange(len(shifts))
            places = runs.of(locations)
            for each in self.ragged:
                yield from each.reads(locations, places)

    def fetch(self, slots: Tensor, out: Buffers) -> list[Leaf]:
        """Copy rows into a batch."""
        places = self._runs.of(slots.numpy())
        if self._layout.windows is not None:
            begins = torch.from_numpy(places)
            return self._layout.windows.copy(self._windows, begins, slots, out)
        copy_rows(self._rows, torch.from_numpy(places), out)
        leaves: list[Leaf] = [*out.tensors]
        for index, each in zip(self._layout.variable, self.ragged, strict=True):
            leaves.insert(index, each.rows(places))
        return leaves


class StreamLayout:
    """How the rows of some shards are read, window by window.

    A row is told by its place in the files, and a window over series by the first of its steps.
    With windows over series, the steps that several of them have in common are read once, and the
    other fields, which have one value for each series, are copied from the file mapping.

    Args:
        fields: The fields that this process needs.
        files: For each of them the file of its items: of rows, of items of rows that differ in
            length, or of steps if it is cut into windows; None where there are none.
        items: For each field whose rows differ in length, by its place, the rows of the store.
        offsets: Where the rows of the split lie in the store.
        held: The shards that are held.
        windows: Which rows are in which window of the epoch.
        series: The windows over series in the file mapping, where fields are cut.

    Raises:
        ValueError: The windows of an epoch and all places cannot be numbered together.
        StoreError: The index of a field is damaged.
    """

    def __init__(
        self,
        fields: Sequence[Field],
        files: Sequence[RowFile | None],
        items: Mapping[int, ItemRows],
        offsets: StoreOffsets,
        *,
        held: Sequence[int],
        windows: ReadWindows,
        series: WindowRows | None = None,
    ) -> None:
        self.windows, self._pool = series, windows.sampler.pool
        self.fields = list(fields)
        #: The places among the fields of those whose rows differ in length, but for series.
        self.variable = sorted(items) if series is None else []
        self._offsets, self._held = offsets, np.array(held, np.int64)
        count = len(held)
        if series is not None:
            line = series.line
            self.num_slots = series.num_places
            _check_numbers(windows, self.num_slots)
            pairs = list(zip(fields, series.is_cut, strict=True))
            #: The fields of the items that all rows have, and one item of each.
            self.item_fields = [replace(f, shape=f.shape[1:]) for f, cut in pairs if cut]
            self.fields = [f.windowed(line.length) if cut else f for f, cut in pairs]
            most = largest_window_steps(held, windows)
            if self._pool.is_striped:
                # In dataset order, series that follow one another are in all shards of the store.
                count = self._pool.num_shards
            chosen = [file for file, cut in zip(files, series.is_cut, strict=True) if cut]
        else:
            self.item_fields = [f for index, f in enumerate(fields) if index not in items]
            most, self.num_slots = len(held) * windows.longest, offsets.num_places
            chosen = [file for index, file in enumerate(files) if index not in items]
            _check_numbers(windows, self.num_slots)
        # Re-striped rows and index views lie apart, and are read with what is between them.
        is_apart = series is None and offsets.starts is None and offsets.in_memory is None
        max_runs = 0 if is_apart else MAX_RUNS * count
        self.space = ItemSpace(fields[0].name, chosen, most, max_runs)
        largest_items = largest_window if windows.has_runs else largest_of_any
        self.ragged = [
            _RaggedLayout(
                items[index],
                ItemSpace(
                    items[index].field.name,
                    [files[index]],
                    largest_items(items[index], offsets, held, windows.longest),
                    max_runs,
                ),
            )
            for index in self.variable
        ]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all fields, on average over the store where rows differ."""
        if self.windows is not None:
            return self.windows.row_bytes
        ragged = [-(-each.rows.items.nbytes // len(each.rows.index)) for each in self.ragged]
        return sum([field.row_bytes for field in self.item_fields] + ragged)

    def locate(self, windows: ReadWindows, epoch: int, positions: range) -> Integers:
        """Where rows are in the files, if these came anew for each window."""
        rows = self._offsets if self.windows is None else self.windows
        found = rows.locate(windows.sampler, epoch, positions)
        for number, here in windows.parts(positions):
            found[here] += number * self.num_slots
        return found

    def allocate(self) -> StreamMemory:
        """Memory for a window, on the CPU, with undefined content."""
        return StreamMemory(self)

    def scratch(self) -> memoryview:
        """Scratch memory for the reads of one thread; see `scratch_memory`."""
        return scratch_memory(max((field.item_bytes for field in self.fields), default=1))

    def located(self, windows: ReadWindows, epoch: int, number: int) -> Located:
        """The items of a window in the files: the first of each run, and their number."""
        if self.windows is not None:
            return located_steps(self.windows, self._held, windows, epoch, number)
        starts, sizes = self._offsets.starts, self._pool.sizes[self._held]
        if starts is not None and windows.has_runs:
            runs = windows.runs(epoch, number)
            begins = np.array([run.start for run in runs])
            ends = np.minimum(np.array([run.stop for run in runs]), sizes[:, None])
            counts = np.maximum(0, ends - begins).ravel()
            firsts = (starts[self._held, None] + begins).ravel()
            return Located(firsts[counts > 0], counts[counts > 0, None])
        rows = distinct(self._offsets.of(*windows.offsets(epoch, number, self._held)))
        return Located(rows, np.ones((len(rows), 1), np.int64))

    def share_used(self, windows: ReadWindows) -> float:
        """Estimate the share of the bytes read that is used, from the first window."""
        found = self.located(windows, 0, 0)
        if self.windows is None:
            # As if rows that differ in length did not.
            return self.space.share_used(found, max(1, self.row_bytes))
        # In dataset order, neighbours belong to all shards in turn.
        line, pool = self.windows.line, self._pool
        part = len(self._held) / pool.num_shards if pool.is_striped else 1.0
        used = min(1.0, part * line.length / line.stride)
        sizes = [field.item_bytes for field in self.item_fields]
        return used * self.space.share_used(found, max(sizes, default=1))


def located_steps(
    series: WindowRows, held: Integers, windows: ReadWindows, epoch: int, number: int
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


def _check_numbers(windows: ReadWindows, num_places: int) -> None:
    if len(windows) * num_places >= 2**63:
        raise ValueError(
            f"shuffle_window={windows.rows}: an epoch would be read in {len(windows)} windows, of"
            f" {num_places - 1} places of the files: choose a larger one"
        )
