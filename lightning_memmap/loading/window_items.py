"""Rows that differ in length in the memory of a window: where their items lie there, and how many
there are at most."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.loading.store_offsets import StoreOffsets
from lightning_memmap.loading.variable_rows import VariableRows, largest
from lightning_memmap.loading.window_reads import (
    Pieces,
    Read,
    block_rows,
    reads_in_place,
    reads_of_pieces,
)
from lightning_memmap.sampling import Integers
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


class _Runs(NamedTuple):
    """Where rows are among the items of a file: in runs, between which other items lie."""

    begins: Integers
    """The first item of each run, int64 of shape (runs,), ascending."""
    ends: Integers
    """One past its last one."""
    of_rows: Integers
    """The run of each row, int64 of shape (B,)."""
    found: Located
    """Where each row is."""

    @classmethod
    def of(cls, found: Located) -> "_Runs":
        lengths = found.sizes.prod(axis=1)
        order = np.argsort(found.starts, kind="stable")
        begins = found.starts[order]
        ends = np.maximum.accumulate(begins + lengths[order])
        firsts = np.flatnonzero(np.append(True, begins[1:] > ends[:-1])[: len(begins)])
        edges = np.append(firsts, len(order))
        of_rows = np.empty_like(order)
        of_rows[order] = np.repeat(np.arange(len(firsts)), np.diff(edges))
        return cls(begins[firsts], ends[edges[1:] - 1], of_rows, found)


class ItemLayout:
    """Where the items of one field lie in the memory of a window.

    Rows that lie one after the other in the file do so in memory. Where these runs are few, direct
    reads write them straight to their places: each begins as far from the beginning of a block in
    memory as it does in the file.

    Args:
        rows: The rows of the store, of whose items none is read here.
        file: The file of the items; None where there are none.
        max_items: Items in a window at most.
        max_runs: How many runs are few.
    """

    def __init__(self, rows: ItemRows, file: RowFile | None, max_items: int, max_runs: int) -> None:
        self.field = rows.field
        self._rows = rows
        self._file = file
        self._max_runs = 0
        self._num_items = max_items
        if file is not None and block_rows(file) * file.row_bytes <= _MAX_FREE_BYTES:
            self._max_runs = max_runs
            free = block_rows(file) * file.row_bytes + 2 * file.block_bytes
            self._num_items += -(-max_runs * free // file.row_bytes)

    @property
    def mean_row_bytes(self) -> int:
        """Bytes of a row of the store, on average and rounded up."""
        return -(-self._rows.items.nbytes // len(self._rows.index))

    def allocate(self, num_slots: int) -> ItemMemory:
        """Memory for a window, on the CPU, with undefined content.

        Args:
            num_slots: Slots for rows.
        """
        field, num_bytes = self.field, self._num_items * self.field.item_bytes
        flat = torch.frombuffer(aligned_memory(max(1, num_bytes)), dtype=torch.uint8)[:num_bytes]
        items = flat.view(field.dtype).view(self._num_items, *field.item_shape)
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
        begins, ends, of_rows, found = _Runs.of(self._rows.at(locations))
        is_in_place = 0 < len(begins) <= self._max_runs
        places = self._aligned(begins, ends) if is_in_place else _packed(begins, ends)
        if len(begins) and int(places[-1] + ends[-1] - begins[-1]) > self._num_items:
            raise ValueError(
                f"residency='stream': a window has {int((ends - begins).sum())} items of field"
                f" {self.field.name!r}, and windows of rows that follow one another have"
                f" {self._num_items} at most: let window_runs of the sampler return such rows"
            )
        memory.starts[slots] = found.starts + (places - begins)[of_rows]
        memory.sizes[slots] = found.sizes
        if self._file is None or not self._num_items:
            return
        target = memory.items.view(-1).view(torch.uint8).view(self._num_items, -1)
        if not is_in_place:
            yield from reads_of_pieces(self._file, begins, ends, places, target)
            return
        for begin, end, place in zip(begins.tolist(), ends.tolist(), places.tolist(), strict=True):
            yield from reads_in_place(self._file, range(begin, end), place, target)

    def pieces(self, locations: Integers) -> Pieces:
        """How rows that lie apart are read.

        Args:
            locations: Where they lie in the index, int64 of shape (B,).
        """
        begins, ends, _, _ = _Runs.of(self._rows.at(locations))
        return Pieces.of(begins, ends, self.field.item_bytes)

    def _aligned(self, begins: Integers, ends: Integers) -> Integers:
        """Places of runs that are as far from the beginning of a block as in the file."""
        assert self._file is not None
        size, block, multiple = self._file.row_bytes, self._file.block_bytes, block_rows(self._file)
        places, free = [], 0
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            # What comes before the run in its first block goes there too.
            least = -(-(free + begin * size % block) // size)
            places.append(least + (begin - least) % multiple)
            free = self._file.whole_blocks((places[-1] + end - begin) * size)
        return np.array(places, np.int64)


def _packed(begins: Integers, ends: Integers) -> Integers:
    lengths = ends - begins
    places: Integers = np.cumsum(lengths) - lengths
    return places


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
    sizes = offsets.shards.sizes
    # The circle has the rows that all shards have. Some have one more.
    circle = int(sizes.min())
    step = max(1, window // _STEPS) if offsets.starts is not None else 1
    places = np.append(np.arange(0, circle, step), circle)
    totals = np.zeros(len(places), np.int64)
    extra = 0
    for shard in shards:
        if step > 1:
            found = rows.at(offsets.of(np.full(len(places) - 1, shard), places[:-1]))
            last = rows.at(offsets.of(np.array([shard]), np.array([circle - 1])))
            ends = np.append(found.starts, last.starts + last.sizes.prod(axis=1))
            totals += ends - ends[0]
        else:
            lengths = _lengths(rows, offsets, shard, range(circle))
            totals[1:] += np.cumsum(lengths)
        extra += int(_lengths(rows, offsets, shard, range(circle, int(sizes[shard]))).sum())
    if not circle:
        return extra
    # Two rounds of the circle.
    places = np.append(places, places[1:] + circle)
    totals = np.append(totals, totals[1:] + totals[-1])
    num_begins = len(places) // 2
    # A window that begins before the next place ends before this one.
    ends = np.searchsorted(places, places[1 : num_begins + 1] - 1 + min(window, circle))
    return int((totals[ends] - totals[:num_begins]).max()) + extra


def _lengths(rows: ItemRows, offsets: StoreOffsets, shard: int, wanted: range) -> Integers:
    """The items of some rows of a shard, int64 of shape (len(wanted),)."""
    found = [
        rows.at(offsets.of(np.full(len(some), shard), some)).sizes.prod(axis=1)
        for first in range(wanted.start, wanted.stop, _LOOKUP_ROWS)
        for some in [np.arange(first, min(first + _LOOKUP_ROWS, wanted.stop))]
    ]
    return np.concatenate([np.zeros(0, np.int64), *found])
