"""Lanes: the rows of shards in one window, read from the files of a store in long pieces."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.loading.buffers import Buffers
from lightning_memmap.loading.layout import Layout
from lightning_memmap.sampling import Integers, shard_rows, shard_starts
from lightning_memmap.schema import Field
from lightning_memmap.store.row_file import MAX_BLOCK_BYTES, RowFile, aligned_memory

#: What is read at once: enough for the full rate of a disk, and little against any window.
_PIECE_BYTES = 4 * 2**20
#: Rows of other shards than the store's are looked for together, some of each lane at a time.
_LOOK_BYTES = 16 * 2**20
#: Bytes between wanted rows that are read along: skipping them takes a disk as long.
_GAP_BYTES = 128 * 2**10
#: Rows of each lane that are looked at to tell how much is read along.
_SAMPLE_ROWS = 4096
#: Runs of a lane at most: a window may wrap around, and some shards have a row more.
_MAX_RUNS = 3
#: What may be left free in a lane, as a part of it, so that a disk can write to the place of a row.
_MAX_FREE = 1 / 64

#: Reads rows to their places, some by way of the scratch.
Piece: TypeAlias = Callable[[memoryview], None]


class Lanes:
    """The lanes of some shards.

    Direct reads begin at a block, in the file and in memory. Where little room is needed for it,
    rows begin as far from the beginning of a block in memory as they do in the file, and a disk
    writes them to their places. Others are read elsewhere and copied.

    Args:
        fields: The fields of the store.
        files: Their files.
        layout: Where the rows of the stream lie in them.
        num_rows: Rows of the stream.
        num_shards: Shards of the stream.
        shards: Which of them these are.
        lane_rows: Rows of a lane.
        pin: Read into page-locked memory.
    """

    def __init__(
        self,
        fields: Sequence[Field],
        files: Sequence[RowFile | None],
        layout: Layout,
        *,
        num_rows: int,
        num_shards: int,
        shards: Sequence[int],
        lane_rows: int,
        pin: bool,
    ) -> None:
        self._fields = fields
        self._files = files
        self._layout = layout
        self._num_shards = num_shards
        self._shards = np.array(shards, np.int64)
        self._rows_of_shard = shard_rows(num_rows, num_shards)
        self._pin = pin
        #: Runs begin at a place that is, modulo this, their first row's in the file.
        self._multiple = 1
        if layout.is_as_stored(num_shards):
            multiples = [_multiple(file) for file in files if file is not None]
            limit = max(1, lane_rows * _MAX_FREE / (2 * _MAX_RUNS))
            self._multiple = max((each for each in multiples if each <= limit), default=1)
        free = 2 * _MAX_RUNS * (self._multiple - 1)
        self._lane_places = _round_up(lane_rows + free, self._multiple)
        self._starts = shard_starts(layout.num_rows, num_shards)
        #: By shard of the stream, the first place of its lane. Of those here; others have none.
        self._begins = np.full(num_shards, -1, np.int64)
        self._begins[self._shards] = np.arange(len(shards)) * self._lane_places

    @property
    def num_places(self) -> int:
        """Places for rows in a window: one for each row of all lanes, and some that stay free."""
        return len(self._shards) * self._lane_places

    def begins(self, runs: Sequence[range]) -> list[Integers]:
        """Where runs begin in a window.

        Args:
            runs: The offsets of the rows of each lane, in runs of consecutive ones.

        Returns:
            For each run, by shard of the stream, the place of its first row: int64 of shape (C,),
            undefined for shards that are not here.
        """
        begins, begin = [], self._begins
        for run in runs:
            begins.append(begin + (self._starts + run.start) % self._multiple)
            begin = begin + _round_up(len(run) + self._multiple - 1, self._multiple)
        return begins

    def allocate(self) -> Buffers:
        """Memory for a window: for each field a tensor of shape (num_places, *field shape)."""
        buffers = []
        for field in self._fields:
            memory = self._allocate(self.num_places * field.row_bytes)
            shape = (self.num_places, *field.shape)
            is_empty = not field.row_bytes
            buffers.append(
                torch.empty(shape, dtype=field.dtype)
                if is_empty
                else memory.view(field.dtype).view(shape)
            )
        return Buffers.of(buffers)

    def _allocate(self, num_bytes: int) -> Tensor:
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        if not self._pin:
            return torch.frombuffer(aligned_memory(num_bytes), dtype=torch.uint8)
        memory = torch.empty(num_bytes + MAX_BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
        skip = -memory.data_ptr() % MAX_BLOCK_BYTES
        return memory[skip : skip + num_bytes]

    def scratch(self) -> memoryview:
        """Memory for reading pieces, for one thread."""
        largest = max(_PIECE_BYTES, *(field.row_bytes for field in self._fields))
        return aligned_memory(largest + 2 * MAX_BLOCK_BYTES)

    def pieces(self, runs: Sequence[range], buffers: Buffers) -> Iterator[Piece]:
        """The lanes of a window in pieces, which several threads may read at once.

        Reading one raises OSError where the disk cannot be read, and StoreError where a file is
        shorter than it was.

        Args:
            runs: The offsets of the rows of each lane, in runs of consecutive ones.
            buffers: As `allocate` gives them. The rows of each run go to consecutive places, from
                that of `begins` on. What is in other places is undefined.
        """
        for file, buffer in zip(self._files, buffers.tensors, strict=True):
            if file is None:
                continue
            target = buffer.view(-1).view(torch.uint8).view(self.num_places, file.row_bytes)
            if not self._layout.is_as_stored(self._num_shards):
                yield from self._scattered_pieces(file, runs, target)
                continue
            in_place = self._multiple % _multiple(file) == 0
            for rows in self._long_runs(runs):
                cut = _pieces_in_place if in_place else _pieces_to_copy
                yield from cut(file, *rows, target)

    def share_used(self, runs: Sequence[range]) -> float:
        """Which share of the bytes that are read is wanted, told by the first rows of lanes."""
        if self._layout.is_as_stored(self._num_shards):
            return 1.0
        offsets = np.concatenate([np.arange(run.start, run.stop) for run in runs])
        read = used = 0
        for file in filter(None, self._files):
            _, rows = self._rows(offsets[:_SAMPLE_ROWS], 0)
            for first, last in _spans(rows, file.row_bytes):
                read += (int(rows[last - 1] - rows[first]) + 1) * file.row_bytes
                used += (last - first) * file.row_bytes
        return used / max(1, read)

    def _long_runs(self, runs: Sequence[range]) -> Iterator[tuple[range, int]]:
        """The shards are those of the store: a run of a lane is one of the file.

        Returns:
            Rows of the file, and the place of the first one.
        """
        begins = self.begins(runs)
        for shard in self._shards.tolist():
            start, size = int(self._starts[shard]), int(self._rows_of_shard[shard])
            for run, begin in zip(runs, begins, strict=True):
                if rows := range(start + run.start, start + min(run.stop, size)):
                    yield rows, int(begin[shard])

    def _scattered_pieces(
        self, file: RowFile, runs: Sequence[range], target: Tensor
    ) -> Iterator[Piece]:
        """The shards are others than those of the store: the rows of all lanes together are looked
        for in the file, some of each lane at a time."""
        offsets = np.concatenate([np.arange(run.start, run.stop) for run in runs])
        step = max(1, _LOOK_BYTES // (file.row_bytes * len(self._shards)))
        for begin in range(0, len(offsets), step):
            places, rows = self._rows(offsets[begin : begin + step], begin)
            for first, last in _spans(rows, file.row_bytes):
                chosen = torch.from_numpy(rows[first:last] - rows[first])
                there = torch.from_numpy(places[first:last])
                num_rows = int(rows[last - 1] - rows[first]) + 1
                yield partial(
                    _read_scattered, file, int(rows[first]), num_rows, target, chosen, there
                )

    def _rows(self, offsets: Integers, begin: int) -> tuple[Integers, Integers]:
        """The rows of the file at these offsets of all lanes, ascending, and their places."""
        wanted = offsets < self._rows_of_shard[self._shards, None]
        begins = self._begins[self._shards, None]
        places = (begins + np.arange(begin, begin + len(offsets)))[wanted]
        rows = self._layout.places((offsets * self._num_shards + self._shards[:, None])[wanted])
        order = np.argsort(rows)
        return places[order], rows[order]


def _multiple(file: RowFile) -> int:
    """The least number of rows that are whole blocks: a power of two."""
    return file.block_bytes // math.gcd(file.block_bytes, file.row_bytes)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _pieces_in_place(file: RowFile, rows: range, place: int, target: Tensor) -> Iterator[Piece]:
    """Reads of whole blocks to where their bytes belong.

    What the first and the last block hold besides goes to places that are free.
    """
    begin, end = rows.start * file.row_bytes, rows.stop * file.row_bytes
    skip = begin % file.block_bytes
    memory = target.view(-1).numpy().data[place * file.row_bytes - skip :]
    begin -= skip
    for first in range(begin, end, _PIECE_BYTES):
        last = min(first + _PIECE_BYTES, end)
        piece = memory[first - begin : file.whole_blocks(last) - begin]
        yield partial(_read_in_place, file, first, last, piece)


def _pieces_to_copy(file: RowFile, rows: range, place: int, target: Tensor) -> Iterator[Piece]:
    """Reads to the scratch."""
    step = max(1, _PIECE_BYTES // file.row_bytes)
    for first in range(rows.start, rows.stop, step):
        count = min(step, rows.stop - first)
        yield partial(_read_and_copy, file, first, count, target[place : place + count])
        place += count


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
    places: Tensor,
    scratch: memoryview,
) -> None:
    rows = _read_rows(file, first, num_rows, scratch)
    target.index_copy_(0, places, rows.index_select(0, chosen))


def _read_rows(file: RowFile, first: int, num_rows: int, scratch: memoryview) -> Tensor:
    memory = file.read_rows(first, num_rows, scratch)
    return torch.frombuffer(memory, dtype=torch.uint8).view(num_rows, -1)


def _spans(rows: Integers, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Where ascending rows of a file are cut into pieces: first and one past last."""
    if not len(rows):
        return
    is_far = (np.diff(rows) - 1) * row_bytes > _GAP_BYTES
    is_long = np.diff(rows // max(1, _PIECE_BYTES // row_bytes)) > 0
    edges = [0, *(np.flatnonzero(is_far | is_long) + 1).tolist(), len(rows)]
    yield from pairwise(edges)
