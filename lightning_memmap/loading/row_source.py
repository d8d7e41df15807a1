"""Row sources: rows of some shards in one place, and how they come into a batch."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

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


class EpochRows(ABC):
    """The rows of one source in the order of one epoch."""

    #: Where rows are fetched.
    device: torch.device
    #: Shape of one row and dtype of each field that this process needs.
    fields: Sequence[FieldRows]
    #: Bytes of one row over these fields.
    row_bytes: int
    #: The most steps that are fetched at once.
    max_steps = 64

    @abstractmethod
    def locate(self, sampler: Sampler, epoch: int, positions: range) -> Integers:
        """Where the rows lie that supply positions; undefined for rows of other sources.

        Args:
            sampler: The order.
            epoch: Epoch, counted from 0.
            positions: As for `lightning_memmap.sampling.Sampler.at`.

        Returns:
            What `fetch` takes, int64 of shape (len(positions),).
        """

    @abstractmethod
    def fetch(
        self, slots: Tensor, out: Buffers | None = None, *, pin_memory: bool = False
    ) -> Sequence[Leaf]:
        """Copy rows into a batch.

        Args:
            slots: Of `locate`, int64 of shape (B,), on this device, or on the CPU where a field
                has dimensions that differ. Rows that are read block by block must be fetched in
                the order of their epoch.
            out: Buffers to copy into, for the fields whose rows have one shape, where the rows are
                on a CPU. New ones are made where it is None.
            pin_memory: Whether new buffers are pinned, for copies to a device. torch's host
                allocator uses their memory again once they are freed and the copies are done.

        Returns:
            One tensor of shape (B, *field shape) for each of these fields, on this device, or
            `VariableRows`, which are not copied yet.

        Raises:
            IndexError: A slot is outside the rows of this source.
            OSError: The disk cannot be read.
            StoreError: A file is shorter than it was when the store was opened.
            RuntimeError: The source was released.
        """


class RowSource(ABC):
    """Rows of some shards in one place: in memory, or in files that are read block by block."""

    #: Where rows are fetched.
    device: torch.device
    #: Whether the rows were freed.
    is_released = False

    def check_sampler(self, sampler: object) -> None:
        """Check that rows can be fetched in the order of a sampler.

        Args:
            sampler: The order.

        Raises:
            TypeError: It is no `lightning_memmap.sampling.Sampler`, such as one of torch's.
            ValueError: They cannot.
        """
        if not isinstance(sampler, Sampler):
            raise TypeError(f"sampler={sampler!r}: give a lightning_memmap.sampling.Sampler")

    @abstractmethod
    def epoch(
        self, sampler: Sampler, epoch: int, position: int
    ) -> AbstractContextManager[EpochRows]:
        """The rows in the order of an epoch.

        Args:
            sampler: The order, which `check_sampler` accepts.
            epoch: Epoch, counted from 0.
            position: The first position that will be fetched.

        Returns:
            A context manager that gives the rows. At its end, threads that read them have ended.
        """

    def release(self) -> None:
        """Free the rows. Loaders over them, which a Trainer keeps long, give no more batches."""
        self.is_released = True


class RandomAccessRows(RowSource, EpochRows):
    """A source whose rows may come in any order."""

    @override
    def epoch(
        self, sampler: Sampler, epoch: int, position: int
    ) -> AbstractContextManager[EpochRows]:
        return nullcontext(self)


def released_error() -> RuntimeError:
    """The error of a loader that outlived its shards."""
    return RuntimeError(
        "the shards of this loader were freed by teardown() or another setup(): call setup(), and"
        " ask for a new loader; a second Trainer within a fit needs a data module of its own, which"
        " data.with_options() makes"
    )
