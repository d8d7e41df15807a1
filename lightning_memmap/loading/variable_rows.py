"""Rows that differ in length on their way into a batch.

They are not copied before the form of the batch is known: until then they are places in memory. So
padded rows are written once, straight to where they stay, and only bare rows cross a link.
"""

import math
from bisect import bisect_right
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
from lightning_memmap.loading.device_streams import has_streams, send
from lightning_memmap.loading.image_decoder import ImageDecoder, Scaled
from lightning_memmap.sampling.rows import Integers, ranges, starts_of
from lightning_memmap.schema.fields import SIGNED, Field, RowList, Values, select
from lightning_memmap.schema.forms import Decode
from lightning_memmap.store.segments import Bytes, copy_segments

#: Small steps are copied together, up to this number of bytes.
_TOGETHER_BYTES = 2**24
#: Where rows have more bytes than this on average, filling what is behind each of them costs less
#: than filling everything.
_LONG_BYTES = 2**14
#: From here on the memory of the machine is looked at before a step is allocated.
_MANY_BYTES = 2**33
#: Gives memory on the CPU for a number of bytes, uint8 of shape (bytes,).
Allocate = Callable[[int], Tensor]


class Padded(NamedTuple):
    """What a batch has for rows that differ in length: padded values, and the lengths."""

    values: Tensor
    """The padded rows, of shape (B, *padded lengths, *item shape)."""
    lengths: Tensor
    """How much of each row is not padding: int64 of shape (B,), or (B, k) where ``k`` dimensions
    differ. On the device of ``values``."""

    def mask(self) -> Tensor:
        """Return what is not padding: bool of shape (B, *padded lengths), on the same device."""
        lengths = self.lengths.view(len(self.lengths), -1)
        mask = torch.ones((len(lengths), *[1] * lengths.shape[1]), dtype=torch.bool)
        mask = mask.to(lengths.device)
        for dim in range(1, mask.dim()):
            width = self.values.shape[dim]
            shape = [width if each == dim else 1 for each in range(mask.dim())]
            index = torch.arange(width, device=lengths.device).view(shape)
            mask = mask & (index < lengths[:, dim - 1].view(-1, *[1] * (mask.dim() - 1)))
        return mask

    def rows(self) -> list[Tensor]:
        """The rows without their padding, views of ``values``."""
        sizes = self.lengths.view(len(self.lengths), -1).tolist()
        return [
            row[tuple(slice(size) for size in each)]
            for row, each in zip(self.values, sizes, strict=True)
        ]


def fresh_memory(num_bytes: int, pin_memory: bool = False) -> Tensor:
    """New memory on the CPU."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pin_memory)


@dataclass(frozen=True, eq=False)
class VariableRows:
    """Rows of a field that differ in length, where they lie.

    It has the methods of a tensor of rows that a loader needs, and those of `FetchedRows`.
    """

    field: Field
    items: Tensor  # Those of these rows, and perhaps of others, (items, *item shape).
    starts: Integers  # The first item of each row, (B,).
    sizes: Integers  # Its sizes in the ``k`` dimensions that differ, (B, k).
    widths: tuple[int, ...]  # The largest sizes among the rows of the step on all data devices.
    is_packed: bool = False  # Whether they follow one another, in memory that is theirs.
    allocate: Allocate = fresh_memory  # Gives memory for copies of rows on a CPU.
    fetch: "Fetch | None" = None  # These and the rows of other steps that were fetched with them.
    step: int = 0  # Which of these steps they are.

    @property
    def device(self) -> torch.device:
        """Where the rows lie."""
        return self.items.device

    @property
    def lengths(self) -> Integers:
        """Items of each row, int64 of shape (B,)."""
        if self.sizes.shape[1] == 1:
            return self.sizes[:, 0]
        lengths: Integers = self.sizes.prod(axis=1)
        return lengths

    @property
    def memory(self) -> Bytes:
        """The memory of the items, uint8 of shape (bytes,)."""
        return self.items.view(-1).view(torch.uint8).numpy()

    def but(self, **values: Any) -> "VariableRows":
        """The same rows with other values, in a quarter of the time of `replace`."""
        rows = object.__new__(VariableRows)
        vars(rows).update(vars(self), **values)
        return rows

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, rows: slice | Integers) -> "VariableRows":
        starts, sizes = self.starts[rows], self.sizes[rows]
        is_packed = self.is_packed and isinstance(rows, slice) and rows.step in (None, 1)
        return self.but(starts=starts, sizes=sizes, is_packed=is_packed, fetch=None)

    def split_with_sizes(self, sizes: Sequence[int]) -> "list[VariableRows]":
        """Divide the rows. The widths are those of each part."""
        counts = np.array(sizes, np.int64)
        edges = np.append(0, np.cumsum(counts))
        # One more row, for parts without any at the end.
        rows = np.append(self.sizes, np.zeros((1, self.sizes.shape[1]), np.int64), axis=0)
        widths = np.maximum.reduceat(rows, edges[:-1], axis=0)
        widths[counts == 0] = 0
        fetch = Fetch(self, edges, [*map(tuple, widths.tolist())])
        pieces = zip(pairwise(edges.tolist()), fetch.widths, strict=True)
        return [
            self.but(
                starts=self.starts[begin:end],
                sizes=self.sizes[begin:end],
                widths=width,
                fetch=fetch,
                step=step,
            )
            for step, ((begin, end), width) in enumerate(pieces)
        ]

    def to(self, device: torch.device) -> "VariableRows":
        """The rows on another device: packed where they lie, and then copied. Text stays here."""
        if self.device == device or self.field.is_text:
            return self
        pin = self.device.type == "cpu" and has_streams(device)
        rows = self.but(allocate=partial(fresh_memory, pin_memory=pin)).copied()
        return rows.but(items=send(rows.items, device))

    def copied(self) -> "VariableRows":
        """The rows in memory of their own, one after the other."""
        lengths, items = self.lengths, self.packed()
        return self.but(items=items, starts=starts_of(lengths), is_packed=True, fetch=None)

    def packed(self) -> Tensor:
        """The items of the rows, one row after the other, in memory of their own."""
        lengths = self.lengths
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        if self.is_packed and total:
            first = int(self.starts[0])
            return self.items[first : first + total]
        if self.device.type != "cpu":
            return select(self.items, *self._spread(lengths, self.starts))
        size, places = self.field.item_bytes, ends - lengths
        memory = self.allocate(total * size)
        copy_segments(
            self.memory, self.starts * size, memory.numpy(), places * size, lengths * size
        )
        return memory.view(self.field.dtype).view(total, *self.field.item_shape)

    def packed_together(self) -> Tensor:
        """The same; rows that must be copied are copied with those of other small steps."""
        if self.fetch is None or self.is_packed:
            return self.packed()
        return self.fetch.of_step(self.step, self.allocate, None)

    def padded(self, value: float, multiple: int) -> Padded:
        """The rows padded to the longest of the step, and their lengths; see `Pad`."""
        widths = tuple(-(-width // multiple) * multiple for width in self.widths)
        num_bytes = len(self) * math.prod(widths) * self.field.item_bytes
        if num_bytes > _MANY_BYTES and num_bytes > available_bytes():
            raise ValueError(
                f"variable: {len(self)} rows of field {self.field.name!r}, padded to {widths}, have"
                f" {num_bytes} bytes, more than this machine has free: give Pad a smaller multiple"
                f" than {multiple}, or use smaller batches"
            )
        fetch = self.fetch
        if fetch is None or fetch.widths[self.step] != self.widths:
            # Those of several data devices may have the widths of all of them.
            each = np.broadcast_to(np.array(widths, np.int64), self.sizes.shape)
            values = self.padded_each(each, value)
        else:
            values = fetch.of_step(self.step, self.allocate, (value, multiple))
        sizes = self.sizes[:, 0] if len(widths) == 1 else self.sizes
        lengths = send(torch.from_numpy(sizes.copy()), self.device)
        return Padded(values.view(len(self), *widths, *self.field.item_shape), lengths)

    def padded_each(self, widths: Integers, value: float) -> Tensor:
        """The items of the rows, each row padded to sizes of its own, of shape (B, k)."""
        field, size = self.field, self.field.item_bytes
        starts, places, lengths = _pieces(self, widths)
        total = int(widths.prod(axis=1).sum())
        if self.device.type != "cpu":
            sources, targets = self._spread(lengths, starts, places)
            shape, signed = (total, *field.item_shape), SIGNED.get(field.dtype, field.dtype)
            values = torch.full(shape, value, dtype=field.dtype, device=self.device)
            found = select(self.items, sources).view(signed)
            values.view(signed).index_copy_(0, targets, found)
            return values
        memory = self.allocate(total * size)
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
        copy_segments(self.memory, starts * size, out, places * size, lengths * size)
        return values

    def jagged(self) -> Tensor:
        """A nested tensor of the rows."""
        offsets = send(torch.from_numpy(np.append(0, np.cumsum(self.lengths))), self.device)
        return jagged_tensor(self.packed_together(), offsets)

    def listed(self) -> RowList:
        """A tensor, or a text, for each row."""
        packed, field = self.packed_together(), self.field
        if field.is_text:
            data, ends = packed.numpy().tobytes(), np.cumsum(self.lengths).tolist()
            pieces = zip([0, *ends], ends, strict=False)
            return RowList(field.decode(data[begin:end]) for begin, end in pieces)
        parts = packed.split_with_sizes(self.lengths.tolist())
        if self.sizes.shape[1] > 1:
            shapes, item = self.sizes.tolist(), field.item_shape
            return RowList(p.view(*shape, *item) for p, shape in zip(parts, shapes, strict=True))
        return RowList(parts)

    def decoded(self, form: Decode) -> Tensor | Scaled:
        """The images whose bytes the rows are."""
        images = np.split(self.packed().numpy(), np.cumsum(self.lengths)[:-1])
        decoder = ImageDecoder.like(self.field.name, form, images[0])
        pixels, places = decoder.decoded(images)
        return Scaled.of(pixels, places) if form.with_scale else pixels

    def _spread(self, lengths: Integers, *begins: Integers) -> Sequence[Tensor]:
        """The places of all items of pieces on the device, for each array of their begins."""
        firsts, total = starts_of(lengths), int(lengths.sum())
        numbers = np.column_stack([lengths, *(each - firsts for each in begins)])
        counts, *shifts = send(torch.from_numpy(numbers), self.device).unbind(1)
        along = torch.arange(total, device=self.device)
        return [s.repeat_interleave(counts, output_size=total).add_(along) for s in shifts]


class Fetch:
    """Rows of several steps that were fetched together, and what was last made of them.

    Those of small steps are copied together: a call costs as much for one step as for many.
    """

    def __init__(self, rows: VariableRows, edges: Integers, widths: list[tuple[int, ...]]) -> None:
        self.widths = widths  # The largest sizes in each step.
        self._rows = rows
        self._edges = edges  # Where the rows of each step begin, and those of the last end.
        self._way: Any = None  # In which way something was made of the steps from `_first` on.
        self._first = self._end = 0
        self._made = torch.empty(0)
        self._ends = list[int]()  # The items that are made of all steps before each, and of all.
        self._of_steps = edges  # The sizes that the rows of each step are padded to.

    def of_step(self, step: int, allocate: Allocate, pad: tuple[float, int] | None) -> Tensor:
        """The items of a step, of shape (items, *item shape): packed, or padded like `Pad`."""
        edges, rows = self._edges, self._rows
        value, multiple = pad or (0, 1)
        if self._way != (way := (allocate, pad)):
            self._of_steps = -(-np.array(self.widths) // multiple) * multiple
            counts = np.diff(edges) * self._of_steps.prod(axis=1)
            ends = np.cumsum(rows.lengths if pad is None else counts)
            ends = np.append(0, ends)[edges if pad is None else slice(None)]
            self._way, self._ends, self._first, self._end = way, ends.tolist(), 0, 0
        if not self._first <= step < self._end:
            limit = self._ends[step] + _TOGETHER_BYTES // max(1, rows.field.item_bytes)
            end = max(step + 1, bisect_right(self._ends, limit) - 1)
            # The memory of the steps before may be used again, while it is in the caches.
            self._made, self._end = torch.empty(0), self._first
            some = rows[edges[step] : edges[end]].but(allocate=allocate)
            # Ordinary tensors in inference mode too: it may be over before the last of the steps.
            with torch.inference_mode(False):
                if pad is None:
                    self._made = some.packed()
                else:
                    counts = np.diff(edges[step : end + 1])
                    each = np.repeat(self._of_steps[step:end], counts, axis=0)
                    self._made = some.padded_each(each, value)
            self._first, self._end = step, end
        first = self._ends[self._first]
        return self._made[self._ends[step] - first : self._ends[step + 1] - first]


def _pieces(rows: VariableRows, widths: Integers) -> tuple[Integers, Integers, Integers]:
    """What lies in one piece: a row, or a part along the last of several dimensions that differ."""
    starts, sizes = rows.starts, rows.sizes
    items = widths.prod(axis=1)
    places = starts_of(items)
    for dim in range(1, sizes.shape[1]):
        # Each piece becomes as many as it has sizes along the dimension before.
        counts = sizes[:, dim - 1]
        pieces = np.repeat(np.arange(len(counts)), counts)
        numbers = ranges(np.zeros_like(counts), counts)
        sizes, widths = sizes[pieces], widths[pieces]
        starts = starts[pieces] + numbers * sizes[:, dim:].prod(axis=1)
        places = places[pieces] + numbers * widths[:, dim:].prod(axis=1)
    return starts, places, sizes[:, -1]


@lru_cache(maxsize=64)
def _number(value: float, dtype: torch.dtype) -> NDArray[Any]:
    """A number as it lies in memory, of shape (1,)."""
    # numpy has no bfloat16 and no float8, but integers of their size.
    item = torch.tensor([value], dtype=dtype).view(torch.uint8).numpy()
    if (item == item[0]).all():
        # Bytes are set several times as fast as wider numbers.
        return item[:1]
    return item.view(f"u{len(item)}" if len(item) <= 8 else np.complex128)


def joined_rows(parts: Sequence[Tensor | VariableRows]) -> Tensor | VariableRows:
    """Rows of one field from several places, one part after the other."""
    variable = [part for part in parts if isinstance(part, VariableRows)]
    if not variable:
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    items = torch.cat([part.packed() for part in variable])
    sizes = np.concatenate([part.sizes for part in variable])
    return _packed_rows(variable[0].field, items, sizes)


def rows_in_memory(field: Field, rows: Sequence[Tensor]) -> VariableRows:
    """Rows of a field that were not read from a store."""
    items, sizes = Values.of_rows(field, rows)
    assert sizes is not None
    # The memory may be that of the dataset.
    return _packed_rows(field, items, sizes).but(is_packed=False)


def _packed_rows(field: Field, items: Tensor, sizes: Integers) -> VariableRows:
    starts = starts_of(sizes.prod(axis=1))
    return VariableRows(field, items, starts, sizes, largest(sizes), is_packed=True)


def share_widths(
    leaves: Sequence[Sequence[Tensor | VariableRows]],
) -> list[list[Tensor | VariableRows]]:
    """The rows of all data devices in one step, with the same widths."""
    found = [[*each] for each in leaves]
    for index, first in enumerate(found[0]):
        if isinstance(first, VariableRows):
            parts = [rows for each in found if isinstance(rows := each[index], VariableRows)]
            widths = largest(np.array([part.widths for part in parts]))
            for each, rows in zip(found, parts, strict=True):
                each[index] = rows.but(widths=widths)
    return found


def largest(sizes: Integers) -> tuple[int, ...]:
    """The largest sizes in the dimensions that differ."""
    return tuple(sizes.max(axis=0, initial=0).tolist())
