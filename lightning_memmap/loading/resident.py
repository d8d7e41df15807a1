"""Resident rows: copied to a device or to memory of the host, or in the file mapping."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_memmap.loading.buffers import Buffers, copy_rows
from lightning_memmap.loading.device_streams import has_streams, send
from lightning_memmap.loading.row_source import Leaf, RandomAccessRows, fixed_fields
from lightning_memmap.loading.store_offsets import StoreOffsets
from lightning_memmap.loading.upload import Uploader
from lightning_memmap.loading.variable_rows import located_rows
from lightning_memmap.sampling import Integers, Sampler
from lightning_memmap.store.columns import ItemRows, OpenColumn, packed_index

#: Rows that lie apart whose offsets are computed at once.
_READ_ROWS = 2**16


class ResidentRows(RandomAccessRows):
    """Rows of some shards in one place in memory.

    Args:
        columns: For each field a tensor of shape (rows here, *field shape), or its rows where they
            differ in length. All have their rows in the same order.
        device: Where they are. Text is on the CPU even so.
        starts: Where each shard of the split starts in the tensors, int64 of shape (C,), -1 for
            shards of other sources. Or, where the tensors are the files of a store that is divided
            into other shards, where the rows lie in them.
    """

    def __init__(
        self,
        columns: Sequence[Tensor | ItemRows],
        device: torch.device,
        starts: Integers | StoreOffsets,
    ) -> None:
        self.device = device
        self.fields = [
            (column.field.shape, column.field.dtype)
            if isinstance(column, ItemRows)
            else (tuple(column.shape[1:]), column.dtype)
            for column in columns
        ]
        self._starts = starts
        #: The rows of the fields whose rows have one shape; nothing once they are released.
        self.memory = Buffers.of([column for column in columns if isinstance(column, Tensor)])
        self.row_bytes = self.memory.row_bytes
        #: The others, by their place among the fields.
        self.variable = {
            index: column for index, column in enumerate(columns) if isinstance(column, ItemRows)
        }

    @property
    def has_variable(self) -> bool:
        """Whether the rows of a field differ in length."""
        return bool(self.variable)

    @override
    def release(self) -> None:
        super().release()
        self.memory = Buffers([], [])
        self.variable = {}

    @override
    def locate(self, sampler: Sampler, epoch: int, positions: range) -> Integers:
        if isinstance(self._starts, StoreOffsets):
            return self._starts.locate(sampler, epoch, positions)
        return sampler.row_offsets(epoch, positions, self._starts)

    @override
    def fetch(
        self, locations: Tensor, out: Buffers | None = None, *, pin_memory: bool = False
    ) -> list[Leaf]:
        leaves: list[Leaf]
        if self.device.type != "cpu":
            here = send(locations, self.device)
            leaves = [tensor.index_select(0, here) for tensor in self.memory.tensors]
        else:
            if out is None:
                fields = fixed_fields(self.fields)
                out = Buffers.empty(fields, len(locations), pin_memory=pin_memory)
            copy_rows(self.memory, locations, out)
            leaves = [*out.tensors]
        for index, rows in self.variable.items():
            leaves.insert(index, located_rows(rows, locations.numpy()))
        return leaves


def mapped_rows(mapped: Sequence[OpenColumn], offsets: StoreOffsets) -> ResidentRows:
    """The rows in the file mapping of a store. Nothing is read yet."""
    columns = [mapped_tensor(column) for column in mapped]
    starts = offsets if offsets.starts is None else offsets.starts
    return ResidentRows(columns, torch.device("cpu"), starts)


def mapped_tensor(column: OpenColumn) -> Tensor | ItemRows:
    """The rows of an open column as sources have them."""
    return column if isinstance(column, ItemRows) else column.tensor.as_subclass(Tensor)


def copied_rows(
    mapped: Sequence[OpenColumn],
    offsets: StoreOffsets,
    shards: list[int],
    device: torch.device,
) -> ResidentRows:
    """Rows of a store that are copied to a device, in long reads, each shard once."""
    rows = offsets.pool.sizes[shards]
    starts = np.full(offsets.pool.num_shards, -1, np.int64)
    starts[shards] = np.cumsum(rows) - rows
    total = int(rows.sum())
    columns = list[Tensor | ItemRows]()
    with ExitStack() as stack:
        # From a file mapping, which is not page-locked, a device would copy through the driver's
        # own small buffers, and not begin before the pages are read.
        uploader = stack.enter_context(Uploader(device)) if has_streams(device) else None
        for column in mapped:
            stored = mapped_tensor(column)
            if isinstance(stored, ItemRows):
                place = torch.device("cpu") if stored.field.is_text else device
                columns.append(_copied_items(stored, offsets, shards, place, uploader))
                continue
            shape = (total, *stored.shape[1:])
            target = torch.empty(shape, dtype=stored.dtype, device=device)
            for shard, count in zip(shards, rows.tolist(), strict=True):
                shard_rows = target[starts[shard] : starts[shard] + count]
                read = _shard_reader(stored, offsets, shard)
                if uploader is None:
                    read(0, shard_rows)
                else:
                    uploader.copy(shard_rows, read)
            columns.append(target)
    return ResidentRows(columns, device, starts)


def _copied_items(
    stored: ItemRows,
    offsets: StoreOffsets,
    shards: list[int],
    device: torch.device,
    uploader: Uploader | None,
) -> ItemRows:
    """Copy rows that differ in length: the items of all shards, one after the other."""
    sizes = offsets.pool.sizes
    pieces = [
        located_rows(stored, offsets.of(np.full(count, shard), np.arange(first, first + count)))
        for shard in shards
        for first in range(0, int(sizes[shard]), _READ_ROWS)
        for count in [min(_READ_ROWS, int(sizes[shard]) - first)]
    ]
    index = packed_index(np.concatenate([piece.sizes for piece in pieces]))
    shape = (int(index[-1, 0]), *stored.field.item_shape)
    items = torch.empty(shape, dtype=stored.field.dtype, device=device)
    place = 0
    for piece in pieces:
        count, begin = int(piece.lengths.sum()), int(piece.starts[0])
        is_one_run = offsets.starts is not None
        source = stored.items[begin : begin + count] if is_one_run else piece.packed()
        target = items[place : place + count]
        if uploader is None or device.type == "cpu":
            target.copy_(source)
        else:
            uploader.copy(target, partial(read_slice, source))
        place += count
    return ItemRows(stored.field, stored.shards, items, index)


def read_slice(source: Tensor, first: int, out: Tensor) -> None:
    """Fill a tensor with consecutive rows."""
    out.copy_(source[first : first + len(out)])


def _shard_reader(
    mapped: Tensor, offsets: StoreOffsets, shard: int
) -> Callable[[int, Tensor], None]:
    """A function that fills a CPU tensor with the rows of a shard, from a given row on."""
    if offsets.starts is not None:
        return partial(read_slice, mapped[int(offsets.starts[shard]) :])

    def read_apart(first: int, out: Tensor) -> None:
        # The rows of a re-striped shard and of an index view lie apart.
        for begin in range(0, len(out), _READ_ROWS):
            piece = out[begin : begin + _READ_ROWS]
            rows = np.arange(len(piece), dtype=np.int64) + (first + begin)
            found = offsets.of(np.full_like(rows, shard), rows)
            if piece.device.type == "cpu":
                torch.index_select(mapped, 0, torch.from_numpy(found), out=piece)
            else:
                piece.copy_(mapped.index_select(0, torch.from_numpy(found)))

    return read_apart
