"""The layout of a window in memory, and the reads that fill it from the files of a store."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.loading.buffers import Buffers
from lightning_memmap.loading.store_offsets import StoreOffsets
from lightning_memmap.sampling import Integers
from lightning_memmap.schema import Field
from lightning_memmap.store.row_file import MAX_BLOCK_BYTES, RowFile, aligned_memory

#: Bytes of one read: enough for the full rate of a disk, and few compared with any window.
_READ_BYTES = 4 * 2**20
#: Re-striped rows are looked up together, some of each shard at a time.
_LOOKUP_BYTES = 16 * 2**20
#: Gaps of this size between wanted rows are read too: skipping them takes a disk as long.
_GAP_BYTES = 128 * 2**10
#: Rows of each shard that are looked at to estimate how many of the bytes read are not used.
_SAMPLE_ROWS = 4096
#: Runs of a shard in a window at most: a window may wrap around, and some shards have a row more.
_MAX_RUNS = 3
#: The largest share of a shard's slots that may stay free so that a disk can write rows directly.
_MAX_FREE = 1 / 64

#: Reads rows to their slots; the argument is scratch memory.
Read: TypeAlias = Callable[[memoryview], None]


class WindowLayout:
    """Where the rows of some shards lie in the memory of a window, and how they are read.

    The memory has slots for rows, an equal number for each shard.

    Direct reads begin at a block, in the file and in memory. Where few free slots suffice for it,
    rows begin as far from the beginning of a block in memory as they do in the file, and a disk
    writes them straight to their slots. Other rows are read to scratch memory and copied.

    Args:
        fields: The fields that this process needs.
        files: The file of each field; None for a field without a byte.
        offsets: Where the rows of the split lie in the files.
        shards: The shards of the split that this process holds.
        window: Rows of a shard in a window.
    """

    def __init__(
        self,
        fields: Sequence[Field],
        files: Sequence[RowFile | None],
        offsets: StoreOffsets,
        *,
        shards: Sequence[int],
        window: int,
    ) -> None:
        self.fields = fields
        self._files = files
        self._offsets = offsets
        self._shards = np.array(shards, np.int64)
        self._sizes = offsets.shards.sizes
        num_shards = offsets.shards.num_shards
        #: A run's first slot is, modulo this, its first row's number in the file.
        self._multiple = 1
        if offsets.starts is not None:
            multiples = [_multiple(file) for file in files if file is not None]
            limit = max(1, window * _MAX_FREE / (2 * _MAX_RUNS))
            self._multiple = max((each for each in multiples if each <= limit), default=1)
        free = 2 * _MAX_RUNS * (self._multiple - 1)
        self._slots_per_shard = _round_up(window + free, self._multiple)
        self._starts = offsets.shards.starts if offsets.starts is None else offsets.starts
        #: By shard of the split, the first of its slots; -1 for shards of other processes.
        self._first_slots = np.full(num_shards, -1, np.int64)
        self._first_slots[self._shards] = np.arange(len(shards)) * self._slots_per_shard

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

    def allocate(self) -> Buffers:
        """Memory for a window, on the CPU.

        Returns:
            One tensor of shape (num_slots, *field shape) per field, with undefined content.
        """
        buffers = []
        for field in self.fields:
            shape = (self.num_slots, *field.item_shape)
            if not field.row_bytes:
                buffers.append(torch.empty(shape, dtype=field.dtype))
                continue
            memory = aligned_memory(self.num_slots * field.row_bytes)
            flat = torch.frombuffer(memory, dtype=torch.uint8)
            buffers.append(flat.view(field.dtype).view(shape))
        return Buffers.of(buffers)

    def scratch(self) -> memoryview:
        """Scratch memory for the reads of one thread, aligned for direct reads.

        Returns:
            The memory, larger than the longest row and than the longest read.
        """
        largest = max(_READ_BYTES, *(field.row_bytes for field in self.fields))
        return aligned_memory(largest + 2 * MAX_BLOCK_BYTES)

    def reads(self, runs: Sequence[range], buffers: Buffers) -> Iterator[Read]:
        """The reads that fill a window, which several threads may do at once.

        A read raises OSError where the disk cannot be read, and StoreError where a file is shorter
        than it was.

        Args:
            runs: The offsets of each shard's rows in the window, in runs of consecutive ones.
            buffers: Memory of `allocate`. The rows of each run go to consecutive slots, from that
                of `run_starts` on. Other slots are undefined.

        Returns:
            An iterator over functions, each of which does one read when it is called with memory of
            `scratch`.
        """
        for file, buffer in zip(self._files, buffers.tensors, strict=True):
            if file is None:
                continue
            target = buffer.view(-1).view(torch.uint8).view(self.num_slots, file.row_bytes)
            if self._offsets.starts is None:
                yield from self._scattered_reads(file, runs, target)
                continue
            in_place = self._multiple % _multiple(file) == 0
            for rows in self._long_runs(runs):
                cut = _reads_in_place if in_place else _reads_to_copy
                yield from cut(file, *rows, target)

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
        read = used = 0
        for file in filter(None, self._files):
            _, rows = self._rows(offsets[:_SAMPLE_ROWS], 0)
            for first, last in _spans(rows, file.row_bytes):
                read += (int(rows[last - 1] - rows[first]) + 1) * file.row_bytes
                used += (last - first) * file.row_bytes
        return used / read if read else 1.0

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
            for first, last in _spans(rows, file.row_bytes):
                chosen = torch.from_numpy(rows[first:last] - rows[first])
                there = torch.from_numpy(slots[first:last])
                num_rows = int(rows[last - 1] - rows[first]) + 1
                yield partial(
                    _read_scattered, file, int(rows[first]), num_rows, target, chosen, there
                )

    def _rows(self, offsets: Integers, begin: int) -> tuple[Integers, Integers]:
        """The slots of the rows at offsets of all shards, and their rows of the file, ascending."""
        wanted = offsets < self._sizes[self._shards, None]
        first_slots = self._first_slots[self._shards, None]
        slots = (first_slots + np.arange(begin, begin + len(offsets)))[wanted]
        shards = np.broadcast_to(self._shards[:, None], wanted.shape)[wanted]
        rows = self._offsets.of(shards, np.broadcast_to(offsets, wanted.shape)[wanted])
        order = np.argsort(rows)
        return slots[order], rows[order]


def _multiple(file: RowFile) -> int:
    """The least number of rows that are whole blocks: a power of two."""
    return file.block_bytes // math.gcd(file.block_bytes, file.row_bytes)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _reads_in_place(file: RowFile, rows: range, slot: int, target: Tensor) -> Iterator[Read]:
    """Reads of whole blocks straight to the rows' slots.

    Other rows in the first and the last block go to free slots.
    """
    begin, end = rows.start * file.row_bytes, rows.stop * file.row_bytes
    skip = begin % file.block_bytes
    memory = target.view(-1).numpy().data[slot * file.row_bytes - skip :]
    begin -= skip
    for first in range(begin, end, _READ_BYTES):
        last = min(first + _READ_BYTES, end)
        block = memory[first - begin : file.whole_blocks(last) - begin]
        yield partial(_read_in_place, file, first, last, block)


def _reads_to_copy(file: RowFile, rows: range, slot: int, target: Tensor) -> Iterator[Read]:
    """Reads to scratch memory, from which rows are copied."""
    step = max(1, _READ_BYTES // file.row_bytes)
    for first in range(rows.start, rows.stop, step):
        count = min(step, rows.stop - first)
        yield partial(_read_and_copy, file, first, count, target[slot : slot + count])
        slot += count


def _read_in_place(
    file: RowFile, begin: int, end: int, memory: memoryview, _scratch: memoryview
) -> None:
    file.read_bytes(begin, end, memory)


def _read_and_copy(
    file: RowFile, first: int, num_rows: int, target: Tensor, scratch: memoryview
) -> None:
    target.copy_(_read_rows(file, first, num_rows, scratch))


def _read_scattered(
    file: RowFile,
    first: int,
    num_rows: int,
    target: Tensor,
    chosen: Tensor,
    slots: Tensor,
    scratch: memoryview,
) -> None:
    rows = _read_rows(file, first, num_rows, scratch)
    target.index_copy_(0, slots, rows.index_select(0, chosen))


def _read_rows(file: RowFile, first: int, num_rows: int, scratch: memoryview) -> Tensor:
    memory = file.read_rows(first, num_rows, scratch)
    return torch.frombuffer(memory, dtype=torch.uint8).view(num_rows, -1)


def _spans(rows: Integers, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Divide ascending rows of a file into reads: the first and one past the last of each."""
    if not len(rows):
        return
    is_far = (np.diff(rows) - 1) * row_bytes > _GAP_BYTES
    is_long = np.diff(rows // max(1, _READ_BYTES // row_bytes)) > 0
    edges = [0, *(np.flatnonzero(is_far | is_long) + 1).tolist(), len(rows)]
    yield from pairwise(edges)
