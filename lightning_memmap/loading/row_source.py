"""Row sources: rows of some shards in one place, and what is fetched of them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from lightning_memmap.loading.buffers import Buffers, Fields
from lightning_memmap.loading.device_streams import send
from lightning_memmap.loading.variable_rows import VariableRows, share_widths
from lightning_memmap.sampling import Integers, Sampler

#: One tensor per row, or rows that are not copied yet.
Leaf: TypeAlias = Tensor | VariableRows
#: The shape of one row and the dtype of a field. None stands for dimensions that differ.
FieldRows: TypeAlias = tuple[tuple[int | None, ...], torch.dtype]


def has_variable(fields: Sequence[FieldRows]) -> bool:
    """Whether the rows of a field differ in shape."""
    return any(None in shape for shape, _ in fields)


def fixed_fields(fields: Sequence[FieldRows]) -> Fields:
    """The fields whose rows have one shape."""
    return [(shape, dtype) for shape, dtype in fields if None not in shape]  # type: ignore[misc]


class EpochRows(Protocol):
    """The rows of one source in the order of one epoch."""

    def fetch(
        self, slots: Tensor, out: Buffers | None = None, *, pin_memory: bool = False
    ) -> Sequence[Leaf]:
        """Copy rows into a batch: a tensor of shape (B, *field shape) per field, or a promise.

        The slots are of `RowSource.locate`, int64 of shape (B,), on the source's device, or on the
        CPU where a field has dimensions that differ. Fields of one shape are copied into ``out``,
        or into new memory, pinned where the batch goes on to a device. Blocks of a stream come in
        the order of the epoch.
        """


class RowSource(ABC):
    """Rows of some shards in one place: in memory, or in files that are read block by block."""

    device: torch.device  # Where rows are fetched.
    fields: Sequence[FieldRows]  # Those that this process needs.
    row_bytes: int  # Of one row over these fields.
    max_steps = 64  # That are fetched at once.
    is_released = False  # Whether the rows were freed.

    def check_sampler(self, sampler: object) -> None:
        """Check that rows can be fetched in the order of a sampler."""
        if not isinstance(sampler, Sampler):
            raise TypeError(f"sampler={sampler!r}: give a lightning_memmap.sampling.Sampler")

    @abstractmethod
    def locate(self, sampler: Sampler, epoch: int, positions: range) -> Integers:
        """The slots of the rows that supply positions; undefined for rows of other sources."""

    def epoch(
        self, sampler: Sampler, epoch: int, position: int
    ) -> AbstractContextManager[EpochRows]:
        """The rows in the order of an epoch, from a position on; in any order, it is the source."""
        source: Any = self
        return nullcontext(source)

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
    leaves: list[list[Leaf]]  # Of each receiver, one per field.
    devices: Sequence[torch.device]  # Of the receivers.
    numbers: list[Tensor] = field(default_factory=list)  # The dataset rows of each receiver.

    def rows_of(self, receiver: int) -> slice:
        """Which of all rows a receiver has."""
        count = len(self.devices)
        return slice((receiver - self.first) % count, None, count)

    def number(self, rows: Tensor) -> None:
        """Add the dataset rows of all steps."""
        for receiver, device in enumerate(self.devices):
            self.numbers.append(send(rows[self.rows_of(receiver)].contiguous(), device))

    def by_step(self) -> list[Sequence[Sequence[Leaf]]]:
        """The leaves of each step and receiver, the last step first. None are left here."""
        edges, found = [0, *accumulate(self.steps.lengths)], []
        for receiver, leaves in enumerate(self.leaves):
            rows = self.rows_of(receiver)
            ends = [-(-(edge - rows.start) // rows.step) for edge in edges]
            sizes = [end - begin for begin, end in pairwise(ends)]
            leaves = [*leaves, *self.numbers[receiver : receiver + 1]]
            found.append(zip(*(leaf.split_with_sizes(sizes) for leaf in leaves), strict=True))
        steps: list[Sequence[Sequence[Leaf]]] = [*zip(*found, strict=True)]
        self.leaves, self.numbers = [], []
        if len(self.devices) > 1:
            steps = [share_widths(each) for each in steps]
        return steps[::-1]


def released_error() -> RuntimeError:
    """The error of a loader that outlived its shards."""
    return RuntimeError(
        "the shards of this loader were freed by teardown() or another setup(): call setup(), and"
        " ask for a new loader; a second Trainer within a fit needs a data module of its own, which"
        " data.with_options() makes"
    )
