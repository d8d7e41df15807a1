"""The layout in memory of a window that has the same rows of each shard, and its reads."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.loading.buffers import Buffers
from lightning_memmap.loading.store_offsets import StoreOffsets
from lightning_memmap.loading.window_items import (
    ItemLayout,
    ItemMemory,
    RowMemory,
    item_memory,
    largest_window,
)
from lightning_memmap.loading.window_reads import (
    Pieces,
    Read,
    block_rows,
    reads_in_place,
    reads_of_pieces,
    reads_to_copy,
    scratch_memory,
)
from lightning_memmap.sampling import Integers, ReadWindows
from lightning_memmap.schema import Field
from lightning_memmap.store.columns import ItemRows
from lightning_memmap.store.row_file import RowFile

#: Re-striped rows are looked up together, some of each shard at a time.
_LOOKUP_BYTES = 16 * 2**20
#: Rows of each shard that are looked at to estimate how many of the bytes read are not used.
_SAMPLE_ROWS = 4096
#: Runs of a shard in a window at most: a window may wrap around, and some shards have a row more.
_MAX_RUNS = 3
#: The largest share of a shard's slots that may stay free so that a disk can write rows directly.
_MAX_FREE = 1 / 64


class RunMemory(RowMemory):
    """The memory of a window of runs.

    Args:
        layout: Where rows lie in it.
        rows: As for `RowMemory`.
        items: As there.
    """

    def __init__(self, layout: "WindowLayout", rows: Buffers, items: Sequence[ItemMemory]) -> None:
        super().__init__(rows, items, layout.variable)
        self._layout = layout

    def reads(self, windows: ReadWindows, epoch: int, number: int) -> Iterator[Read]:
        """The reads that fill a window; see `WindowMemory.reads`.

        The rows of each run go to consecutive slots, from that of `WindowLayout.run_starts` on.
        Other slots are undefined.
        """
        return self._layout.reads(windows.runs(epoch, number), self)


class WindowLayout:
    """Where the rows of some shards lie in the memory of a window, and how they are read.

    A window has the same offsets of each shard, in runs of consecutive ones. The memory has slots
    for rows, an equal number for each shard.

    Direct reads begin at a block, in the file and in memory. Where few free slots suffice for it,
    rows begin as far from the beginning of a block in memory as they do in the file, and a disk
    writes them straight to their slots. Other rows are read to scratch memory and copied.

    Args:
        fields: The fields that this process needs.
        files: The file of each field, where rows differ in length that of their items; None for a
            field without a byte.
        items: The rows of the fields whose rows differ in length, by their place among the fields.
        offsets: Where the rows of the split lie in the files.
        shards: The shards of the split that this process holds.
        window: Rows of a shard in a window.
    """

    def __init__(
        self,
        fields: Sequence[Field],
        files: Sequence[RowFile | None],
        items: Mapping[int, ItemRows],
        offsets: StoreOffsets,
        *,
        shards: Sequence[int],
        window: int,
    ) -> None:
        self.fields = fields
        #: The places among the fields of those whose rows differ in length.
        self.variable = sorted(items)
        self._fixed = [field for index, field in enumerate(fields) if index not in items]
        self._files = [file for index, file in enumerate(files) if index not in items]
        self._offsets = offsets
        self._shards = np.array(shards, np.int64)
        self._sizes = offsets.pool.sizes
        num_shards = offsets.pool.num_shards
        #: A run's first slot is, modulo this, its first row's number in the file.
        self._multiple = 1
        if offsets.starts is not None:
            multiples = [block_rows(file) for file in self._files if file is not None]
            limit = max(1, window * _MAX_FREE / (2 * _MAX_RUNS))
            self._multiple = max((each for each in multiples if each <= limit), default=1)
        free = 2 * _MAX_RUNS * (self._multiple - 1)
        self._slots_per_shard = _round_up(window + free, self._multiple)
        self._starts = offsets.pool.starts if offsets.starts is None else offsets.starts
        #: By shard of the split, the first of its slots; -1 for shards of other processes.
        self._first_slots = np.full(num_shards, -1, np.int64)
        self._first_slots[self._shards] = np.arange(len(shards)) * self._slots_per_shard
        most = {i: largest_window(items[i], offsets, shards, window) for i in self.variable}
        max_runs = 0 if offsets.starts is None else _MAX_RUNS * len(shards)
        self._items = [ItemLayout(items[i], files[i], most[i], max_runs) for i in self.variable]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all fields, on average over the store where rows differ."""
        sizes = [field.row_bytes for field in self._fixed]
        return sum(sizes + [layout.mean_row_bytes for layout in self._items])

    @property
    def num_slots(self) -> int:
        """Slots for rows in a window's memory: one for each row, and some that stay free."""
        return len(self._shards) * self._slots_per_shard

    def run_starts(self, runs: Sequence[range]) -> list[Integers]:
        """The slots at which runs start in a window.

        Args:
            runs: The offsets of each shard's rows in the window, in runs of consecutive ones.

        Returns:
            For each run, by shard of the split, the slot of its first row: int64 of shape (C,),
            undefined for shards of other processes.
        """
        starts, slot = [], self._first_slots
        for run in runs:
            starts.append(slot + (self._starts + run.start) % self._multiple)
            slot = slot + _round_up(len(run) + self._multiple - 1, self._multiple)
        return starts

    def locate(self, windows: ReadWindows, epoch: int, positions: range) -> Integers:
        """Where rows lie, if all windows lay one after the other; see `Layout.locate`."""
        return windows.row_offsets(epoch, positions, self.num_slots, self.run_starts)

    def allocate(self) -> RunMemory:
        """Memory for a window, on the CPU, with undefined content."""
        buffers = [
            item_memory(self.num_slots, field.item_shape, field.dtype) for field in self._fixed
        ]
        items = [layout.allocate(self.num_slots) for layout in self._items]
        return RunMemory(self, Buffers.of(buffers), items)

    def scratch(self) -> memoryview:
        """Scratch memory for the reads of one thread; see `scratch_memory`."""
        return scratch_memory(max(field.item_bytes for field in self.fields))

    def reads(self, runs: Sequence[range], memory: RunMemory) -> Iterator[Read]:
        """The reads that fill a window; see `RunMemory.reads`.

        Args:
            runs: The offsets of each shard's rows in the window, in runs of consecutive ones.
            memory: Memory of `allocate`.

        Yields:
            The reads.

        Raises:
            StoreError: The index of a field is damaged.
        """
        for file, buffer in zip(self._files, memory.rows.tensors, strict=True):
            if file is None:
                continue
            target = buffer.view(-1).view(torch.uint8).view(self.num_slots, file.row_bytes)
            if self._offsets.starts is None:
                yield from self._scattered_reads(file, runs, target)
                continue
            in_place = self._multiple % block_rows(file) == 0
            for rows in self._long_runs(runs):
                cut = reads_in_place if in_place else reads_to_copy
                yield from cut(file, *rows, target)
        if self._items:
            slots, locations = self._located(runs)
            for layout, items in zip(self._items, memory.items, strict=True):
                yield from layout.reads(locations, slots, items)

    def share_used(self, runs: Sequence[range]) -> float:
        """Estimate the share of the bytes read that is used, from the first rows of the shards.

        Args:
            runs: The offsets of each shard's rows in a window, in runs of consecutive ones.

        Returns:
            Between 0 and 1; always 1 where the shards are those of the store.
        """
        if self._offsets.starts is not None:
            return 1.0
        offsets = np.concatenate([np.arange(run.start, run.stop) for run in runs])
        _, rows = self._rows(offsets[:_SAMPLE_ROWS], 0)
        found = [
            (file.row_bytes, Pieces.of(rows, rows + 1, file.row_bytes))
            for file in filter(None, self._files)
        ]
        found += [(layout.field.item_bytes, layout.pieces(rows)) for layout in self._items]
        read = sum(size * pieces.num_read for size, pieces in found)
        return sum(size * pieces.num_used for size, pieces in found) / read if read else 1.0

    def _located(self, runs: Sequence[range]) -> tuple[Integers, Integers]:
        """The slots of all rows of a window, and where these lie in the files."""
        slots, locations = [], []
        for run, starts in zip(runs, self.run_starts(runs), strict=True):
            offsets = np.arange(run.start, run.stop)
            wanted = offsets < self._sizes[self._shards, None]
            shards = np.broadcast_to(self._shards[:, None], wanted.shape)[wanted]
            offsets = np.broadcast_to(offsets, wanted.shape)[wanted]
            slots.append(starts[shards] + offsets - run.start)
            locations.append(self._offsets.of(shards, offsets))
        return np.concatenate(slots), np.concatenate(locations)

    def _long_runs(self, runs: Sequence[range]) -> Iterator[tuple[range, int]]:
        """Where the shards are those of the store, a run of a shard is one of the file.

        Returns:
            Rows of the file, and the slot of the first one.
        """
        starts = self.run_starts(runs)
        for shard in self._shards.tolist():
            start, size = int(self._starts[shard]), int(self._sizes[shard])
            for run, slots in zip(runs, starts, strict=True):
                if rows := range(start + run.start, start + min(run.stop, size)):
                    yield rows, int(slots[shard])

    def _scattered_reads(
        self, file: RowFile, runs: Sequence[range], target: Tensor
    ) -> Iterator[Read]:
        """The reads of re-striped rows.

        The rows of all shards together are looked up in the file, some of each shard at a time.
        """
        offsets = np.concatenate([np.arange(run.start, run.stop) for run in runs])
        step = max(1, _LOOKUP_BYTES // (file.row_bytes * len(self._shards)))
        for begin in range(0, len(offsets), step):
            slots, rows = self._rows(offsets[begin : begin + step], begin)
            yield from reads_of_pieces(file, rows, rows + 1, slots, target)

    def _rows(self, offsets: Integers, begin: int) -> tuple[Integers, Integers]:
        """The slots of the rows at offsets of all shards, and their rows of the file, ascending."""
        wanted = offsets < self._sizes[self._shards, None]
        first_slots = self._first_slots[self._shards, None]
        slots = (first_slots + np.arange(begin, begin + len(offsets)))[wanted]
        shards = np.broadcast_to(self._shards[:, None], wanted.shape)[wanted]
        rows = self._offsets.of(shards, np.broadcast_to(offsets, wanted.shape)[wanted])
        order = np.argsort(rows)
        return slots[order], rows[order]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
