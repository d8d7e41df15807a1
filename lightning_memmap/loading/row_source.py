"""Row sources: rows of some shards in one place, and how they come into a batch.

A source knows where the rows are: resident on a device, in host memory, in the file mapping,
or in files that are read window by window. For each epoch it gives `EpochRows`, which follow the
order of a sampler.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeAlias

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
    """Whether the rows of a field differ in shape.

    Args:
        fields: Shape of one row and dtype of each field.
    """
    return any(None in shape for shape, _ in fields)


def fixed_fields(fields: Sequence[FieldRows]) -> Fields:
    """The fields whose rows have one shape.

    Args:
        fields: Shape of one row and dtype of each field.
    """
    return [(shape, dtype) for shape, dtype in fields if None not in shape]  # type: ignore[misc]


class EpochRows(Protocol):
    """The rows of one source in the order of one epoch."""

    @property
    def device(self) -> torch.device:
        """Where rows are fetched."""

    @property
    def fields(self) -> Sequence[FieldRows]:
        """Shape of one row and dtype of each field that this process needs. None stands for
        dimensions that differ from row to row."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over these fields."""

    def locate(self, positions: range) -> Integers:
        """Where the rows lie that supply positions; undefined for rows of other sources.

        Args:
            positions: As for `lightning_memmap.sampling.Sampler.at`.

        Returns:
            What `fetch` takes, int64 of shape (len(positions),).
        """

    def fetch(
        self,
        locations: Tensor,
        out: Buffers | None = None,
        *,
        pin_memory: bool = False,
    ) -> Sequence[Leaf]:
        """Copy rows into a batch.

        Args:
            locations: Of `locate`, int64 of shape (B,), on this device, or on the CPU where a field
                has dimensions that differ. Epochs that are read window by window must be fetched in
                their order.
            out: Buffers to copy into, for the fields whose rows have one shape, where the rows are
                on a CPU. New ones are made where it is None.
            pin_memory: Whether new buffers are page-locked, for copies to a device. torch's host
                allocator uses their memory again once they are freed and the copies are done.

        Returns:
            One tensor of shape (B, *field shape) for each of these fields, on this device, or
            `VariableRows`, which are not copied yet.

        Raises:
            IndexError: A location is outside the rows of this source.
            OSError: The disk cannot be read.
            StoreError: A file is shorter than it was when the store was opened.
            RuntimeError: The source was released.
        """


class RowSource(Protocol):
    """Rows of some shards in one place."""

    @property
    def device(self) -> torch.device:
        """Where rows are fetched."""

    @property
    def is_released(self) -> bool:
        """Whether the rows were freed."""

    def check_sampler(self, sampler: Sampler) -> None:
        """Check that rows can be fetched in the order of a sampler.

        Args:
            sampler: The order.

        Raises:
            ValueError: They cannot.
        """

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
        """Free the rows.

        A Trainer keeps loaders long after it has used them. Those over this source give no more
        batches.
        """


class RandomAccessRows(ABC):
    """A row source whose rows can be fetched in any order."""

    #: Where rows are fetched.
    device: torch.device
    #: Shape of one row and dtype of each field; see `EpochRows.fields`.
    fields: Sequence[FieldRows]
    #: Bytes of one row over these fields.
    row_bytes: int
    is_released = False

    def check_sampler(self, sampler: object) -> None:
        """Check that a sampler is one; any order will do.

        Args:
            sampler: The order.

        Raises:
            TypeError: It is no `lightning_memmap.sampling.Sampler`, such as one of torch's.
        """
        if not isinstance(sampler, Sampler):
            raise TypeError(f"sampler={sampler!r}: give a lightning_memmap.sampling.Sampler")

    def epoch(
        self, sampler: Sampler, epoch: int, position: int
    ) -> AbstractContextManager[EpochRows]:
        """The rows in the order of an epoch; see `RowSource.epoch`. They may come in any order."""
        return nullcontext(_RandomAccessEpoch(self, sampler, epoch))

    def release(self) -> None:
        """Free the rows; see `RowSource.release`."""
        self.is_released = True

    @abstractmethod
    def locate(self, sampler: Sampler, epoch: int, positions: range) -> Integers:
        """Where the rows lie that supply positions of an epoch; see `EpochRows.locate`."""

    @abstractmethod
    def fetch(
        self, locations: Tensor, out: Buffers | None = None, *, pin_memory: bool = False
    ) -> Sequence[Leaf]:
        """Copy rows into a batch; see `EpochRows.fetch`."""


class _RandomAccessEpoch:
    """Rows in the order of one epoch."""

    def __init__(self, rows: RandomAccessRows, sampler: Sampler, epoch: int) -> None:
        self.device, self.fields, self.row_bytes = rows.device, rows.fields, rows.row_bytes
        self._rows, self._sampler, self._epoch = rows, sampler, epoch

    def locate(self, positions: range) -> Integers:
        return self._rows.locate(self._sampler, self._epoch, positions)

    def fetch(
        self,
        locations: Tensor,
        out: Buffers | None = None,
        *,
        pin_memory: bool = False,
    ) -> Sequence[Leaf]:
        if self._rows.is_released:
            raise released_error()
        return self._rows.fetch(locations, out, pin_memory=pin_memory)


def released_error() -> RuntimeError:
    """The error of a loader that outlived its shards.

    Returns:
        The error, to be raised by the caller.
    """
    return RuntimeError(
        "the shards of this loader were freed by teardown() or another setup(): call setup(), and"
        " ask for a new loader; a second Trainer within a fit needs a data module of its own, which"
        " data.with_options() makes"
    )
