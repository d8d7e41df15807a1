"""Rows that differ in length in the memory of a window: where their items lie there, and how many
there are at most."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.loading.buffers import Buffers, GrowingPool, copy_rows
from lightning_memmap.loading.row_source import Leaf
from lightning_memmap.loading.store_offsets import StoreOffsets
from lightning_memmap.loading.variable_rows import VariableRows, largest
from lightning_memmap.loading.window_reads import (
    Pieces,
    Read,
    block_rows,
    reads_in_place,
    reads_of_pieces,
)
from lightning_memmap.sampling import Integers, ReadWindows
from lightning_memmap.schema import Field
from lightning_memmap.store.columns import ItemRows
from lightning_memmap.store.columns.variable import Located
from lightning_memmap.store.row_file import RowFile, aligned_memory

#: The largest part of a window is found among those that begin at so many places in its length.
_STEPS = 64
#: Rows whose lengths are looked up at once.
_LOOKUP_ROWS = 2**18
#: The most bytes that stay free before a run so that a disk can write its items directly.
_MAX_FREE_BYTES = 64 * 2**10


@dataclass(frozen=True, eq=False)
class ItemMemory:
    """The memory of one field in a window.

    Args:
        field: The field.
        items: Of shape (items, *item shape).
        starts: The first item of the row in each slot, int64 of shape (slots,).
        sizes: Its sizes in the dimensions that differ, int64 of shape (slots, k).
    """

    field: Field
    items: Tensor
    starts: Integers
    sizes: Integers

    def located(self, slots: Integers) -> VariableRows:
        """The rows in some slots. The memory is used again for another window.

        Args:
            slots: Which, int64 of shape (B,).
        """
        sizes = self.sizes[slots]
        return VariableRows(self.field, self.items, self.starts[slots], sizes, largest(sizes))


class RowMemory:
    """The memory of a window of rows.

    Args:
        rows: One tensor of shape (slots, *field shape) for each field whose rows have one shape.
        items: The memory of each other field.
        variable: The places of these others among the fields, ascending.
    """

    def __init__(self, rows: Buffers, items: Sequence[ItemMemory], variable: Sequence[int]) -> None:
        self.rows = rows
        self.items = items
        self._variable = variable
        self._pools = [GrowingPool() for _ in items]

    def fetch(self, slots: Tensor, out: Buffers) -> list[Leaf]:
        """Copy rows into a batch; see `WindowMemory.fetch`."""
        copy_rows(self.rows, slots, out)
        leaves: list[Leaf] = [*out.tensors]
        for index, items, pool in zip(self._variable, self.items, self._pools, strict=True):
            # Their memory will be read over.
            leaves.insert(index, items.located(slots.numpy()).copied(pool.get))
        return leaves


class PlacedRuns(NamedTuple):
    """Rows of a file in runs, between which other items lie, and where they are in memory."""

    begins: Integers
    """The first item of each run, int64 of shape (runs,), ascending."""
    ends: Integers
    """One past its last one."""
    places: Integers
    """Where it begins in memory."""
    starts: Integers
    """Where each row begins in memory, int64 of shape (B,)."""


class RunPlaces:
    """Where runs of items lie in the memory of a window: at the same places in each of some files.

    Items that lie one after the other in a file do so in memory, and those that several rows have
    are there once. Where runs are few, direct reads write them straight to their places: each
    begins as far from the beginning of a block in memory as it does in the file.

    Args:
        name: The field, for messages.
        files: The files of the items.
        max_items: Items in a window at most.
        max_runs: How many runs are few.
    """

    def __init__(self, name: str, files: Sequence[RowFile], max_items: int, max_runs: int) -> None:
        self._name = name
        # A whole number of blocks of each file.
        self._unit = max(map(block_rows, files), default=1)
        free_bytes = max((self._unit * file.row_bytes for file in files), default=0)
        self._max_runs = max_runs if free_bytes <= _MAX_FREE_BYTES else 0
        #: Items that there is room for.
        self.num_items = max_items + 2 * self._unit * self._max_runs

    def place(self, found: Located) -> PlacedRuns:
        """Find places for rows.

        Args:
            found: Where they are in the files.

        Raises:
            ValueError: They have more items than as many rows that follow one another.
        """
        begins, ends, of_rows = _runs_of(found)
        unit = self._unit if len(begins) <= self._max_runs else 1
        free = begins % unit
        taken = -(-(free + ends - begins) // unit) * unit
        if int(taken.sum()) > self.num_items:
            raise ValueError(
                f"residency='stream': a window has {int((ends - begins).sum())} items of field"
                f" {self._name!r}, and windows of rows that follow one another have"
                f" {self.num_items} at most: let window_runs of the sampler return such rows"
            )
        places = np.cumsum(taken) - taken + free
        return PlacedRuns(begins, ends, places, found.starts + (places - begins)[of_rows])

    def reads(self, file: RowFile, placed: PlacedRuns, items: Tensor) -> Iterator[Read]:
        """The reads that bring the items of a file to their places.

        Args:
            file: The file.
            placed: Of `place`.
            items: The memory, of shape (num_items, *item shape).

        Yields:
            The reads.
        """
        target = items.view(-1).view(torch.uint8).view(-1, file.row_bytes)
        begins, ends, places, _ = placed
        if len(begins) > self._max_runs:
            yield from reads_of_pieces(file, begins, ends, places, target)
            return
        for begin, end, place in zip(begins.tolist(), ends.tolist(), places.tolist(), strict=True):
            yield from reads_in_place(file, range(begin, end), place, target)

    def share_used(self, found: Located, item_bytes: int) -> float:
        """The share of the items read that are wanted, where gaps between runs are read too.

        Args:
            found: Where rows are in the files.
            item_bytes: Bytes of an item.
        """
        begins, ends, _ = _runs_of(found)
        pieces = Pieces.of(begins, ends, item_bytes)
        if len(begins) <= self._max_runs or not pieces.num_read:
            return 1.0
        return pieces.num_used / pieces.num_read

    def allocate(self, item_shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for the items of a window, on the CPU, with undefined content.

        Args:
            item_shape: The shape of an item.
            dtype: Its dtype.

        Returns:
            Of shape (num_items, *item_shape).
        """
        return item_memory(self.num_items, item_shape, dtype)


def item_memory(num_items: int, item_shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory that a disk can write items to, on the CPU, with undefined content.

    Args:
        num_items: How many.
        item_shape: The shape of an item.
        dtype: Its dtype.

    Returns:
        Of shape (num_items, *item_shape).
    """
    num_bytes = num_items * math.prod(item_shape) * dtype.itemsize
    flat = torch.frombuffer(aligned_memory(max(1, num_bytes)), dtype=torch.uint8)[:num_bytes]
    return flat.view(dtype).view(num_items, *item_shape)


def _runs_of(found: Located) -> tuple[Integers, Integers, Integers]:
    """The first item of each run of rows, one past its last one, and the run of each row."""
    lengths = found.sizes.prod(axis=1)
    order = np.argsort(found.starts, kind="stable")
    begins = found.starts[order]
    ends = np.maximum.accumulate(begins + lengths[order])
    firsts = np.flatnonzero(np.append(True, begins[1:] > ends[:-1])[: len(begins)])
    edges = np.append(firsts, len(order))
    of_rows = np.empty_like(order)
    of_rows[order] = np.repeat(np.arange(len(firsts)), np.diff(edges))
    return begins[firsts], ends[edges[1:] - 1], of_rows


class ItemLayout:
    """Where the items of one field lie in the memory of a window.

    Args:
        rows: The rows of the store, of whose items none is read here.
        file: The file of the items; None where there are none.
        max_items: Items in a window at most.
        max_runs: How many runs of them are few; see `RunPlaces`.
    """

    def __init__(self, rows: ItemRows, file: RowFile | None, max_items: int, max_runs: int) -> None:
        self.field = rows.field
        self._rows = rows
        self._file = file
        files = [] if file is None else [file]
        self._places = RunPlaces(self.field.name, files, max_items, max_runs)

    @property
    def mean_row_bytes(self) -> int:
        """Bytes of a row of the store, on average and rounded up."""
        return -(-self._rows.items.nbytes // len(self._rows.index))

    def allocate(self, num_slots: int) -> ItemMemory:
        """Memory for a window, on the CPU, with undefined content.

        Args:
            num_slots: Slots for rows.
        """
        field = self.field
        items = self._places.allocate(field.item_shape, field.dtype)
        starts = np.zeros(num_slots, np.int64)
        return ItemMemory(field, items, starts, np.zeros((num_slots, field.num_variable), np.int64))

    def reads(self, locations: Integers, slots: Integers, memory: ItemMemory) -> Iterator[Read]:
        """The reads that bring the rows of a window to its memory.

        Args:
            locations: Where the rows lie in the index, int64 of shape (B,).
            slots: The slot of each.
            memory: Of `allocate`. It is noted there where the rows go.

        Yields:
            The reads.

        Raises:
            StoreError: The index is damaged.
            ValueError: The rows have more items than as many rows that follow one another.
        """
        found = self._rows.at(locations)
        placed = self._places.place(found)
        memory.starts[slots] = placed.starts
        memory.sizes[slots] = found.sizes
        if self._file is not None and len(memory.items):
            yield from self._places.reads(self._file, placed, memory.items)

    def pieces(self, locations: Integers) -> Pieces:
        """How rows that lie apart are read.

        Args:
            locations: Where they lie in the index, int64 of shape (B,).
        """
        begins, ends, _ = _runs_of(self._rows.at(locations))
        return Pieces.of(begins, ends, self.field.item_bytes)


def check_numbers(windows: ReadWindows, num_places: int) -> None:
    """Check that all windows of an epoch can be numbered together with all places of the files.

    Args:
        windows: Which rows are in which window.
        num_places: Places of the files.

    Raises:
        ValueError: They cannot.
    """
    if len(windows) * num_places >= 2**63:
        raise ValueError(
            f"shuffle_window={windows.rows}: an epoch would be read in {len(windows)} windows, of"
            f" {num_places - 1} places of the files: choose a larger one"
        )


def largest_window(
    rows: ItemRows, offsets: StoreOffsets, shards: Sequence[int], window: int
) -> int:
    """How many items the rows of a window have at most, wherever it begins.

    It is exact where the rows of a shard lie apart in the file, and else up to a 64th too large.

    Args:
        rows: The rows of the store, whose index alone is read.
        offsets: Where the rows of the split lie in the store.
        shards: The shards of the split that are held.
        window: Rows of a shard in a window, at most those of the longest shard.

    Returns:
        The number of items, for windows of consecutive rows of each shard, closed to a circle.

    Raises:
        StoreError: The index is damaged.
    """

    def in_one_run(shard: int, places: Integers) -> Integers:
        size = int(places[-1])
        if not size:
            return np.zeros_like(places)
        found = rows.at(offsets.of(np.full(len(places), shard), np.minimum(places, size - 1)))
        return np.where(places < size, found.starts, found.starts + found.sizes.prod(axis=1))

    def apart(shard: int, places: Integers) -> Integers:
        size, ends = int(places[-1]), [np.zeros(1, np.int64)]
        for first in range(0, size, _LOOKUP_ROWS):
            some = np.arange(first, min(first + _LOOKUP_ROWS, size))
            found = rows.at(offsets.of(np.full(len(some), shard), some))
            ends.append(ends[-1][-1] + np.cumsum(found.sizes.prod(axis=1)))
        return np.concatenate(ends)[places]

    sizes, is_one_run = offsets.pool.sizes, offsets.starts is not None
    return most_items(sizes, shards, window, in_one_run if is_one_run else apart, not is_one_run)


def largest_of_any(
    rows: ItemRows, offsets: StoreOffsets, shards: Sequence[int], window: int
) -> int:
    """How many items as many rows of each shard have at most, whichever they are.

    Args:
        rows: As for `largest_window`.
        offsets: As there.
        shards: As there.
        window: Rows of a shard in a window.

    Returns:
        The number of items of the longest rows of each shard.

    Raises:
        StoreError: The index is damaged.
    """
    total = 0
    for shard in shards:
        longest = np.zeros(0, np.int64)
        size = int(offsets.pool.sizes[shard])
        for first in range(0, size, _LOOKUP_ROWS):
            some = np.arange(first, min(first + _LOOKUP_ROWS, size))
            found = rows.at(offsets.of(np.full(len(some), shard), some))
            longest = np.append(longest, found.sizes.prod(axis=1))
            if len(longest) > window:
                longest = np.partition(longest, -window)[-window:]
        total += int(longest.sum())
    return total


def most_items(
    sizes: Integers,
    shards: Sequence[int],
    window: int,
    items_before: Callable[[int, Integers], Integers],
    is_exact: bool = False,
) -> int:
    """How many items windows have at most, by the items before some places in a shard.

    Args:
        sizes: Rows of each shard of the split, int64 of shape (C,).
        shards: The shards that are held.
        window: Rows of a shard in a window, at most those of the longest shard.
        items_before: For a shard and offsets in it, the items of the rows before each of them. The
            last one is behind its last row.
        is_exact: Whether all windows are looked at. Otherwise the number is up to a 64th too large.

    Returns:
        The number of items, for windows of consecutive rows of each shard, closed to a circle.
    """
    # The circle has the rows that all shards have. Some have one more.
    circle = int(sizes.min())
    step = 1 if is_exact else max(1, window // _STEPS)
    places = np.append(np.arange(0, circle, step), circle)
    totals, extra = np.zeros(len(places), np.int64), 0
    for shard in shards:
        before = items_before(shard, np.append(places, sizes[shard]))
        totals += before[:-1] - before[0]
        extra += int(before[-1] - before[-2])
    if not circle:
        return extra
    # Two rounds of the circle.
    places = np.append(places, places[1:] + circle)
    totals = np.append(totals, totals[1:] + totals[-1])
    num_begins = len(places) // 2
    # A window that begins before the next place ends before this one.
    ends = np.searchsorted(places, places[1 : num_begins + 1] - 1 + min(window, circle))
    return int((totals[ends] - totals[:num_begins]).max()) + extra
