"""Runs of items: where they lie in memory, and the reads that bring them there.

Whatever is read are items of a file: rows of one shape, the items of rows that differ in length, or
the steps of series. Items that follow one another in a file are a run, and do so in memory too.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.loading.row_file import MAX_BLOCK_BYTES, RowFile, aligned_memory
from lightning_memmap.sampling import Integers
from lightning_memmap.store.open_columns import ItemRows, Located
from lightning_memmap.store.segments import copy_segments

#: Bytes of one read: enough for the full rate of a disk, and few compared with any window.
_READ_BYTES = 4 * 2**20
#: Gaps of this size between wanted rows are read too: skipping them takes a disk as long.
_GAP_BYTES = 128 * 2**10
#: In a table of runs, so many begin in one bucket at most.
_MAX_BEGINS = 6

#: Reads rows to their places.
Read: TypeAlias = Callable[[], None]

#: Scratch memory of each thread.
_OF_THREAD = threading.local()


def _scratch(row_bytes: int) -> memoryview:
    """Scratch memory of this thread for one read, aligned for direct reads."""
    num_bytes = max(_READ_BYTES, row_bytes) + 2 * MAX_BLOCK_BYTES
    found: memoryview | None = getattr(_OF_THREAD, "memory", None)
    if found is None or len(found) < num_bytes:
        found = _OF_THREAD.memory = aligned_memory(num_bytes)
    return found


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of items of a file, and where they are in memory."""

    begins: Integers
    ends: Integers
    places: Integers

    def of(self, items: Integers) -> Integers:
        """Where items of the runs are in memory."""
        shifts = self.places - self.begins
        if len(shifts) <= 1:
            return items + shifts
        first, bits, runs_before, most = self._buckets
        if most > _MAX_BEGINS:
            runs = np.searchsorted(self.begins, items, side="right") - 1
        else:
            runs = runs_before.take((items - first) >> bits, mode="clip")
            following = np.append(self.begins[1:], np.iinfo(np.int64).max)
            for _ in range(most):
                runs += items >= following.take(runs)
        found: Integers = items + shifts.take(runs)
        return found

    @cached_property
    def _buckets(self) -> tuple[int, int, Integers, int]:
        """First item, bits of a bucket's size, the run each bucket begins in, runs in a bucket."""
        first, last = int(self.begins[0]), int(self.begins[-1])
        bits = max(0, ((last - first) // (4 * len(self.begins))).bit_length())
        edges = np.arange(first, last + 2 + (1 << bits), 1 << bits)
        before = np.searchsorted(self.begins, edges, side="right") - 1
        return first, bits, before, int(np.diff(before).max(initial=0))


class WindowItems:
    """Memory for the items that a window has of some files, at the same places in each of them."""

    def __init__(
        self,
        name: str,
        files: Sequence[RowFile | None],
        kinds: Sequence[tuple[Sequence[int], torch.dtype]],
        max_items: int,
    ) -> None:
        self._name, self._files, self._max_items = name, files, max_items
        #: By file, the items; undefined before they are read.
        self.memory = [self._allocate(*kind) for kind in kinds]
        #: Where the items of the window are.
        self.runs = Runs(*np.zeros((3, 1), np.int64))

    def _allocate(self, item_shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory that a disk can write items to."""
        num_bytes = self._max_items * math.prod(item_shape) * dtype.itemsize
        flat = torch.frombuffer(aligned_memory(max(1, num_bytes)), dtype=torch.uint8)[:num_bytes]
        return flat.view(dtype).view(self._max_items, *item_shape)

    def reads(self, found: Located) -> Iterator[Read]:
        """The reads that bring the items of a window to their places."""
        begins, ends = runs_of(found)
        lengths = ends - begins
        if (count := int(lengths.sum())) > self._max_items:
            raise ValueError(
                f"residency='stream': a window has {count} items of field {self._name!r}, and"
                f" windows of rows that follow one another have {self._max_items} at most: let"
                " block_runs of the sampler return such rows"
            )
        self.runs = Runs(begins, ends, np.cumsum(lengths) - lengths)
        for file, items in zip(self._files, self.memory, strict=True):
            if file is not None and items.numel():
                yield from reads_of(file, self.runs, items.view(-1).view(torch.uint8))

    def places(self, slots: Tensor) -> Tensor:
        """Where items are in memory, by their places in the files."""
        return torch.from_numpy(self.runs.of(slots.numpy()))

    def among(self, rows: ItemRows, slots: Integers) -> tuple[Tensor, Located]:
        """The items of all rows, and where those of some are."""
        starts, sizes = rows.at(slots)
        return self.memory[0], Located(self.runs.of(starts), sizes)


def runs_of(found: Located) -> tuple[Integers, Integers]:
    """The first item of each run, and one past its last one, ascending."""
    lengths = found.sizes.prod(axis=1)
    order = np.argsort(found.starts, kind="stable")
    begins = found.starts[order]
    ends = np.maximum.accumulate(begins + lengths[order])
    firsts = np.flatnonzero(np.append(True, begins[1:] > ends[:-1])[: len(begins)])
    return begins[firsts], ends[np.append(firsts, len(order))[1:] - 1]


def _pieces(
    begins: Integers, ends: Integers, row_bytes: int
) -> tuple[Integers, Integers, Integers, list[int]]:
    """Divide ascending runs of rows into pieces that are read together.

    The first row of each piece, one past its last, its run, and the first piece of each read.
    """
    step = max(1, _READ_BYTES // row_bytes)
    # Runs are cut where a read would be too long.
    counts = np.where(begins < ends, -(-ends // step) - begins // step, 0)
    runs = np.repeat(np.arange(len(begins)), counts)
    cuts = np.arange(len(runs)) - np.repeat(np.cumsum(counts) - counts, counts)
    cuts = (cuts + (begins // step)[runs]) * step
    begins = np.maximum(begins[runs], cuts)
    ends = np.minimum(ends[runs], cuts + step)
    is_far = (begins[1:] - ends[:-1]) * row_bytes > _GAP_BYTES
    is_long = np.diff(begins // step) > 0
    edges = [0, *(np.flatnonzero(is_far | is_long) + 1).tolist(), len(begins)]
    return begins, ends, runs, edges if len(begins) else []


def reads_of(file: RowFile, runs: Runs, target: Tensor) -> Iterator[Read]:
    """Reads of runs of rows, and of small gaps between them, to their places in memory."""
    begins, ends, sources, edges = _pieces(runs.begins, runs.ends, file.row_bytes)
    places = begins + (runs.places - runs.begins)[sources]
    memory = target.numpy()
    for first, last in pairwise(edges):
        here = slice(first, last)
        yield partial(_read, file, begins[here], ends[here], places[here], memory)


def _read(
    file: RowFile,
    begins: Integers,
    ends: Integers,
    places: Integers,
    memory: np.ndarray,
) -> None:
    first, last, size = int(begins[0]), int(ends[-1]), file.row_bytes
    place, num_bytes = int(places[0]) * size, (last - first) * size
    if len(begins) == 1 and size % file.block_bytes == 0:
        # Whole blocks, straight to their place.
        file.read_bytes(first * size, last * size, memory.data[place : place + num_bytes])
        return
    data = np.frombuffer(file.read_rows(first, last - first, _scratch(size)), np.uint8)
    if len(begins) == 1:
        # numpy lets other threads run meanwhile.
        memory[place : place + num_bytes] = data
        return
    lengths = (ends - begins) * size
    copy_segments(data, (begins - first) * size, memory, places * size, lengths)
