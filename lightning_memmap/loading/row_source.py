"""Row sources: rows of some shards in one place, and how they come into a batch.

A source knows where the rows are: resident on a device, in page-locked memory, in the file mapping,
or in files that are read window by window. For each epoch it gives `EpochRows`, which follow the
order of a sampler.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from lightning_memmap.loading.buffers import Buffers
from lightning_memmap.sampling import Integers, Sampler


class EpochRows(Protocol):
    """The rows of one source in the order of one epoch."""

    @property
    def device(self) -> torch.device:
        """Where rows are fetched."""

    @property
    def fields(self) -> Sequence[tuple[tuple[int, ...], torch.dtype]]:
        """Shape of one row and dtype of each field that this process needs."""

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
        self, locations: Tensor, out: Buffers | None = None, *, pin_memory: bool = False
    ) -> list[Tensor]:
        """Copy rows into a batch.

        Args:
            locations: Of `locate`, int64 of shape (B,), on this device. Epochs that are read
                window by window must be fetched in their order.
            out: Buffers to copy into, where the rows are on a CPU. New ones are made where it is
                None.
            pin_memory: Whether new buffers are page-locked, for copies to a device. torch's host
                allocator uses their memory again once they are freed and the copies are done.

        Returns:
            One tensor of shape (B, *field shape) for each of these fields, on this device.

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


def released_error() -> RuntimeError:
    """The error of a loader that outlived its shards."""
    return RuntimeError(
        "the shards of this loader were freed by teardown(): call setup(), and ask for a new loader"
    )
