"""Rows that differ in length on their way into a batch.

They are not copied before the form of the batch is known: until then they are places in memory. So
padded rows are written once, straight to where they stay, and only bare rows cross a link.
"""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.loading.device_streams import has_streams, send
from lightning_memmap.sampling import Integers
from lightning_memmap.schema import Field, Values
from lightning_memmap.store.segments import Bytes, pack_segments

#: Small steps are copied together, up to this number of bytes.
_TOGETHER_BYTES = 2**22
#: Gives memory on the CPU for a number of bytes, uint8 of shape (bytes,).
Allocate = Callable[[int], Tensor]


def fresh_memory(num_bytes: int) -> Tensor:
    """New memory on the CPU."""
    return torch.empty(num_bytes, dtype=torch.uint8)


@dataclass(frozen=True, eq=False)
class VariableRows:
    """Rows of a field that differ in length, where they lie."""

    field: Field
    items: Tensor
    starts: Integers
    sizes: Integers
    widths: tuple[int, ...]
    fetch: "Fetch | None" = None
    step: int = 0

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
    def memory(self) -> Bytes:
        """The memory of the items, uint8 of shape (bytes,)."""
        return self.items.view(-1).view(torch.uint8).numpy()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, rows: slice | Integers) -> "VariableRows":
        starts, sizes = self.starts[rows], self.sizes[rows]
        return replace(self, starts=starts, sizes=sizes, fetch=None)

    def copied(self, allocate: Allocate = fresh_memory) -> "VariableRows":
        """The rows in memory of their own, one after the other."""
        lengths, items = self.lengths, self.packed(allocate)
        starts = np.cumsum(lengths) - lengths
        return VariableRows(self.field, items, starts, self.sizes, self.widths)

    def of_widths(self, widths: tuple[int, ...]) -> "VariableRows":
        """These rows, as some of a step."""
        return replace(self, widths=widths)

    def contiguous(self) -> "VariableRows":
        """These rows: they are copied later."""
        return self

    def index_select(self, dim: int, order: Tensor) -> "VariableRows":
        """The rows in another order."""
        return self[order.cpu().numpy()]

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
            VariableRows(
                self.field,
                self.items,
                self.starts[begin:end],
                self.sizes[begin:end],
                width,
                fetch,
                step,
            )
            for step, ((begin, end), width) in enumerate(pieces)
        ]

    def to(self, device: torch.device) -> "VariableRows":
        """The rows on another device: packed where they lie, and then copied. Text stays here."""
        if self.device == device or self.field.is_text:
            return self
        pin = self.device.type == "cpu" and has_streams(device)
        rows = self.copied(_pinned_memory if pin else fresh_memory)
        return replace(rows, items=send(rows.items, device))

    def packed(self, allocate: Allocate = fresh_memory) -> Tensor:
        """Copy the rows, one after the other."""
        lengths = self.lengths
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        if self.device.type != "cpu":
            starts, counts = self.on_device(self.starts - ends + lengths, lengths).unbind(1)
            shifts = starts.repeat_interleave(counts, output_size=total)
            return self.items.index_select(0, shifts + torch.arange(total, device=self.device))
        size = self.field.item_bytes
        memory = allocate(total * size)
        pack_segments(self.memory, self.starts * size, memory.numpy(), lengths * size)
        return memory.view(self.field.dtype).view(total, *self.field.item_shape)

    def packed_together(self, allocate: Allocate) -> Tensor:
        """These rows as of `packed`, which are copied together with those of other small steps."""
        fetch = self.fetch
        if fetch is None:
            return self.packed(allocate)

        def together() -> Together:
            rows, edges = fetch.rows, fetch.edges
            ends = np.append(0, np.cumsum(rows.lengths))[edges]
            return Together(
                np.diff(ends),
                rows.field.item_bytes,
                lambda first, end: rows[edges[first] : edges[end]].packed(allocate),
            )

        return fetch.made(allocate, together).of_step(self.step)

    def on_device(self, *numbers: Integers) -> Tensor:
        """Upload arrays that have an entry for each row, side by side and in one copy."""
        return send(torch.from_numpy(np.column_stack(numbers)), self.device)


class Together:
    """The values of consecutive steps; those of small steps are made in one call."""

    def __init__(
        self, items: Integers, item_bytes: int, make: Callable[[int, int], Tensor]
    ) -> None:
        self._edges: list[int] = [0, *np.cumsum(items).tolist()]
        self._most_items = _TOGETHER_BYTES // max(1, item_bytes)
        self._make = make
        self._first = self._end = 0
        self._made = torch.empty(0)

    def of_step(self, step: int) -> Tensor:
        """The values of a step, of shape (items, *item shape)."""
        edges = self._edges
        if not self._first <= step < self._end:
            limit = edges[step] + self._most_items
            end = max(step + 1, bisect_right(edges, limit) - 1)
            # The memory of the steps before may be used again, while it is in the caches.
            self._made, self._end = torch.empty(0), self._first
            # Ordinary tensors in inference mode too: it may be over before the last of the steps.
            with torch.inference_mode(False):
                self._made = self._make(step, end)
            self._first, self._end = step, end
        first = edges[self._first]
        return self._made[edges[step] - first : edges[step + 1] - first]


@dataclass(eq=False)
class Fetch:
    """Rows of several steps that were fetched together, and what was last made of them."""

    rows: VariableRows
    edges: Integers
    widths: list[tuple[int, ...]]
    _made: tuple[Hashable, Together] | None = field(default=None, init=False)

    def made(self, how: Hashable, make: Callable[[], Together]) -> Together:
        """What is made of the rows in one way."""
        if self._made is None or self._made[0] != how:
            self._made = how, make()
        return self._made[1]


def _pinned_memory(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def send_rows(leaf: Tensor | VariableRows, device: torch.device) -> Tensor | VariableRows:
    """Rows on a device: `device_streams.send` for both kinds."""
    return leaf.to(device) if isinstance(leaf, VariableRows) else send(leaf, device)


def joined_rows(parts: Sequence[Tensor | VariableRows]) -> Tensor | VariableRows:
    """Rows of one field from several places, one part after the other."""
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
    """Let the rows of all data devices in one step have the same widths."""
    for index, first in enumerate(leaves[0]):
        if isinstance(first, VariableRows):
            parts = [rows for each in leaves if isinstance(rows := each[index], VariableRows)]
            widths = widths_of(parts)
            for each, rows in zip(leaves, parts, strict=True):
                each[index] = rows.of_widths(widths)


def widths_of(parts: Sequence[VariableRows]) -> tuple[int, ...]:
    """The largest sizes among rows."""
    return largest(np.concatenate([part.sizes for part in parts]))


def largest(sizes: Integers) -> tuple[int, ...]:
    """The largest sizes in the dimensions that differ."""
    return tuple(sizes.max(axis=0, initial=0).tolist())


def rows_in_memory(field: Field, rows: Sequence[Tensor]) -> VariableRows:
    """Rows of a field that were not read from a store."""
    items, sizes, _ = Values.of_rows(field, rows)
    assert sizes is not None
    lengths = sizes.prod(axis=1)
    return VariableRows(field, items, np.cumsum(lengths) - lengths, sizes, largest(sizes))
