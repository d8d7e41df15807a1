"""Rows that differ in length, padded to one shape: written once, straight to where they stay."""

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_memmap.host_memory import available_bytes
from lightning_memmap.loading.variable_rows import Allocate, Together, VariableRows, fresh_memory
from lightning_memmap.sampling import Integers
from lightning_memmap.store.segments import copy_segments

#: Where rows have more bytes than this on average, filling what is behind each of them costs less
#: than filling everything.
_LONG_BYTES = 2**14
#: From here on the memory of the machine is looked at before a step is allocated.
_MANY_BYTES = 2**33


def padded_step(rows: VariableRows, multiple: int, value: float, allocate: Allocate) -> Tensor:
    """Copy the rows of a step, padded to the longest, together with those of other small steps."""
    widths = tuple(-(-width // multiple) * multiple for width in rows.widths)
    num_bytes = len(rows) * math.prod(widths) * rows.field.item_bytes
    if num_bytes > _MANY_BYTES and num_bytes > available_bytes():
        raise ValueError(
            f"variable: {len(rows)} rows of field {rows.field.name!r}, padded to {widths}, have"
            f" {num_bytes} bytes, more than this machine has free: give Pad a smaller multiple than"
            f" {multiple}, or use smaller batches"
        )
    fetch = rows.fetch
    # Those of several data devices may have the widths of all of them.
    is_alone = fetch is None or fetch.widths[rows.step] != rows.widths
    if fetch is None or is_alone or rows.device.type != "cpu":
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
    """Copy rows, padded to one shape."""
    if rows.device.type != "cpu":
        values = _padded_on_device(rows, widths, value)
    else:
        each = np.broadcast_to(np.array(widths, np.int64), rows.sizes.shape)
        values = _padded_each(rows, each, value, allocate)
    return values.view(len(rows), *widths, *rows.field.item_shape)


def _padded_each(rows: VariableRows, widths: Integers, value: float, allocate: Allocate) -> Tensor:
    """Copy rows, each padded to sizes of its own."""
    field, size = rows.field, rows.field.item_bytes
    starts, places, lengths = _pieces(rows, widths)
    total = int(widths.prod(axis=1).sum())
    memory = allocate(total * size)
    values = memory.view(field.dtype).view(total, *field.item_shape)
    out, item = memory.numpy(), _number(value, field.dtype)
    if lengths.sum() * size > _LONG_BYTES * len(lengths):
        begins, ends = np.append(0, places + lengths) * size, np.append(places, total) * size
        padding = np.tile(item, int((ends - begins).max()) // item.nbytes).view(np.uint8)
        target, source = out.data, padding.data
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            target[begin:end] = source[: end - begin]
    else:
        out.view(item.dtype)[:] = item
    copy_segments(rows.memory, starts * size, out, places * size, lengths * size)
    return values


def _pieces(rows: VariableRows, widths: Integers) -> tuple[Integers, Integers, Integers]:
    """What lies in one piece: a row, or a part along the last of several dimensions that differ."""
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
def _number(value: float, dtype: torch.dtype) -> NDArray[Any]:
    """A number as it lies in memory, of shape (1,)."""
    item = torch.tensor([value], dtype=dtype).view(torch.uint8).numpy()
    if (item == item[0]).all():
        # Bytes are set several times as fast as wider numbers.
        return item[:1]
    return item.view(f"u{len(item)}" if len(item) <= 8 else np.complex128)


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
