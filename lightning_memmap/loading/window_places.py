"""The layout of a window in memory whose rows lie anywhere in the files, near each other or not."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_memmap.loading.buffers import Buffers
from lightning_memmap.loading.row_source import Leaf
from lightning_memmap.loading.store_offsets import StoreOffsets
from lightning_memmap.loading.window_items import (
    ItemLayout,
    ItemMemory,
    RowMemory,
    RunPlaces,
    check_numbers,
    largest_of_any,
)
from lightning_memmap.loading.window_reads import Read, scratch_memory
from lightning_memmap.sampling import Integers, ReadWindows
from lightning_memmap.schema import Field
from lightning_memmap.store.columns import ItemRows
from lightning_memmap.store.columns.variable import Located
from lightning_memmap.store.row_file import RowFile

#: Runs of a shard in a window that are few: it may wrap around, and reach into another store.
MAX_PLACED_RUNS = 6
#: What is kept for each row of a window beside the row, and taken while it is looked up, in bytes.
LOOKUP_BYTES = 56


class PlacedMemory(RowMemory):
    """The memory of a window of rows that lie anywhere.

    Args:
        layout: Where rows lie in it.
        rows: As for `RowMemory`.
        items: As there.
    """

    def __init__(self, layout: "PlacedLayout", rows: Buffers, items: Sequence[ItemMemory]) -> None:
        super().__init__(rows, items, layout.variable)
        self._layout = layout
        #: The first row of each run in the files, and what is added to find it in memory.
        self._begins = self._shifts = np.zeros(0, np.int64)

    def reads(self, windows: ReadWindows, epoch: int, number: int) -> Iterator[Read]:
        """The reads that fill the window; see `WindowMemory.reads`."""
        layout = self._layout
        found = layout.located(windows, epoch, number)
        placed = layout.places.place(found)
        self._begins, self._shifts = placed.begins, placed.places - placed.begins
        for file, buffer in zip(layout.files, self.rows.tensors, strict=True):
            if file is not None:
                yield from layout.places.reads(file, placed, buffer)
        for each, items in zip(layout.items, self.items, strict=True):
            yield from each.reads(found.starts, placed.starts, items)

    @override
    def fetch(self, slots: Tensor, out: Buffers) -> list[Leaf]:
        rows = slots.numpy()
        runs = np.searchsorted(self._begins, rows, side="right") - 1
        return super().fetch(torch.from_numpy(rows + self._shifts[runs]), out)


class PlacedLayout:
    """Where rows that lie anywhere are in the memory of a window, and how they are read.

    Each row is read once, however often it comes in the window. Those that follow one another in a
    file do so in memory.

    Args:
        fields: The fields that this process needs.
        files: The file of each field, where rows differ in length that of their items; None for a
            field without a byte.
        items: The rows of the fields whose rows differ in length, by their place among the fields.
        offsets: Where the rows of the split lie in the files.
        held: The shards of the split that this process holds.
        windows: Which rows are in which window.

    Raises:
        ValueError: There are too many windows to be numbered together with all rows.
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
    ) -> None:
        self.fields = fields
        #: The places among the fields of those whose rows differ in length.
        self.variable = sorted(items)
        self._fixed = [field for index, field in enumerate(fields) if index not in items]
        #: The files of the others.
        self.files = [file for index, file in enumerate(files) if index not in items]
        self._offsets, self._held = offsets, np.array(held, np.int64)
        window, max_runs = windows.longest, MAX_PLACED_RUNS * len(held)
        opened = [file for file in self.files if file is not None]
        self.places = RunPlaces(fields[0].name, opened, len(held) * window, max_runs)
        most = {i: largest_of_any(items[i], offsets, held, window) for i in self.variable}
        #: Of each field whose rows differ in length.
        self.items = [ItemLayout(items[i], files[i], most[i], max_runs) for i in self.variable]
        #: A row is told by its place in the files.
        self.num_slots = offsets.num_places
        check_numbers(windows, self.num_slots)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all fields, on average over the store where rows differ."""
        sizes = [field.row_bytes for field in self._fixed]
        return sum(sizes + [layout.mean_row_bytes for layout in self.items])

    def locate(self, windows: ReadWindows, epoch: int, positions: range) -> Integers:
        """Where rows are in the files, if these came anew for each window; see `Layout.locate`."""
        found = self._offsets.locate(windows.sampler, epoch, positions)
        for number, here in windows.parts(positions):
            found[here] += number * self.num_slots
        return found

    def allocate(self) -> PlacedMemory:
        """Memory for a window, on the CPU, with undefined content."""
        rows = [self.places.allocate(field.item_shape, field.dtype) for field in self._fixed]
        items = [layout.allocate(self.places.num_items) for layout in self.items]
        return PlacedMemory(self, Buffers.of(rows), items)

    def scratch(self) -> memoryview:
        """Scratch memory for the reads of one thread; see `scratch_memory`."""
        return scratch_memory(max(field.item_bytes for field in self.fields))

    def located(self, windows: ReadWindows, epoch: int, number: int) -> Located:
        """Where the rows of a window are in the files.

        Args:
            windows: Which rows are in which window.
            epoch: Epoch, counted from 0.
            number: Window of the epoch, counted from 0.

        Returns:
            Each row once, in ascending order.
        """
        # Sorting takes a quarter of the time of `np.unique`.
        rows = np.sort(self._offsets.of(*windows.offsets(epoch, number, self._held)))
        rows = rows[np.diff(rows, prepend=-1) > 0]
        return Located(rows, np.ones((len(rows), 1), np.int64))

    def share_used(self, windows: ReadWindows) -> float:
        """Estimate the share of the bytes read that is used, from the first window.

        Args:
            windows: Which rows are in which window.

        Returns:
            Between 0 and 1.
        """
        # As if rows that differ in length did not.
        return self.places.share_used(self.located(windows, 0, 0), max(1, self.row_bytes))
