"""A stream: threads read the next block of the files while rows of this one are fetched.

Items that follow one another in the files do so in memory: rows of one shape and steps of series,
which are told by their slots, and the items of rows that differ in length. With windows over
series, the fields that have one value for each series are read in the file mapping.
"""

import math
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_memmap.loading.ahead import Ahead
from lightning_memmap.loading.buffers import Buffers, byte_pool
from lightning_memmap.loading.memory import (
    Columns,
    Find,
    Places,
    Ragged,
    SeriesPlaces,
    in_place,
)
from lightning_memmap.loading.row_file import Read, RowFile, aligned_memory, reads_of
from lightning_memmap.loading.row_source import Leaf, RowSource, Take, in_order
from lightning_memmap.sampling.rows import Integers, Runs, WindowedRows, distinct, ranges, starts_of
from lightning_memmap.sampling.sampler import Sampler
from lightning_memmap.sampling.schedule import Blocks
from lightning_memmap.schema.fields import Field
from lightning_memmap.store.open_columns import ItemRows, Located, OpenColumn
from lightning_memmap.store.series import windows_over

#: Windows in memory: rows are fetched from one while the other is read.
_NUM_BUFFERS = 2
#: While one thread copies what it has read, or waits for a short read, others read on.
_NUM_THREADS = 4
#: What is kept for each row of a block beside the row, and taken while it is looked up, in bytes.
LOOKUP_BYTES = 56
#: Runs of a shard in a block at most: a block may wrap around, and some shards have a row more.
_MAX_RUNS = 3


class BlockItems:
    """Memory for the items that a block has of some files, at the same places in each of them."""

    def __init__(self, name: str, max_items: int) -> None:
        self._name, self._max_items = name, max_items
        self._files: list[RowFile | None] = []
        #: By file, the items; undefined before they are read.
        self.memory: list[Tensor] = []
        #: Where the items of the block are.
        self.runs = Runs(*np.zeros((2, 1), np.int64))

    def add(self, file: RowFile | None, item_shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for the items of one more file, which a disk can write to."""
        num_bytes = self._max_items * math.prod(item_shape) * dtype.itemsize
        flat = torch.frombuffer(aligned_memory(max(1, num_bytes)), dtype=torch.uint8)[:num_bytes]
        self._files.append(file)
        self.memory.append(flat.view(dtype).view(self._max_items, *item_shape))
        return self.memory[-1]

    def reads(self, found: Located) -> Iterator[Read]:
        """The reads that bring the items of a block to their places."""
        begins, ends = runs_of(found)
        lengths = ends - begins
        if (count := int(lengths.sum())) > self._max_items:
            raise ValueError(
                f"residency='stream': a block has {count} items of field {self._name!r}, and"
                f" blocks of rows that follow one another have {self._max_items} at most: let"
                " block_runs of the sampler return such rows"
            )
        self.runs = Runs(begins, starts_of(lengths) - begins)
        for file, items in zip(self._files, self.memory, strict=True):
            if file is not None and items.numel():
                yield from reads_of(file, self.runs, ends, items.view(-1).view(torch.uint8))

    def places(self, slots: Tensor) -> Tensor:
        """Where items are in memory, by their places in the files."""
        return torch.from_numpy(self.runs.at(slots.numpy()))

    def among(self, rows: ItemRows, slots: Integers) -> tuple[Tensor, Located]:
        """The items of all rows, and where those of some are."""
        starts, sizes = rows.at(slots)
        return self.memory[0], Located(self.runs.at(starts), sizes)


class StreamMemory:
    """The memory of a block, on the CPU, with undefined content."""

    def __init__(self, stream: "Stream") -> None:
        series = stream.series
        #: Rows of one shape, or steps.
        self.items = BlockItems(stream.columns[0][0].name, stream.most_items)
        #: The items of each field whose rows differ in length.
        self.ragged = list[tuple[ItemRows, BlockItems]]()
        columns, finds = list[Tensor | Ragged](), list[Find | None]()
        pairs = zip(stream.columns, stream.files, strict=True)
        for index, ((field, rows), file) in enumerate(pairs):
            find: Find | None = self.items.places
            if series is None and isinstance(rows, ItemRows):
                items = BlockItems(field.name, stream.most_ragged[index])
                items.add(file, field.item_shape, field.dtype)
                self.ragged.append((rows, items))
                # The memory will be read over.
                columns.append(Ragged(field, partial(items.among, rows), byte_pool()))
                find = None
            elif series is None:
                columns.append(self.items.add(file, field.item_shape, field.dtype))
            elif field.name in series.line.fields:
                step_shape = field.windowed(1).item_shape[1:]
                steps = self.items.add(file, step_shape, field.dtype)
                columns.append(windows_over(steps, series.line.length))
            else:
                columns.append(in_place(rows))
                find = series.rows_of
            finds.append(find)
        self._columns = Columns(columns, torch.device("cpu"), finds)
        self.take = self._columns.take

    def reads(self, located: Callable[[], Located]) -> Iterator[Read]:
        """The reads that fill a block, which several threads may do at once."""
        yield from self.items.reads(found := located())
        if self.ragged:
            begins, ends = runs_of(found)
            slots = ranges(begins, ends - begins)
            for rows, items in self.ragged:
                yield from items.reads(rows.at(slots))


class Stream(RowSource):
    """Rows of some shards that stay in the files, and are read block by block."""

    device = torch.device("cpu")

    def __init__(
        self,
        columns: Sequence[tuple[Field, OpenColumn]],
        files: Sequence[RowFile | None],
        places: Places,
        num_slots: int,
        *,
        held: Sequence[int],
        blocks: Blocks,
        series: SeriesPlaces | None = None,
    ) -> None:
        self.num_slots, self._places, self.columns = num_slots, places, columns
        self._pool, self._held = blocks.sampler.pool, np.array(held, np.int64)
        self.files, self.series, self._block = files, series, blocks.rows
        #: How many rows of one shape, or steps, a block has at most.
        self.most_items = len(held) * blocks.longest
        if series is not None:
            self.most_items = largest_block_steps(held, blocks)
        #: The same of the items of rows that differ in length, by the places of their fields.
        self.most_ragged = {
            index: largest_block(rows, places, held, blocks)
            for index, (_, rows) in enumerate(columns)
            if series is None and isinstance(rows, ItemRows)
        }
        #: Memory for blocks that nobody uses.
        self.idle: list[StreamMemory] = []
        self._epochs: weakref.WeakSet[_StreamedEpoch] = weakref.WeakSet()

    @override
    def locate(self, sampler: Sampler, epoch: int, positions: range) -> Integers:
        found = self._places.locate(sampler, epoch, positions)
        # As if all blocks were consecutive in memory.
        size = self._blocks(sampler).positions
        for number in range(positions.start // size, -(-positions.stop // size)):
            first, last = (bisect_left(positions, size * edge) for edge in (number, number + 1))
            found[first:last] += number * self.num_slots
        return found

    def _blocks(self, sampler: Sampler) -> Blocks:
        """The blocks of an order."""
        # Any will do in order. While a store is built, it is not known how many are read at once.
        return Blocks(sampler.in_blocks(self._block) if sampler.is_sequential else sampler)

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

    def located(self, blocks: Blocks, epoch: int, number: int) -> Located:
        """The items of a block in the files: the first of each run, and their number."""
        if self.series is not None:
            return located_steps(self.series, self._held, blocks, epoch, number)
        starts, sizes = self._places.starts, self._pool.sizes[self._held]
        runs = blocks.sampler.block_runs(epoch, number)
        if starts is not None and runs is not None:
            begins = np.array([run.start for run in runs])
            ends = np.minimum(np.array([run.stop for run in runs]), sizes[:, None])
            counts = np.maximum(0, ends - begins).ravel()
            firsts = (starts[self._held, None] + begins).ravel()
            return Located(firsts[counts > 0], counts[counts > 0, None])
        rows = distinct(self._places.of(blocks.index(epoch, number, self._held)))
        return Located(rows, np.ones((len(rows), 1), np.int64))


class _StreamedEpoch:
    """Rows of the blocks of one epoch, in the order in which they come."""

    def __init__(self, stream: Stream, blocks: Blocks, epoch: int, position: int) -> None:
        self._stream, self._blocks, self._epoch = stream, blocks, epoch
        #: The block whose rows are fetched. Its memory is the first one.
        self._number = position // blocks.positions
        self._memory = Ahead[StreamMemory]("lightning_memmap block-reader", _NUM_THREADS)
        for _ in range(_NUM_BUFFERS):
            self._read(stream.idle.pop() if stream.idle else None)

    def take(self, slots: Tensor, out: Buffers | None) -> list[Leaf]:
        """Copy rows into a batch: some after those before, in the order of the blocks."""
        size = self._stream.num_slots
        first, last = (int(edge) // size for edge in slots.aminmax())
        assert first >= self._number, "blocks come in their order"
        if first == last:
            return self._block_of(first).take(slots - first * size, out)
        # From one block into the next.
        parts = list[tuple[Integers, list[Leaf]]]()
        for number in range(first, last + 1):
            here = np.flatnonzero(slots.numpy() // size == number)
            parts.append((here, self._block_of(number).take(slots[here] - number * size)))
        return in_order(parts, slots.device)

    def close(self) -> None:
        """End the threads. No row can be fetched any more."""
        # Nobody writes there any more.
        self._stream.idle.extend(self._memory.close())
        del self._stream.idle[_NUM_BUFFERS:]

    def _read(self, memory: StreamMemory | None) -> None:
        """Begin to read the next block that is not read yet."""
        number = self._number + len(self._memory)
        if number < len(self._blocks):
            memory = memory or StreamMemory(self._stream)
            located = partial(self._stream.located, self._blocks, self._epoch, number)
            self._memory.begin(memory, partial(memory.reads, located))
        elif memory is not None:
            self._stream.idle.append(memory)

    def _block_of(self, number: int) -> StreamMemory:
        """The memory of a block, once it is read. That of earlier blocks is used again."""
        while self._number < number:
            used = self._memory.take()
            self._number += 1
            self._read(used)
        return self._memory.first()


def runs_of(found: Located) -> tuple[Integers, Integers]:
    """The first item of each run, and one past its last one, ascending."""
    lengths = found.sizes.prod(axis=1)
    order = np.argsort(found.starts, kind="stable")
    begins = found.starts[order]
    ends = np.maximum.accumulate(begins + lengths[order])
    firsts = np.flatnonzero(np.append(True, begins[1:] > ends[:-1])[: len(begins)])
    return begins[firsts], ends[np.append(firsts, len(order))[1:] - 1]


def located_steps(
    series: SeriesPlaces, held: Integers, blocks: Blocks, epoch: int, number: int
) -> Located:
    """The steps of a block of the epoch: the first of each run, and their number."""
    line, pool = series.line, blocks.sampler.pool
    runs, num_shards = blocks.sampler.block_runs(epoch, number), pool.num_shards
    if runs is not None:
        if pool.is_striped:
            edges = [(run.start * num_shards, run.stop * num_shards) for run in runs]
            found = line.runs_between(num_shards, edges, held.tolist())
        else:
            sizes = zip(pool.starts[held], pool.sizes[held], strict=True)
            edges = [
                (start + run.start, start + min(run.stop, size))
                for start, size in sizes
                for run in runs
            ]
            found = line.runs_between(num_shards, edges, None)
        numbers, firsts, counts = found
    else:
        firsts = distinct(pool.file_rows(blocks.index(epoch, number, held)))
        numbers, counts = line.in_series(firsts)[0], np.ones_like(firsts)
    lengths = (counts - 1) * line.stride + line.length
    return Located(firsts * line.stride + series.shifts[numbers], lengths[:, None])


def largest_block(rows: ItemRows, places: Places, shards: Sequence[int], blocks: Blocks) -> int:
    """How many items the rows of a block have at most, wherever it begins."""
    block, lengths = blocks.longest, (_lengths(rows, places, shard) for shard in shards)
    if not blocks.has_runs:
        # Whichever rows they are.
        return sum(int(np.sort(each)[-block:].sum()) for each in lengths)
    return most_items(places.pool.sizes, block, lengths)


def _lengths(rows: ItemRows, places: Places, shard: int) -> Integers:
    """The items of each row of a shard."""
    found = [rows.at(slots).sizes.prod(axis=1) for slots in places.of_shard(shard)]
    return np.concatenate([np.zeros(0, np.int64), *found])


def most_items(sizes: Integers, block: int, lengths: Iterable[Integers]) -> int:
    """How many items blocks have at most, by the items of each row, shard after shard."""
    # The circle has the rows that all shards have. Some have one more.
    circle, extra = int(sizes.min()), 0
    totals = np.zeros(circle, np.int64)
    for each in lengths:
        totals += each[:circle]
        extra += int(each[circle:].sum())
    ends = np.append(0, np.cumsum(np.tile(totals, 2)))
    block = min(block, circle)
    return int((ends[block : block + circle] - ends[:circle]).max(initial=0)) + extra


def largest_block_steps(held: Sequence[int], blocks: Blocks) -> int:
    """How many steps a block of the epoch has at most, each counted once for each shard."""
    block, pool = blocks.longest, blocks.sampler.pool
    line = pool.rows
    assert isinstance(line, WindowedRows)
    if not blocks.has_runs:
        return len(held) * block * line.length
    # A run that begins inside of a series.
    shared = max(0, line.length - line.stride)
    if pool.is_striped:
        size = block * pool.num_shards
        edges = np.append(np.arange(0, line.num_rows, size), line.num_rows)
        return int(np.diff(line.num_steps_before(edges, True)).max()) + shared
    lengths = (
        np.diff(line.num_steps_before(pool.starts[shard] + np.arange(pool.sizes[shard] + 1), False))
        for shard in held
    )
    return most_items(pool.sizes, block, lengths) + _MAX_RUNS * shared * len(held)
