"""A stream: threads read the next block from the files while rows of the current one are fetched.

A block is read into one buffer, so consecutive items in the files are consecutive in memory: rows
of one shape, steps of series, or the items of rows that differ in length. Take 7 rows in 3 shards,
blocks of 2 rows per shard, and a device that holds the shards 0 and 2::

    files         0 3 6 | 1 4 | 2 5      slots 0 to 6
    first block   rows 0 3 and 2 5       runs of slots 0 to 1 and 5 to 6
      buffer      0 3 2 5                slot 5 is read to index 2
    second block  row 6                  slot 2

`Stream.locate` adds ``block * num_slots`` to each slot, so that one integer also identifies the
block: row 6 has the slot 2 + 1 * 7. With windows over series, fields with one value per series stay
in the file mapping.
"""

import math
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_memmap.integers import (
    Integers,
    Runs,
    bounds_of,
    ceil_div,
    distinct,
    items_per_row,
    ranges,
    starts_of,
)
from lightning_memmap.loading.ahead import Ahead
from lightning_memmap.loading.buffers import Buffers, byte_pool
from lightning_memmap.loading.memory import (
    Columns,
    SeriesSlots,
    SlotMap,
    ToIndex,
    VariableField,
    column_in_place,
)
from lightning_memmap.loading.row_file import Read, RowFile, aligned_memory, reads_of
from lightning_memmap.loading.row_source import Cut, FieldRows, RowSource, Take, merge_in_order
from lightning_memmap.sampling.rows import WindowedRows
from lightning_memmap.sampling.sampler import Sampler
from lightning_memmap.sampling.schedule import Blocks
from lightning_memmap.schema.fields import Field
from lightning_memmap.store.open_columns import IndexedItems, Located, OpenColumn
from lightning_memmap.store.series import view_windows

#: Blocks in memory: rows are fetched from one while the other is read.
_NUM_BUFFERS = 2
#: While one thread copies the bytes that it read, or waits for a short read, others read on.
_NUM_THREADS = 4
#: Memory for looking up a row of a block, in addition to the row, in bytes.
LOOKUP_BYTES = 56
#: Most runs of a shard in a block: a block may wrap around, and some shards have one row more.
_MAX_RUNS = 3


class BlockItems:
    """Memory for the items of a block, in one buffer per file, at the same indices in each."""

    def __init__(self, name: str, max_items: int) -> None:
        self._name = name
        self._max_items = max_items
        self._files: list[RowFile | None] = []
        #: The items of each file; undefined before they are read.
        self.memory: list[Tensor] = []
        #: Maps items of the files to indices in memory.
        self.runs = Runs(*np.zeros((2, 1), np.int64))

    def add(self, file: RowFile | None, item_shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a buffer for the items of one more file, aligned for direct reads."""
        num_bytes = self._max_items * math.prod(item_shape) * dtype.itemsize
        flat = torch.frombuffer(aligned_memory(max(1, num_bytes)), dtype=torch.uint8)[:num_bytes]
        self._files.append(file)
        self.memory.append(flat.view(dtype).view(self._max_items, *item_shape))
        return self.memory[-1]

    def reads(self, located: Located) -> Iterator[Read]:
        """Yield the reads that load a block, and set `runs` to its layout."""
        starts, stops = merge_into_runs(located)
        lengths = stops - starts
        if (count := int(lengths.sum())) > self._max_items:
            raise ValueError(
                f"residency='stream': a block has {count} items of field {self._name!r}, more than"
                f" the {self._max_items} of the largest block of consecutive rows. Let block_runs"
                " of the sampler return runs of consecutive rows."
            )
        self.runs = Runs(starts, starts_of(lengths) - starts)
        for file, items in zip(self._files, self.memory, strict=True):
            if file is not None and items.numel():
                yield from reads_of(file, self.runs, stops, items.view(-1).view(torch.uint8))

    def to_index(self, slots: Tensor) -> Tensor:
        """Return the indices in memory of items of the files."""
        return torch.from_numpy(self.runs.at(slots.numpy()))

    def items_and_ranges(self, rows: IndexedItems, slots: Integers) -> tuple[Tensor, Located]:
        """Return the items in memory, and the range of each of some rows in them."""
        starts, sizes = rows.locate(slots)
        return self.memory[0], Located(self.runs.at(starts), sizes)


class StreamMemory:
    """The memory of one block, on the CPU, undefined before the block is read."""

    def __init__(self, stream: "Stream") -> None:
        series = stream.series
        #: Rows of one shape, or steps.
        self.items = BlockItems(stream.columns[0][0].name, stream.max_items)
        #: The items of each field whose rows differ in length.
        self.variable: list[tuple[IndexedItems, BlockItems]] = []
        columns: list[Tensor | VariableField] = []
        to_index: list[ToIndex | None] = []
        pairs = zip(stream.columns, stream.files, strict=True)
        for field_index, ((field, rows), file) in enumerate(pairs):
            if series is None and isinstance(rows, IndexedItems):
                items = BlockItems(field.name, stream.max_variable_items[field_index])
                items.add(file, field.item_shape, field.dtype)
                self.variable.append((rows, items))
                # Copied at once, because this memory is overwritten by a later block.
                columns.append(
                    VariableField(field, partial(items.items_and_ranges, rows), byte_pool())
                )
                to_index.append(None)
            elif series is None:
                columns.append(self.items.add(file, field.item_shape, field.dtype))
                to_index.append(self.items.to_index)
            elif field.name in series.windows.fields:
                step_shape = field.windowed(1).item_shape[1:]
                steps = self.items.add(file, step_shape, field.dtype)
                columns.append(view_windows(steps, series.windows.length))
                to_index.append(self.items.to_index)
            else:
                columns.append(column_in_place(rows))
                to_index.append(series.rows_of)
        self._columns = Columns(columns, torch.device("cpu"), to_index)
        self.take = self._columns.take

    def reads(self, locate: Callable[[], Located]) -> Iterator[Read]:
        """Yield the reads that load a block. Several threads may run them at once."""
        located = locate()
        yield from self.items.reads(located)
        if self.variable:
            starts, stops = merge_into_runs(located)
            slots = ranges(starts, stops - starts)
            for rows, items in self.variable:
                yield from items.reads(rows.locate(slots))


@dataclass(eq=False)
class Stream(RowSource):
    """Rows of some shards that stay in the files, and are read block by block.

    Args:
        columns: The fields and their mapped columns.
        files: The file of each field; None if it has no bytes.
        slot_map: The slots of rows.
        num_slots: A number above all slots.
        held: The shards.
        blocks: The blocks of an epoch.
        series: The series, if rows are windows.
    """

    columns: Sequence[tuple[Field, OpenColumn]]
    files: Sequence[RowFile | None]
    slot_map: SlotMap
    num_slots: int
    _: KW_ONLY
    held: Sequence[int]
    blocks: Blocks
    series: SeriesSlots | None = None

    def __post_init__(self) -> None:
        self.device = torch.device("cpu")
        self._shards = np.array(self.held, np.int64)
        #: Most rows of one shape, or steps, in a block.
        self.max_items = len(self.held) * self.blocks.max_rows_per_shard
        if self.series is not None:
            self.max_items = max_block_time_steps(self.held, self.blocks)
        #: Most items in a block of each field whose rows differ in length, by field index.
        self.max_variable_items = {
            index: max_block_items(rows, self.slot_map, self.held, self.blocks)
            for index, (_, rows) in enumerate(self.columns)
            if self.series is None and isinstance(rows, IndexedItems)
        }
        #: Memory of blocks that is not in use.
        self.idle: list[StreamMemory] = []
        self._epochs: weakref.WeakSet[_StreamedEpoch] = weakref.WeakSet()

    @override
    def locate(self, sampler: Sampler, epoch: int, positions: range | Integers) -> Integers:
        slots = self.slot_map.locate(sampler, epoch, positions)
        if not isinstance(positions, range):
            blocks = positions // (self.blocks.num_rounds * self.slot_map.pool.num_shards)
            located: Integers = slots + blocks * self.num_slots
            return located
        block_positions = self._blocks(sampler).num_block_positions
        first_block = positions.start // block_positions
        for block in range(first_block, ceil_div(positions.stop, block_positions)):
            start = bisect_left(positions, block_positions * block)
            stop = bisect_left(positions, block_positions * (block + 1))
            slots[start:stop] += block * self.num_slots
        return slots

    def _blocks(self, sampler: Sampler) -> Blocks:
        """Divide an order into blocks."""
        # Dataset order can use blocks of any size. While a store is built, the size is not known.
        if sampler.is_sequential:
            sampler = sampler.in_blocks(self.blocks.num_rounds)
        return Blocks(sampler)

    @override
    @contextmanager
    def epoch(self, sampler: Sampler, epoch: int, position: int) -> Iterator[Take]:
        with closing(_StreamedEpoch(self, self._blocks(sampler), epoch, position)) as rows:
            self._epochs.add(rows)
            yield rows.take

    @override
    def release(self) -> None:
        super().release()
        for rows in list(self._epochs):
            rows.close()
        self.idle.clear()

    def locate_block(self, blocks: Blocks, epoch: int, block: int) -> Located:
        """Find the items of a block in the files, as starts and lengths of runs."""
        if self.series is not None:
            return locate_block_windows(self.series, self._shards, blocks, epoch, block)
        starts = self.slot_map.starts
        sizes = self.slot_map.pool.sizes[self._shards]
        runs = blocks.sampler.block_runs(epoch, block)
        if starts is not None and runs is not None:
            run_starts = np.array([run.start for run in runs])
            run_stops = np.minimum(np.array([run.stop for run in runs]), sizes[:, None])
            counts = np.maximum(0, run_stops - run_starts).ravel()
            first_slots = (starts[self._shards, None] + run_starts).ravel()
            return Located(first_slots[counts > 0], counts[counts > 0, None])
        slots = distinct(self.slot_map.slots(blocks.pool_indices(epoch, block, self._shards)))
        return Located(slots, np.ones((len(slots), 1), np.int64))


class _StreamedEpoch:
    """The rows of one epoch, block by block."""

    def __init__(self, stream: Stream, blocks: Blocks, epoch: int, position: int) -> None:
        self._stream = stream
        self._blocks = blocks
        self._epoch = epoch
        #: The block that rows are fetched from. Its memory is the first one.
        self._block = position // blocks.num_block_positions
        self._memory = Ahead[StreamMemory]("lightning_memmap block-reader", _NUM_THREADS)
        for _ in range(_NUM_BUFFERS):
            self._read_next(stream.idle.pop() if stream.idle else None)

    def take(
        self, slots: Tensor, out: Buffers | None = None, cut: Cut | None = None
    ) -> list[FieldRows]:
        """Copy the next rows of the epoch into a batch; see `Take`."""
        num_slots = self._stream.num_slots
        start, last = (int(slot) // num_slots for slot in slots.aminmax())
        assert start >= self._block, "rows must be fetched in the order of their blocks"
        if start == last:
            return self._memory_of(start).take(slots - start * num_slots, out, cut)
        fetched: list[tuple[Integers, list[FieldRows]]] = []
        for block in range(start, last + 1):
            rows = np.flatnonzero(slots.numpy() // num_slots == block)
            cut_here = None if cut is None else Cut(cut.starts[rows], cut.lengths[rows])
            leaves = self._memory_of(block).take(slots[rows] - block * num_slots, None, cut_here)
            fetched.append((rows, leaves))
        return merge_in_order(fetched, slots.device)

    def close(self) -> None:
        """Stop the threads. No more rows can be fetched."""
        # The threads have ended, so the memory can be reused.
        self._stream.idle.extend(self._memory.close())
        del self._stream.idle[_NUM_BUFFERS:]

    def _read_next(self, memory: StreamMemory | None) -> None:
        """Start reading the next block, into this memory or into new memory."""
        block = self._block + len(self._memory)
        if block < len(self._blocks):
            memory = memory or StreamMemory(self._stream)
            locate = partial(self._stream.locate_block, self._blocks, self._epoch, block)
            self._memory.begin(memory, partial(memory.reads, locate))
        elif memory is not None:
            self._stream.idle.append(memory)

    def _memory_of(self, block: int) -> StreamMemory:
        """Wait for a block, and return its memory. The memory of earlier blocks is reused."""
        while self._block < block:
            used = self._memory.take()
            self._block += 1
            self._read_next(used)
        return self._memory.first()


def merge_into_runs(located: Located) -> tuple[Integers, Integers]:
    """Merge ranges of items into ascending runs, and return the starts and stops of the runs."""
    lengths = items_per_row(located.sizes)
    by_start = np.argsort(located.starts, kind="stable")
    starts = located.starts[by_start]
    stops = np.maximum.accumulate(starts + lengths[by_start])
    run_starts = np.flatnonzero(np.append(True, starts[1:] > stops[:-1])[: len(starts)])
    return starts[run_starts], stops[np.append(run_starts, len(starts))[1:] - 1]


def locate_block_windows(
    series: SeriesSlots, held: Integers, blocks: Blocks, epoch: int, block: int
) -> Located:
    """Find the time steps of a block of windows, as starts and lengths of runs."""
    windows = series.windows
    pool = blocks.sampler.pool
    num_shards = pool.num_shards
    runs = blocks.sampler.block_runs(epoch, block)
    if runs is None:
        ranks = distinct(pool.file_rows(blocks.pool_indices(epoch, block, held)))
        series_indices = windows.in_series(ranks)[0]
        counts = np.ones_like(ranks)
    elif pool.is_striped:
        bounds = [(run.start * num_shards, run.stop * num_shards) for run in runs]
        series_indices, ranks, counts = windows.runs_between(num_shards, bounds, held.tolist())
    else:
        bounds = [
            (start + run.start, start + min(run.stop, size))
            for start, size in zip(pool.starts[held], pool.sizes[held], strict=True)
            for run in runs
        ]
        series_indices, ranks, counts = windows.runs_between(num_shards, bounds, None)
    lengths = (counts - 1) * windows.stride + windows.length
    return Located(ranks * windows.stride + series.shifts[series_indices], lengths[:, None])


def max_block_items(
    rows: IndexedItems, slot_map: SlotMap, shards: Sequence[int], blocks: Blocks
) -> int:
    """Count the most items that the rows of a block can have, wherever it starts."""

    def lengths_in(shard: int) -> Integers:
        located = map(rows.locate, slot_map.slots_of_shard(shard))
        return np.concatenate([np.zeros(0, np.int64), *(items_per_row(s) for _, s in located)])

    if blocks.has_runs:
        return _max_consecutive_items(
            slot_map.pool.sizes, blocks.max_rows_per_shard, map(lengths_in, shards)
        )
    total = 0
    for shard in shards:
        items = lengths_in(shard)
        most = blocks.sampler.most_in_block(shard, items)
        # A block may consist of any rows, so assume the longest.
        total += int(np.sort(items)[-blocks.max_rows_per_shard :].sum()) if most is None else most
    return total


def _max_consecutive_items(sizes: Integers, block_rows: int, lengths: Iterable[Integers]) -> int:
    """Count the most items of a block of consecutive rows of each shard.

    Args:
        sizes: Rows of each shard.
        block_rows: Rows of each shard in a block.
        lengths: By shard, the items of each row.
    """
    # Blocks start anywhere in the rows that all shards have, and wrap around. Rows that only some
    # shards have may be in any block.
    num_common = int(sizes.min())
    num_extra_items = 0
    totals = np.zeros(num_common, np.int64)
    for shard in lengths:
        totals += shard[:num_common]
        num_extra_items += int(shard[num_common:].sum())
    stops = bounds_of(np.tile(totals, 2))
    block_rows = min(block_rows, num_common)
    blocks = stops[block_rows : block_rows + num_common] - stops[:num_common]
    return int(blocks.max(initial=0)) + num_extra_items


def max_block_time_steps(held: Sequence[int], blocks: Blocks) -> int:
    """Count the most time steps of a block of windows, each step once per shard."""
    pool = blocks.sampler.pool
    windows = pool.rows
    assert isinstance(windows, WindowedRows)
    if not blocks.has_runs:
        return len(held) * blocks.max_rows_per_shard * windows.length
    # A run may start inside of a series.
    num_shared = max(0, windows.length - windows.stride)
    if pool.is_striped:
        bounds = np.arange(0, windows.num_rows, blocks.max_rows_per_shard * pool.num_shards)
        bounds = np.append(bounds, windows.num_rows)
        return int(np.diff(windows.num_covered_steps_before(bounds, True)).max()) + num_shared
    lengths = (
        np.diff(
            windows.num_covered_steps_before(
                pool.starts[shard] + np.arange(pool.sizes[shard] + 1), False
            )
        )
        for shard in held
    )
    num_items = _max_consecutive_items(pool.sizes, blocks.max_rows_per_shard, lengths)
    return num_items + _MAX_RUNS * num_shared * len(held)
