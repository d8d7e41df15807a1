"""Lanes: the rows of shards in one window, read from the files of a store in long pieces."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.loading.buffers import Buffers
from lightning_memmap.loading.layout import Layout
from lightning_memmap.order import Integers, shard_rows, shard_starts
from lightning_memmap.schema import Field
from lightning_memmap.store.row_file import RowFile, make_scratch

#: What is read at once: enough for the full rate of a disk, and little against any window.
_PIECE_BYTES = 4 * 2**20
#: While one thread copies what it has read to its place, others read.
_NUM_THREADS = 4
#: Rows of other shards than the store's are looked for together, some of each lane at a time.
_LOOK_BYTES = 16 * 2**20
#: Bytes between wanted rows that are read along: skipping them takes a disk as long.
_GAP_BYTES = 128 * 2**10
#: Rows of each lane that are looked at to tell how much is read along.
_SAMPLE_ROWS = 4096


@dataclass(frozen=True)
class _Piece:
    """Rows that are read at once.

    Args:
        file: Where from.
        first: The first row, counted in the file.
        num_rows: Rows.
        target: The rows of a lane that they are, uint8 of shape (num_rows, bytes of a row). Where
            ``chosen`` is given: all rows of all lanes.
        chosen: Which of the rows are wanted, int64 of shape (B,).
        places: The rows of ``target`` that these are, int64 of shape (B,).
    """

    file: RowFile
    first: int
    num_rows: int
    target: Tensor
    chosen: Tensor | None = None
    places: Tensor | None = None

    def read(self, scratch: memoryview) -> None:
        memory = self.file.read(self.first, self.num_rows, scratch)
        rows = torch.frombuffer(memory, dtype=torch.uint8).view(self.num_rows, -1)
        if self.chosen is None or self.places is None:
            self.target.copy_(rows)
        else:
            self.target.index_copy_(0, self.places, rows.index_select(0, self.chosen))


class _Pieces:
    """What several threads read, each piece once, until one of them fails.

    Args:
        pieces: All of them.
        is_wanted: Whether to go on.
    """

    def __init__(self, pieces: Iterator[_Piece], is_wanted: Callable[[], bool]) -> None:
        self._pieces = pieces
        self._is_wanted = is_wanted
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def read(self, scratch: memoryview) -> None:
        """Read pieces until there are none. Several threads may, with a scratch each."""
        try:
            while (piece := self._next()) is not None:
                piece.read(scratch)
        except BaseException as error:  # The thread that began all this raises it.
            self.error = error

    def _next(self) -> _Piece | None:
        with self._lock:
            return next(self._pieces, None) if self.error is None and self._is_wanted() else None


class Lanes:
    """The lanes of some shards.

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
        self._scratches: list[memoryview] = []
        self.lane_rows = lane_rows
        #: By shard of the stream, the number of its lane; -1 for those that are not here.
        self.number_of = np.full(num_shards, -1, np.int64)
        self.number_of[self._shards] = np.arange(len(shards))

    @property
    def num_places(self) -> int:
        """Rows of all lanes."""
        return len(self._shards) * self.lane_rows

    def allocate(self) -> Buffers:
        """Memory for a window: for each field a tensor of shape (num_places, *field shape)."""
        buffers = []
        for field in self._fields:
            memory = torch.empty(
                self.num_places * field.row_bytes, dtype=torch.uint8, pin_memory=self._pin
            )
            shape = (self.num_places, *field.shape)
            is_empty = not field.row_bytes
            buffers.append(
                torch.empty(shape, dtype=field.dtype)
                if is_empty
                else memory.view(field.dtype).view(shape)
            )
        return Buffers.of(buffers)

    def read(self, runs: Sequence[range], buffers: Buffers, is_wanted: Callable[[], bool]) -> None:
        """Read the lanes of a window.

        Args:
            runs: The offsets of the rows of each lane, in runs.
            buffers: As `allocate` gives them. Row ``i`` of lane ``l`` goes to place
                ``l * lane_rows + i``. What a short lane has not stays as it was.
            is_wanted: Is asked now and then whether to go on.

        Raises:
            OSError: The disk cannot be read.
            StoreError: A file is shorter than it was.
        """
        scratches = [self._scratch() for _ in range(_NUM_THREADS)]
        pieces = _Pieces(self._pieces(runs, buffers.tensors), is_wanted)
        name = threading.current_thread().name
        helpers = [
            threading.Thread(target=pieces.read, args=(scratch,), name=name, daemon=True)
            for scratch in scratches[1:]
        ]
        for helper in helpers:
            helper.start()
        pieces.read(scratches[0])
        for helper in helpers:
            helper.join()
        self._scratches = scratches
        if pieces.error is not None:
            raise pieces.error

    def _scratch(self) -> memoryview:
        try:
            # Another iteration may take the last one at the same time.
            return self._scratches.pop()
        except IndexError:
            return make_scratch(max(_PIECE_BYTES, *(field.row_bytes for field in self._fields)))

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

    def _pieces(self, runs: Sequence[range], buffers: Sequence[Tensor]) -> Iterator[_Piece]:
        by_file = {file: buffer for file, buffer in zip(self._files, buffers, strict=True) if file}
        # Small rows last: they are short reads, for threads that wait for the last long ones.
        for file in sorted(by_file, key=lambda each: -each.row_bytes):
            buffer = by_file[file]
            target = buffer.view(-1).view(torch.uint8).view(self.num_places, file.row_bytes)
            if self._layout.is_as_stored(self._num_shards):
                yield from self._long_pieces(file, runs, target)
            else:
                yield from self._scattered_pieces(file, runs, target)

    def _long_pieces(
        self, file: RowFile, runs: Sequence[range], target: Tensor
    ) -> Iterator[_Piece]:
        """The shards are those of the store: a run of a lane is one of the file."""
        starts = shard_starts(self._layout.num_rows, self._num_shards)
        step = max(1, _PIECE_BYTES // file.row_bytes)
        for lane, shard in enumerate(self._shards.tolist()):
            start, size = int(starts[shard]), int(self._rows_of_shard[shard])
            place = lane * self.lane_rows
            for run in runs:
                for first in range(run.start, min(run.stop, size), step):
                    count = min(step, min(run.stop, size) - first)
                    yield _Piece(file, start + first, count, target[place : place + count])
                    place += count

    def _scattered_pieces(
        self, file: RowFile, runs: Sequence[range], target: Tensor
    ) -> Iterator[_Piece]:
        """The shards are others than those of the store: the rows of all lanes together are looked
        for in the file, some of each lane at a time."""
        offsets = np.concatenate([np.arange(run.start, run.stop) for run in runs])
        step = max(1, _LOOK_BYTES // (file.row_bytes * len(self._shards)))
        for begin in range(0, len(offsets), step):
            places, rows = self._rows(offsets[begin : begin + step], begin)
            for first, last in _spans(rows, file.row_bytes):
                yield _Piece(
                    file,
                    int(rows[first]),
                    int(rows[last - 1] - rows[first]) + 1,
                    target,
                    torch.from_numpy(rows[first:last] - rows[first]),
                    torch.from_numpy(places[first:last]),
                )

    def _rows(self, offsets: Integers, begin: int) -> tuple[Integers, Integers]:
        """The rows of the file at these offsets of all lanes, ascending, and their places."""
        wanted = offsets < self._rows_of_shard[self._shards, None]
        lanes = np.arange(len(self._shards), dtype=np.int64)[:, None] * self.lane_rows
        places = (lanes + np.arange(begin, begin + len(offsets)))[wanted]
        rows = self._layout.places((offsets * self._num_shards + self._shards[:, None])[wanted])
        order = np.argsort(rows)
        return places[order], rows[order]


def _spans(rows: Integers, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Where ascending rows of a file are cut into pieces: first and one past last."""
    if not len(rows):
        return
    is_far = (np.diff(rows) - 1) * row_bytes > _GAP_BYTES
    is_long = np.diff(rows // max(1, _PIECE_BYTES // row_bytes)) > 0
    edges = [0, *(np.flatnonzero(is_far | is_long) + 1).tolist(), len(rows)]
    yield from pairwise(edges)
