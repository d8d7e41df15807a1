"""Row sources: rows of some shards in one place, and what is fetched of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.loading.buffers import Buffers
from lightning_memmap.loading.device_streams import send
from lightning_memmap.loading.variable_rows import VariableRows, joined_rows, share_widths
from lightning_memmap.sampling.rows import Integers
from lightning_memmap.sampling.sampler import Sampler
from lightning_memmap.schema.fields import select

#: One tensor per row, or rows that are not copied yet.
Leaf: TypeAlias = Tensor | VariableRows
#: Copies rows into a batch: a tensor of shape (B, *field shape) for each field, or a promise. The
#: slots are of `RowSource.locate`, int64 of shape (B,), on the source's device, or on the CPU where
#: a field has dimensions that differ. On the CPU, fields of one shape are copied into the buffers.
Take: TypeAlias = Callable[[Tensor, Buffers | None], Sequence[Leaf]]


class RowSource(ABC):
    """Rows of some shards in one place: in memory, or in files that are read block by block."""

    device: torch.device  # Where rows are fetched.
    is_released = False  # Whether the rows were freed.

    @abstractmethod
    def locate(self, sampler: Sampler, epoch: int, positions: range) -> Integers:
        """The slots of the rows that supply positions; undefined for rows of other sources."""

    @abstractmethod
    def epoch(self, sampler: Sampler, epoch: int, position: int) -> AbstractContextManager[Take]:
        """What fetches rows in the order of an epoch, from a position on."""

    def release(self) -> None:
        """Free the rows. Loaders over them, which a Trainer keeps long, give no more batches."""
        self.is_released = True


class Steps(NamedTuple):
    """Consecutive steps of an epoch."""

    epoch: int
    first_step: int  # Its number in the epoch.
    positions: range  # Of all the steps, those that this process serves.
    lengths: list[int]  # Positions of each step.
    step_rows: list[int]  # Rows of each step over all processes.


@dataclass
class Fetched:
    """The rows of some steps, for each receiver: one for all rows, or each data device for its own.

    Of ``R`` receivers, row ``j`` of the steps goes to the one with the number ``(first + j) % R``.
    """

    steps: Steps
    first: int  # The data device that has the first row.
    leaves: list[list[Leaf]]  # Of each receiver, one per field; and then row numbers, if wanted.
    devices: Sequence[torch.device]  # Of the receivers.

    def rows_of(self, receiver: int) -> slice:
        """Which of all rows a receiver has."""
        count = len(self.devices)
        return slice((receiver - self.first) % count, None, count)

    def number(self, rows: Tensor) -> None:
        """Add the dataset rows of all steps."""
        for receiver, (leaves, device) in enumerate(zip(self.leaves, self.devices, strict=True)):
            leaves.append(send(rows[self.rows_of(receiver)].contiguous(), device))

    def by_step(self) -> list[Sequence[Sequence[Leaf]]]:
        """The leaves of each step and receiver, the last step first. None are left here."""
        edges, count, found = [0, *accumulate(self.steps.lengths)], len(self.devices), []
        for receiver, leaves in enumerate(self.leaves):
            start = (receiver - self.first) % count
            ends = [-(-(edge - start) // count) for edge in edges]
            sizes = [end - begin for begin, end in pairwise(ends)]
            found.append(zip(*(leaf.split_with_sizes(sizes) for leaf in leaves), strict=True))
        steps: list[Sequence[Sequence[Leaf]]] = [*zip(*found, strict=True)]
        self.leaves = []
        if count > 1:
            steps = [share_widths(each) for each in steps]
        return steps[::-1]


def in_order(parts: Sequence[tuple[Integers, Sequence[Leaf]]], device: torch.device) -> list[Leaf]:
    """Rows that were fetched in parts, in the order that the numbers of each part give them."""
    if len(parts) == 1:
        return [*parts[0][1]]
    order = send(torch.from_numpy(np.argsort(np.concatenate([rows for rows, _ in parts]))), device)
    columns = zip(*(leaves for _, leaves in parts), strict=True)
    joined = map(joined_rows, columns)
    return [
        select(leaf, order) if isinstance(leaf, Tensor) else leaf[order.cpu().numpy()]
        for leaf in joined
    ]


def released_error() -> RuntimeError:
    """The error of a loader that outlived its shards."""
    return RuntimeError(
        "the shards of this loader were freed by teardown() or another setup(): call setup(), and"
        " ask for a new loader; a second Trainer within a fit needs a data module of its own, which"
        " data.with_options() makes"
    )
