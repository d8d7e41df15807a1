"""Rows that differ in length on their way into a batch.

They are not copied before the form of the batch is known: until then they are places in memory. So
padded rows are written once, straight to where they stay, and only bare rows cross a link.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.loading.device_streams import has_streams, send
from lightning_memmap.sampling import Integers
from lightning_memmap.schema import Field
from lightning_memmap.store.columns.segments import (
    Bytes,
    copy_segments,
    fill_segments,
    pack_segments,
)
from lightning_memmap.store.columns.variable import ItemRows, pack_rows

#: Rows that are padded to more than this are copied one by one.
_WINDOW_BYTES = 2**15
#: At most this many times the bytes of the rows are copied to spare calls.
_MOST_PADDED = 2.5
#: Gives memory on the CPU for a number of bytes, uint8 of shape (bytes,).
Allocate = Callable[[int], Tensor]


def fresh_memory(num_bytes: int) -> Tensor:
    """New memory on the CPU.

    Args:
        num_bytes: Its size.

    Returns:
        uint8 of shape (num_bytes,), with undefined content.
    """
    return torch.empty(num_bytes, dtype=torch.uint8)


@dataclass(frozen=True, eq=False)
class VariableRows:
    """Rows of a field that differ in length, where they lie.

    It has the methods of a tensor with a row along its first dimension that a loader needs.

    Args:
        field: The field.
        items: Memory with the items of these rows, and perhaps of others, of shape (items, *item
            shape).
        starts: The first item of each row, int64 of shape (B,).
        sizes: Its sizes in the ``k`` dimensions that differ, int64 of shape (B, k).
        widths: The largest sizes among all rows of the step, over all data devices of the process.
    """

    field: Field
    items: Tensor
    starts: Integers
    sizes: Integers
    widths: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        """Where the rows lie."""
        return self.items.device

    @property
    def is_meta(self) -> bool:
        """Whether the rows have no values; they always have."""
        return False

    @property
    def lengths(self) -> Integers:
        """Items of each row, int64 of shape (B,)."""
        if self.sizes.shape[1] == 1:
            return self.sizes[:, 0]
        lengths: Integers = self.sizes.prod(axis=1)
        return lengths

    @property
    def _bytes(self) -> Bytes:
        """The memory of the items, uint8 of shape (bytes,)."""
        return self.items.view(-1).view(torch.uint8).numpy()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, rows: slice | Integers) -> "VariableRows":
        return VariableRows(
            self.field, self.items, self.starts[rows], self.sizes[rows], self.widths
        )

    def copied(self, allocate: Allocate = fresh_memory) -> "VariableRows":
        """The rows in memory of their own, one after the other.

        Args:
            allocate: Gives the memory, where they are on a CPU.
        """
        lengths, items = self.lengths, self.packed(allocate)
        starts = np.cumsum(lengths) - lengths
        return VariableRows(self.field, items, starts, self.sizes, self.widths)

    def of_widths(self, widths: tuple[int, ...]) -> "VariableRows":
        """These rows, as some of a step.

        Args:
            widths: The largest sizes among all rows of the step.
        """
        return VariableRows(self.field, self.items, self.starts, self.sizes, widths)

    def contiguous(self) -> "VariableRows":
        """These rows: they are copied later."""
        return self

    def index_select(self, dim: int, order: Tensor) -> "VariableRows":
        """The rows in another order.

        Args:
            dim: 0, the rows.
            order: Which rows, int64 of any length.
        """
        return self[order.cpu().numpy()]

    def split_with_sizes(self, sizes: Sequence[int]) -> "list[VariableRows]":
        """Divide the rows. The widths are those of each part.

        Args:
            sizes: Rows of each part.
        """
        counts = np.array(sizes, np.int64)
        ends = np.cumsum(counts)
        firsts = ends - counts
        # One more row, for parts without any at the end.
        rows = np.append(self.sizes, np.zeros((1, self.sizes.shape[1]), np.int64), axis=0)
        widths = np.maximum.reduceat(rows, firsts, axis=0)
        widths[counts == 0] = 0
        return [
            VariableRows(
                self.field, self.items, self.starts[first:end], self.sizes[first:end], tuple(width)
            )
            for first, end, width in zip(
                firsts.tolist(), ends.tolist(), widths.tolist(), strict=True
            )
        ]

    def to(self, device: torch.device) -> "VariableRows":
        """The rows on another device: packed where they lie, and then copied. Text stays here.

        Args:
            device: Where they go.
        """
        if self.device == device or self.field.is_text:
            return self
        pin = self.device.type == "cpu" and has_streams(device)
        rows = self.copied(_page_locked_memory if pin else fresh_memory)
        return replace(rows, items=send(rows.items, device))

    def packed(self, allocate: Allocate = fresh_memory) -> Tensor:
        """Copy the rows, one after the other.

        Args:
            allocate: Gives the memory, where they are on a CPU.

        Returns:
            The items of all rows, of shape (items, *item shape), on their device.
        """
        lengths = self.lengths
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        if self.device.type != "cpu":
            starts, counts = self._on_device(self.starts - ends + lengths, lengths).unbind(1)
            shifts = starts.repeat_interleave(counts, output_size=total)
            return self.items.index_select(0, shifts + torch.arange(total, device=self.device))
        size = self.field.item_bytes
        memory = allocate(total * size)
        pack_segments(self._bytes, self.starts * size, memory.numpy(), lengths * size)
        return memory.view(self.field.dtype).view(total, *self.field.item_shape)

    def padded(
        self, widths: tuple[int, ...], value: float, allocate: Allocate = fresh_memory
    ) -> Tensor:
        """Copy the rows, padded to one shape.

        Args:
            widths: The sizes of the result in the dimensions that differ, ``k`` of them.
            value: What the rest is filled with.
            allocate: Gives the memory, where they are on a CPU.

        Returns:
            Of shape (B, *widths, *item shape), on the device of the rows.
        """
        shape = (len(self), *widths, *self.field.item_shape)
        if self.device.type != "cpu":
            return self._padded_on_device(widths, value).view(shape)
        size = self.field.item_bytes
        memory = allocate(math.prod(shape) * self.field.dtype.itemsize)
        out = memory.view(self.field.dtype).view(shape)
        item = _bytes_of(value, self.field.dtype)
        if self._are_short(widths):
            self._copy_windows(out)
            self._mask(memory.numpy(), shape, item)
            return out
        # What lies in one piece: a row, or where several dimensions differ, a part along the last.
        starts, places, lengths = self._runs(widths)
        copy_segments(self._bytes, starts * size, memory.numpy(), places * size, lengths * size)
        # From the end of each piece to the start of the next one.
        ends = np.append(0, places + lengths) * size
        gaps = np.append(places * size, memory.numel()) - ends
        fill_segments(memory.numpy(), ends, gaps, item)
        return out

    def _are_short(self, widths: tuple[int, ...]) -> bool:
        """Whether padded rows can be copied together with what follows them in memory."""
        width = widths[0]
        return (
            len(widths) == 1
            and 0 < width <= self.items.shape[0]
            and width * self.field.item_bytes <= _WINDOW_BYTES
            and len(self) * width <= _MOST_PADDED * self.sizes.sum()
        )

    def _copy_windows(self, out: Tensor) -> None:
        """Copy rows and what follows them in memory, in one call.

        Args:
            out: The padded rows.
        """
        starts, stride = self.starts, self.items.stride()
        last = self.items.shape[0] - out.shape[1]
        windows = self.items.as_strided((last + 1, *out.shape[1:]), (stride[0], *stride))
        is_late = starts > last
        if not is_late.any():
            torch.index_select(windows, 0, torch.from_numpy(starts), out=out)
            return
        torch.index_select(windows, 0, torch.from_numpy(np.minimum(starts, last)), out=out)
        # Too close to the end of the memory.
        for row in np.flatnonzero(is_late).tolist():
            start, length = int(starts[row]), int(self.sizes[row, 0])
            out[row, :length] = self.items[start : start + length]

    def _mask(self, memory: Bytes, shape: tuple[int, ...], item: Bytes) -> None:
        """Overwrite what is behind the rows.

        Args:
            memory: The padded rows, of shape (bytes,).
            shape: Their shape.
            item: The bytes of what they are padded with.
        """
        width, lengths = shape[1], self.sizes[:, 0]
        shortest = int(lengths.min())
        if shortest == width:
            return
        # Rows of a mask are pieces of one array too: that costs less than comparing numbers.
        tails = torch.from_numpy(np.arange(2 * width) >= width)
        masks = tails.as_strided((width + 1, width - shortest), (1, 1))
        is_padding = masks.index_select(0, torch.from_numpy(width + shortest - lengths)).numpy()
        if len(shape) > 2:
            is_padding = is_padding.reshape(*is_padding.shape, *[1] * (len(shape) - 2))
        # numpy has no bfloat16 and no float8, but integers of their size.
        number = np.dtype(f"u{len(item)}" if len(item) <= 8 else np.complex128)
        padded = memory.view(number).reshape(shape)
        np.copyto(padded[:, shortest:], item.view(number), where=is_padding)

    def _runs(self, widths: tuple[int, ...]) -> tuple[Integers, Integers, Integers]:
        """Pieces without gaps: first item, first item in the padded rows, and length in items."""
        starts, sizes = self.starts, self.sizes
        places = np.arange(len(self), dtype=np.int64) * int(np.prod(widths))
        for dim in range(1, len(widths)):
            # Each piece becomes as many as it has sizes along the dimension before.
            counts = sizes[:, dim - 1]
            pieces = np.repeat(np.arange(len(counts)), counts)
            numbers = np.arange(len(pieces)) - np.repeat(np.cumsum(counts) - counts, counts)
            sizes = sizes[pieces]
            starts = starts[pieces] + numbers * sizes[:, dim:].prod(axis=1)
            places = places[pieces] + numbers * int(np.prod(widths[dim:]))
        return starts, places, sizes[:, -1]

    def _padded_on_device(self, widths: tuple[int, ...], value: float) -> Tensor:
        uploaded = self._on_device(self.starts, self.sizes)
        starts, sizes = uploaded[:, 0], uploaded[:, 1:]
        index = starts.view(-1, *(1 for _ in widths))
        is_row = torch.ones((), dtype=torch.bool, device=self.device)
        strides = sizes.flip(1).cumprod(1).flip(1)
        for dim, width in enumerate(widths):
            ones = [-1 if d == dim else 1 for d in range(len(widths))]
            along = torch.arange(width, device=self.device).view(1, *ones)
            per_row = [len(self), *(1 for _ in widths)]
            is_row = is_row & (along < sizes[:, dim].view(per_row))
            step = strides[:, dim + 1].view(per_row) if dim + 1 < len(widths) else 1
            index = index + along * step
        if not len(self.items):
            shape = (*is_row.shape, *self.field.item_shape)
            return torch.full(shape, value, dtype=self.field.dtype, device=self.device)
        index = index.where(is_row, 0).flatten()
        items = self.items.index_select(0, index)
        is_padding = ~is_row.flatten().view(-1, *(1 for _ in self.field.item_shape))
        return items.masked_fill_(is_padding, value)

    def _on_device(self, *numbers: Integers) -> Tensor:
        """Upload arrays that have an entry for each row, side by side and in one copy."""
        return send(torch.from_numpy(np.column_stack(numbers)), self.device)


@lru_cache(maxsize=64)
def _bytes_of(value: float, dtype: torch.dtype) -> Bytes:
    """A number as it lies in memory, uint8 of shape (bytes of the dtype,)."""
    return torch.tensor([value], dtype=dtype).view(torch.uint8).numpy()


def _page_locked_memory(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def send_rows(leaf: Tensor | VariableRows, device: torch.device) -> Tensor | VariableRows:
    """Rows on a device: `device_streams.send` for both kinds.

    Args:
        leaf: The rows.
        device: Where they go. Text stays on the CPU.
    """
    return leaf.to(device) if isinstance(leaf, VariableRows) else send(leaf, device)


def joined_rows(parts: Sequence[Tensor | VariableRows]) -> Tensor | VariableRows:
    """Rows of one field from several places, one part after the other.

    Args:
        parts: The rows of each place, all on one device.
    """
    variable = [part for part in parts if isinstance(part, VariableRows)]
    if not variable:
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    lengths = np.concatenate([part.lengths for part in variable])
    return VariableRows(
        variable[0].field,
        torch.cat([part.packed() for part in variable]),
        np.cumsum(lengths) - lengths,
        np.concatenate([part.sizes for part in variable]),
        widths_of(variable),
    )


def share_widths(leaves: Sequence[list[Tensor | VariableRows]]) -> None:
    """Let the rows of all data devices in one step have the same widths.

    Args:
        leaves: One list for each data device, with one entry per field; they are replaced there.
    """
    for index, first in enumerate(leaves[0]):
        if isinstance(first, VariableRows):
            parts = [rows for each in leaves if isinstance(rows := each[index], VariableRows)]
            widths = widths_of(parts)
            for each, rows in zip(leaves, parts, strict=True):
                each[index] = rows.of_widths(widths)


def widths_of(parts: Sequence[VariableRows]) -> tuple[int, ...]:
    """The largest sizes among rows.

    Args:
        parts: Rows of one field, at least one.

    Returns:
        The largest size in each dimension that differs.
    """
    return largest(np.concatenate([part.sizes for part in parts]))


def largest(sizes: Integers) -> tuple[int, ...]:
    """The largest sizes in the dimensions that differ.

    Args:
        sizes: Those of each row, int64 of shape (B, k).
    """
    return tuple(sizes.max(axis=0, initial=0).tolist())


def rows_in_memory(field: Field, rows: Sequence[Tensor]) -> VariableRows:
    """Rows of a field that were not read from a store.

    Args:
        field: The field.
        rows: Tensors of its dtype and of shapes that it admits, on one device, at least one.
    """
    items, sizes = pack_rows(field, rows)
    lengths = sizes.prod(axis=1)
    return VariableRows(field, items, np.cumsum(lengths) - lengths, sizes, largest(sizes))


def located_rows(rows: ItemRows, locations: Integers) -> VariableRows:
    """Rows of a store, or of a part of one that was copied.

    Args:
        rows: The memory that they lie in.
        locations: Where, int64 of shape (B,).

    Raises:
        IndexError: There is no such place.
        StoreError: The index of the store is damaged.
    """
    starts, sizes = rows.at(locations)
    return VariableRows(rows.field, rows.items, starts, sizes, largest(sizes))
