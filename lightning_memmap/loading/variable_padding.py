"""Rows that differ in length, padded to one shape: written once, straight to where they stay."""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.loading.variable_rows import Allocate, VariableRows, fresh_memory
from lightning_memmap.loading.variable_steps import Together
from lightning_memmap.sampling import Integers
from lightning_memmap.store.columns.segments import (
    LONG_BYTES,
    Bytes,
    copy_segments,
    fill_segments,
)

#: Rows that are padded to so many bytes are copied together with what follows them in memory: one
#: call for each step costs less then than dividing rows into blocks does, or a call for each row.
_LEAST_WINDOW_BYTES, _MOST_WINDOW_BYTES = 2**11, 2**15
#: At most this many times the bytes of the rows are copied so.
_MOST_COPIED = 2.5


def padded_step(rows: VariableRows, multiple: int, value: float, allocate: Allocate) -> Tensor:
    """Copy the rows of a step, padded to the longest, together with those of other small steps.

    Args:
        rows: The rows.
        multiple: The sizes that differ become multiples of this.
        value: What the rest is filled with.
        allocate: Gives the memory, where they are on a CPU.

    Returns:
        Of shape (B, *padded sizes, *item shape), on the device of the rows.
    """
    widths = tuple(-(-width // multiple) * multiple for width in rows.widths)
    fetch = rows.fetch
    # Those of several data devices may have the widths of all of them.
    is_alone = fetch is None or fetch.widths[rows.step] != rows.widths
    if fetch is None or is_alone or rows.device.type != "cpu" or _fit_windows(rows, widths):
        return padded(rows, widths, value, allocate)

    def together() -> Together:
        whole, edges = fetch.rows, fetch.edges
        of_steps = -(-np.array(fetch.widths) // multiple) * multiple
        counts = np.diff(edges)

        def make(first: int, end: int) -> Tensor:
            of_rows = np.repeat(of_steps[first:end], counts[first:end], axis=0)
            return _padded_each(whole[edges[first] : edges[end]], of_rows, value, allocate)

        return Together(counts * of_steps.prod(axis=1), whole.field.item_bytes, make)

    values = fetch.made((multiple, value, allocate), together).of_step(rows.step)
    return values.view(len(rows), *widths, *rows.field.item_shape)


def padded(
    rows: VariableRows, widths: tuple[int, ...], value: float, allocate: Allocate = fresh_memory
) -> Tensor:
    """Copy rows, padded to one shape.

    Args:
        rows: The rows.
        widths: The sizes of the result in the dimensions that differ, ``k`` of them.
        value: What the rest is filled with.
        allocate: Gives the memory, where they are on a CPU.

    Returns:
        Of shape (B, *widths, *item shape), on the device of the rows.
    """
    if rows.device.type != "cpu":
        values = _padded_on_device(rows, widths, value)
    elif _fit_windows(rows, widths):
        values = _padded_windows(rows, widths[0], value, allocate)
    else:
        each = np.broadcast_to(np.array(widths, np.int64), rows.sizes.shape)
        values = _padded_each(rows, each, value, allocate)
    return values.view(len(rows), *widths, *rows.field.item_shape)


def _fit_windows(rows: VariableRows, widths: tuple[int, ...]) -> bool:
    """Whether rows are best copied together with what follows them in memory."""
    width = widths[0]
    return (
        len(widths) == 1
        and _LEAST_WINDOW_BYTES <= width * rows.field.item_bytes <= _MOST_WINDOW_BYTES
        and width <= len(rows.items)
        and 0 < len(rows) * width <= _MOST_COPIED * np.add.reduce(rows.sizes[:, 0])
    )


def _padded_windows(rows: VariableRows, width: int, value: float, allocate: Allocate) -> Tensor:
    """Copy rows and what follows them in one call, and overwrite what follows them.

    Args:
        rows: The rows, on a CPU, of which one dimension differs.
        width: The size of the result in this dimension.
        value: What the rest is filled with.
        allocate: Gives the memory.

    Returns:
        Of shape (B, width, *item shape).
    """
    field, items, stride = rows.field, rows.items, rows.items.stride()
    starts, sizes, last = rows.starts, rows.sizes[:, 0], len(items) - width
    memory = allocate(len(rows) * width * field.item_bytes)
    out = memory.view(field.dtype).view(len(rows), width, *field.item_shape)
    windows = items.as_strided((last + 1, *out.shape[1:]), (stride[0], *stride))
    torch.index_select(windows, 0, torch.from_numpy(np.minimum(starts, last)), out=out)
    # Too close to the end of the memory.
    for row in np.flatnonzero(starts > last).tolist():
        start, length = int(starts[row]), int(sizes[row])
        out[row, :length] = items[start : start + length]
    shortest = int(sizes.min())
    # Rows of a mask are pieces of one array too: that costs less than comparing numbers.
    masks = _tails(width).as_strided((width + 1, width - shortest), (1, 1))
    tails = torch.from_numpy(width + shortest - sizes)
    is_padding = masks.index_select(0, tails).numpy()
    is_padding = is_padding.reshape(*is_padding.shape, *[1] * len(field.item_shape))
    # numpy has no bfloat16 and no float8, but integers of their size.
    item = _bytes_of(value, field.dtype)
    number = np.dtype(f"u{len(item)}" if len(item) <= 8 else np.complex128)
    target = memory.numpy().view(number).reshape(out.shape)[:, shortest:]
    np.copyto(target, item.view(number), where=is_padding)
    return out


@lru_cache(maxsize=64)
def _tails(width: int) -> Tensor:
    """What is padding from each item on, if a row ends at item ``width``: (2 * width,), bool."""
    return torch.from_numpy(np.arange(2 * width) >= width)


def _padded_each(rows: VariableRows, widths: Integers, value: float, allocate: Allocate) -> Tensor:
    """Copy rows, each padded to sizes of its own.

    Args:
        rows: The rows, on a CPU.
        widths: The sizes of each in the dimensions that differ, int64 of shape (B, k).
        value: What the rest is filled with.
        allocate: Gives the memory.

    Returns:
        The items of all rows, of shape (items, *item shape).
    """
    field, size = rows.field, rows.field.item_bytes
    starts, places, lengths = _pieces(rows, widths)
    total = int(widths.prod(axis=1).sum())
    memory = allocate(total * size)
    values = memory.view(field.dtype).view(total, *field.item_shape)
    out, item = memory.numpy(), _bytes_of(value, field.dtype)
    # Where pieces are short, filling everything costs less than finding what is between them.
    begins, ends = np.zeros(1, np.int64), np.full(1, total)
    if lengths.sum() * size > LONG_BYTES * len(lengths):
        begins, ends = np.append(0, places + lengths), np.append(places, ends)
    fill_segments(out, begins * size, (ends - begins) * size, item)
    copy_segments(rows.memory, starts * size, out, places * size, lengths * size)
    return values


def _pieces(rows: VariableRows, widths: Integers) -> tuple[Integers, Integers, Integers]:
    """What lies in one piece: a row, or where several dimensions differ, a part along the last one.

    Returns:
        Its first item, its first item among those of the padded rows, and its length in items.
    """
    starts, sizes = rows.starts, rows.sizes
    items = widths.prod(axis=1)
    places = np.cumsum(items) - items
    for dim in range(1, sizes.shape[1]):
        # Each piece becomes as many as it has sizes along the dimension before.
        counts = sizes[:, dim - 1]
        pieces = np.repeat(np.arange(len(counts)), counts)
        numbers = np.arange(len(pieces)) - np.repeat(np.cumsum(counts) - counts, counts)
        sizes, widths = sizes[pieces], widths[pieces]
        starts = starts[pieces] + numbers * sizes[:, dim:].prod(axis=1)
        places = places[pieces] + numbers * widths[:, dim:].prod(axis=1)
    return starts, places, sizes[:, -1]


@lru_cache(maxsize=64)
def _bytes_of(value: float, dtype: torch.dtype) -> Bytes:
    """A number as it lies in memory, uint8 of shape (bytes of the dtype,)."""
    return torch.tensor([value], dtype=dtype).view(torch.uint8).numpy()


def _padded_on_device(rows: VariableRows, widths: tuple[int, ...], value: float) -> Tensor:
    uploaded = rows.on_device(rows.starts, rows.sizes)
    starts, sizes = uploaded[:, 0], uploaded[:, 1:]
    index = starts.view(-1, *(1 for _ in widths))
    is_row = torch.ones((), dtype=torch.bool, device=rows.device)
    strides = sizes.flip(1).cumprod(1).flip(1)
    for dim, width in enumerate(widths):
        ones = [-1 if d == dim else 1 for d in range(len(widths))]
        along = torch.arange(width, device=rows.device).view(1, *ones)
        per_row = [len(rows), *(1 for _ in widths)]
        is_row = is_row & (along < sizes[:, dim].view(per_row))
        step = strides[:, dim + 1].view(per_row) if dim + 1 < len(widths) else 1
        index = index + along * step
    if not len(rows.items):
        shape = (*is_row.shape, *rows.field.item_shape)
        return torch.full(shape, value, dtype=rows.field.dtype, device=rows.device)
    index = index.where(is_row, 0).flatten()
    items = rows.items.index_select(0, index)
    is_padding = ~is_row.flatten().view(-1, *(1 for _ in rows.field.item_shape))
    return items.masked_fill_(is_padding, value)
