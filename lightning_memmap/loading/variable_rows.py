"""Rows that differ in length, before they are copied into a batch.

Copying waits until the batch layout is known. Padding is therefore written once, in place, and only
unpadded data is sent between devices.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_memmap._compat.tensors import jagged_tensor
from lightning_memmap.host_memory import available_bytes
from lightning_memmap.integers import (
    Integers,
    bounds_of,
    ceil_div,
    group_of,
    group_sums,
    index_in_group,
    items_per_row,
    starts_of,
)
from lightning_memmap.loading.device_streams import has_streams, send
from lightning_memmap.schema.fields import SIGNED, Field, RowList, Values, select
from lightning_memmap.store.files import Bytes, copy_segments

#: Small steps are copied together, up to this number of bytes.
_TOGETHER_BYTES = 2**24
#: Above this mean number of bytes per row, only the padding is filled, and not the whole memory.
_LONG_BYTES = 2**14
#: Above this number of bytes, the free memory is checked before a step is allocated.
_MANY_BYTES = 2**33
#: Allocates bytes on the CPU, as uint8 of shape (bytes,).
Allocate = Callable[[int], Tensor]


class Padded(NamedTuple):
    """A batch of rows that differ in length: the padded rows, and their lengths."""

    values: Tensor
    """The padded rows, of shape (B, *padded lengths, *item shape)."""
    lengths: Tensor
    """The length of each row without padding: int64 of shape (B,), or (B, k) if ``k`` dimensions
    differ. On the device of ``values``."""

    def mask(self) -> Tensor:
        """Return a mask of the values that are not padding.

        Returns:
            Bool of shape (B, *padded lengths), on the device of ``values``.
        """
        lengths = self.lengths.view(len(self.lengths), -1)
        mask = torch.ones((len(lengths), *[1] * lengths.shape[1]), dtype=torch.bool)
        mask = mask.to(lengths.device)
        for dim in range(1, mask.dim()):
            width = self.values.shape[dim]
            # (1, .., width, .., 1) < (B, 1, .., 1)
            shape = [width if axis == dim else 1 for axis in range(mask.dim())]
            index = torch.arange(width, device=lengths.device).view(shape)
            mask = mask & (index < lengths[:, dim - 1].view(-1, *[1] * (mask.dim() - 1)))
        return mask

    def rows(self) -> list[Tensor]:
        """Return the rows without their padding.

        Returns:
            One view of ``values`` per row, of shape (*lengths of the row, *item shape).
        """
        lengths = self.lengths.view(len(self.lengths), -1).tolist()
        return [
            row[tuple(slice(length) for length in row_lengths)]
            for row, row_lengths in zip(self.values, lengths, strict=True)
        ]


def new_memory(num_bytes: int, pin_memory: bool = False) -> Tensor:
    """Allocate memory on the CPU."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pin_memory)


@dataclass(frozen=True, eq=False)
class VariableRows:
    """References to rows of a field that differ in length.

    It implements `FetchedRows`, and the methods of a tensor of rows that a loader needs.
    """

    field: Field
    items: Tensor  # The items of these rows, and perhaps of others, (items, *item shape).
    starts: Integers  # The first item of each row, (B,).
    sizes: Integers  # The sizes of each row in the ``k`` dimensions that differ, (B, k).
    widths: tuple[int, ...]  # The largest sizes among the rows of the step on all data devices.
    is_contiguous: bool = False  # Whether the rows are contiguous, in memory that only they use.
    allocate: Allocate = new_memory  # Allocates memory for copies of rows on a CPU.
    cache: "LayoutCache | None" = None  # These rows and the rows of steps fetched with them.
    step: int = 0  # The index of their step in the cache.

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self.items.device

    @property
    def lengths(self) -> Integers:
        """Items of each row, int64 of shape (B,)."""
        return items_per_row(self.sizes)

    @property
    def memory(self) -> Bytes:
        """The memory of the items, uint8 of shape (bytes,)."""
        return self.items.view(-1).view(torch.uint8).numpy()

    def replaced(self, **values: Any) -> "VariableRows":
        """Return a copy with other attributes, four times as fast as `dataclasses.replace`."""
        rows = object.__new__(VariableRows)
        vars(rows).update(vars(self), **values)
        return rows

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, rows: slice | Integers) -> "VariableRows":
        starts = self.starts[rows]
        sizes = self.sizes[rows]
        is_contiguous = self.is_contiguous and isinstance(rows, slice) and rows.step in (None, 1)
        return self.replaced(starts=starts, sizes=sizes, is_contiguous=is_contiguous, cache=None)

    def split_with_sizes(self, sizes: Sequence[int]) -> "list[VariableRows]":
        """Split the rows into parts, such as steps, with the widths of each part."""
        counts = np.array(sizes, np.int64)
        bounds = bounds_of(counts)
        # One more row, because `reduceat` needs one for empty parts at the end.
        rows = np.append(self.sizes, np.zeros((1, self.sizes.shape[1]), np.int64), axis=0)
        widths = np.maximum.reduceat(rows, bounds[:-1], axis=0)
        widths[counts == 0] = 0
        cache = LayoutCache(self, bounds, [*map(tuple, widths.tolist())])
        steps = zip(pairwise(bounds.tolist()), cache.widths, strict=True)
        return [
            self.replaced(
                starts=self.starts[start:stop],
                sizes=self.sizes[start:stop],
                widths=width,
                cache=cache,
                step=step,
            )
            for step, ((start, stop), width) in enumerate(steps)
        ]

    def to(self, device: torch.device) -> "VariableRows":
        """Return the rows on another device, concatenated first. Text stays on the CPU."""
        if self.device == device or self.field.is_text:
            return self
        pin = self.device.type == "cpu" and has_streams(device)
        rows = self.replaced(allocate=partial(new_memory, pin_memory=pin)).copied()
        return rows.replaced(items=send(rows.items, device))

    def copied(self) -> "VariableRows":
        """Return the rows in contiguous memory that only they use."""
        starts = starts_of(self.lengths)
        return self.replaced(
            items=self.concatenated(), starts=starts, is_contiguous=True, cache=None
        )

    def concatenated(self) -> Tensor:
        """Return the items of the rows, concatenated, of shape (items, *item shape)."""
        lengths = self.lengths
        stops = np.cumsum(lengths)
        total = int(stops[-1]) if len(stops) else 0
        if self.is_contiguous and total:
            start = int(self.starts[0])
            return self.items[start : start + total]
        if self.device.type != "cpu":
            return select(self.items, *self._item_indices(lengths, self.starts))
        memory = self.allocate(total * self.field.item_bytes)
        self._copy_runs(_Runs(self.starts, stops - lengths, lengths), memory.numpy())
        return memory.view(self.field.dtype).view(total, *self.field.item_shape)

    def concatenated_with_neighbours(self) -> Tensor:
        """Return `concatenated`, copied together with the rows of other small steps."""
        if self.cache is None or self.is_contiguous:
            return self.concatenated()
        return self.cache.of_step(self.step, self.allocate, None)

    def padded(self, value: float, multiple: int) -> Padded:
        """Pad the rows to the widths of the step, rounded up to a multiple; see `Pad`."""
        widths = tuple(ceil_div(width, multiple) * multiple for width in self.widths)
        num_bytes = len(self) * math.prod(widths) * self.field.item_bytes
        if num_bytes > _MANY_BYTES and num_bytes > available_bytes():
            raise ValueError(
                f"layout: {len(self)} rows of field {self.field.name!r}, padded to {widths}, need"
                f" {num_bytes} bytes, more than this machine has free: use Pad with a smaller"
                f" multiple than {multiple}, or smaller batches"
            )
        cache = self.cache
        if cache is None or cache.widths[self.step] != self.widths:
            # The widths of a step are the largest on any data device.
            row_widths = np.broadcast_to(np.array(widths, np.int64), self.sizes.shape)
            values = self.padded_items(row_widths, value)
        else:
            values = cache.of_step(self.step, self.allocate, (value, multiple))
        sizes = self.sizes[:, 0] if len(widths) == 1 else self.sizes
        lengths = send(torch.from_numpy(sizes.copy()), self.device)
        return Padded(values.view(len(self), *widths, *self.field.item_shape), lengths)

    def padded_items(self, widths: Integers, value: float) -> Tensor:
        """Pad each row to its own widths.

        Args:
            widths: The sizes to pad each row to, of shape (B, k).
            value: The padding.

        Returns:
            The items of the padded rows, concatenated, of shape (items, *item shape).
        """
        runs = _contiguous_runs(self, widths)
        shape = (int(widths.prod(axis=1).sum()), *self.field.item_shape)
        if self.device.type != "cpu":
            return self._padded_on_device(runs, shape, value)
        memory = self.allocate(shape[0] * self.field.item_bytes)
        self._fill_padding(runs, memory.numpy(), value)
        self._copy_runs(runs, memory.numpy())
        return memory.view(self.field.dtype).view(shape)

    def _padded_on_device(self, runs: "_Runs", shape: tuple[int, ...], value: float) -> Tensor:
        """Copy runs of items to their targets among padding, on an accelerator."""
        dtype = self.field.dtype
        sources, targets = self._item_indices(runs.lengths, runs.starts, runs.targets)
        signed = SIGNED.get(dtype, dtype)
        values = torch.full(shape, value, dtype=dtype, device=self.device)
        values.view(signed).index_copy_(0, targets, select(self.items, sources).view(signed))
        return values

    def _fill_padding(self, runs: "_Runs", memory: Bytes, value: float) -> None:
        """Fill at least the gaps between the targets of runs in host memory."""
        item_bytes = self.field.item_bytes
        item = _in_memory(value, self.field.dtype)
        if runs.lengths.sum() * item_bytes <= _LONG_BYTES * len(runs.lengths):
            memory.view(item.dtype)[:] = item
            return
        gap_starts = np.append(0, runs.targets + runs.lengths) * item_bytes
        gap_stops = np.append(runs.targets * item_bytes, len(memory))
        longest = int((gap_stops - gap_starts).max())
        padding = np.tile(item, longest // item.nbytes).view(np.uint8).data
        for start, stop in zip(gap_starts.tolist(), gap_stops.tolist(), strict=True):
            memory.data[start:stop] = padding[: stop - start]

    def _copy_runs(self, runs: "_Runs", memory: Bytes) -> None:
        """Copy runs of items to their targets in host memory."""
        starts, targets, num_bytes = (items * self.field.item_bytes for items in runs)
        copy_segments(self.memory, starts, memory, targets, num_bytes)

    def jagged(self) -> Tensor:
        """Return a nested tensor of the rows."""
        offsets = send(torch.from_numpy(bounds_of(self.lengths)), self.device)
        return jagged_tensor(self.concatenated_with_neighbours(), offsets)

    def listed(self) -> RowList:
        """Return a tensor, or a text, for each row."""
        items = self.concatenated_with_neighbours()
        field = self.field
        if field.is_text:
            data = items.numpy().tobytes()
            bounds = pairwise([0, *np.cumsum(self.lengths).tolist()])
            return RowList(field.decode(data[start:stop]) for start, stop in bounds)
        rows = items.split_with_sizes(self.lengths.tolist())
        if self.sizes.shape[1] > 1:
            sizes = self.sizes.tolist()
            pairs = zip(rows, sizes, strict=True)
            return RowList(row.view(*row_sizes, *field.item_shape) for row, row_sizes in pairs)
        return RowList(rows)

    def _item_indices(self, lengths: Integers, *starts: Integers) -> Sequence[Tensor]:
        """Return the indices of all items of runs, on the device, for each array of starts.

        Runs of lengths 2 and 3 that start at 10 and 40 have the indices 10 11 40 41 42.
        """
        offsets = starts_of(lengths)
        total = int(lengths.sum())
        columns = np.column_stack([lengths, *(run_starts - offsets for run_starts in starts)])
        counts, *shifts = send(torch.from_numpy(columns), self.device).unbind(1)
        along = torch.arange(total, device=self.device)
        return [s.repeat_interleave(counts, output_size=total).add_(along) for s in shifts]


class LayoutCache:
    """Rows of several steps that were fetched together, and a cache of their last layout.

    Small steps are concatenated or padded together: a call costs as much for one step as for many.
    """

    def __init__(self, rows: VariableRows, bounds: Integers, widths: list[tuple[int, ...]]) -> None:
        self.widths = widths  # The largest sizes in each step.
        self._rows = rows
        self._bounds = bounds  # Step ``s`` has the rows ``bounds[s]`` to ``bounds[s + 1]``.
        self._layout: Any = None  # The allocator and padding of the cached steps.
        self._cached: dict[int, Tensor] = {}  # The items of some steps in this layout.

    def of_step(self, step: int, allocate: Allocate, pad: tuple[float, int] | None) -> Tensor:
        """Return the items of a step, of shape (items, *item shape), padded like `Pad` or not.

        Args:
            step: The index of the step.
            allocate: Allocates the memory.
            pad: The value and the multiple of the padding; None without padding.
        """
        if self._layout == (allocate, pad) and step in self._cached:
            return self._cached[step]
        rows = self._rows
        counts = np.diff(self._bounds)
        multiple = 1 if pad is None else pad[1]
        widths = ceil_div(np.array(self.widths), multiple) * multiple
        sizes = counts * widths.prod(axis=1)
        if pad is None:
            sizes = group_sums(rows.lengths, counts)
        chunks = starts_of(sizes * rows.field.item_bytes) // _TOGETHER_BYTES
        steps = np.flatnonzero(chunks == chunks[step])
        # Drop the old items first, so that their memory is reused while it is in the caches.
        self._cached = {}
        here = rows[self._bounds[steps[0]] : self._bounds[steps[-1] + 1]]
        here = here.replaced(allocate=allocate)
        # Not inference tensors, because inference mode may end before the last of the steps.
        with torch.inference_mode(False):
            if pad is None:
                items = here.concatenated()
            else:
                items = here.padded_items(np.repeat(widths[steps], counts[steps], axis=0), pad[0])
        by_step = items.split_with_sizes(sizes[steps].tolist())
        self._cached = dict(zip(steps.tolist(), by_step, strict=True))
        self._layout = allocate, pad
        return self._cached[step]


class _Runs(NamedTuple):
    """Runs of contiguous items to copy, each int64 of shape (runs,)."""

    starts: Integers  # The first item of each run in its source.
    targets: Integers  # The first item in its target.
    lengths: Integers


def _contiguous_runs(rows: VariableRows, widths: Integers) -> _Runs:
    """Divide rows that are padded to widths into contiguous runs of items.

    A row of one variable dimension is one run. A row of sizes (2, 3) that is padded to (2, 4) is
    two runs of 3 items, whose sources are 3 items apart and whose targets are 4 apart.
    """
    starts = rows.starts
    sizes = rows.sizes
    targets = starts_of(widths.prod(axis=1))
    for dim in range(1, sizes.shape[1]):
        # Split each run along the dimension before this one.
        counts = sizes[:, dim - 1]
        origins = group_of(counts)
        indices = index_in_group(counts)
        sizes = sizes[origins]
        widths = widths[origins]
        starts = starts[origins] + indices * sizes[:, dim:].prod(axis=1)
        targets = targets[origins] + indices * widths[:, dim:].prod(axis=1)
    return _Runs(starts, targets, sizes[:, -1])


@lru_cache(maxsize=64)
def _in_memory(value: float, dtype: torch.dtype) -> NDArray[Any]:
    """Return a number as it is stored in memory, of shape (1,)."""
    # numpy has no bfloat16 and no float8, but integers of their size.
    item = torch.tensor([value], dtype=dtype).view(torch.uint8).numpy()
    if (item == item[0]).all():
        # Filling with bytes is several times as fast as with wider numbers.
        return item[:1]
    return item.view(f"u{len(item)}" if len(item) <= 8 else np.complex128)


def concatenate_rows(parts: Sequence[Tensor | VariableRows]) -> Tensor | VariableRows:
    """Concatenate rows of one field."""
    variable = [part for part in parts if isinstance(part, VariableRows)]
    if not variable:
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    items = torch.cat([part.concatenated() for part in variable])
    sizes = np.concatenate([part.sizes for part in variable])
    return _contiguous_rows(variable[0].field, items, sizes)


def make_variable_rows(field: Field, tensors: Sequence[Tensor]) -> VariableRows:
    """Concatenate the tensors of rows of a field, which were not read from a store."""
    items, sizes = Values.from_rows(field, tensors)
    assert sizes is not None
    # So that steps are copied together with their neighbours, like rows of a store.
    return _contiguous_rows(field, items, sizes).replaced(is_contiguous=False)


def _contiguous_rows(field: Field, items: Tensor, sizes: Integers) -> VariableRows:
    """Return rows whose items are consecutive in memory that only they use."""
    starts = starts_of(items_per_row(sizes))
    return VariableRows(field, items, starts, sizes, largest(sizes), is_contiguous=True)


def share_widths(leaves: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Set the widths of the rows of one step to the largest on any data device.

    Args:
        leaves: The leaves of each data device, one per field.
    """
    by_device = [[*device_leaves] for device_leaves in leaves]
    for index, first in enumerate(by_device[0]):
        if isinstance(first, VariableRows):
            field_rows = [leaf[index] for leaf in by_device]
            rows_of_devices = [rows for rows in field_rows if isinstance(rows, VariableRows)]
            widths = largest(np.array([rows.widths for rows in rows_of_devices]))
            for device_leaves, rows in zip(by_device, rows_of_devices, strict=True):
                device_leaves[index] = rows.replaced(widths=widths)
    return by_device


def largest(sizes: Integers) -> tuple[int, ...]:
    """Return the largest size in each dimension that differs."""
    return tuple(sizes.max(axis=0, initial=0).tolist())
