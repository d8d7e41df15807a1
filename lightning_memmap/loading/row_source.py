"""Row sources: rows of some shards in one place, and how they come into a batch."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from lightning_memmap.loading.buffers import Buffers, Fields
from lightning_memmap.loading.variable_rows import VariableRows
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


def released_error() -> RuntimeError:
    """The error of a loader that outlived its shards."""
    return RuntimeError(
        "the shards of this loader were freed by teardown() or another setup(): call setup(), and"
        " ask for a new loader; a second Trainer within a fit needs a data module of its own, which"
        " data.with_options() makes"
    )
