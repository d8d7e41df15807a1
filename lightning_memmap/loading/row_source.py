"""Row sources, which hold the rows of some shards, and the rows that are fetched from them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
from operator import sub
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.integers import Integers
from lightning_memmap.loading.buffers import Buffers
from lightning_memmap.loading.device_streams import send
from lightning_memmap.loading.nested import rows_of_device
from lightning_memmap.loading.packed_rows import PackedRows, concatenate_packs
from lightning_memmap.loading.step_weight import StepWeight
from lightning_memmap.loading.variable_rows import VariableRows, concatenate_rows, share_widths
from lightning_memmap.sampling.sampler import Sampler
from lightning_memmap.schema.fields import select

#: The rows of one field: a tensor, or rows that differ in length and aren't copied yet.
FieldRows: TypeAlias = Tensor | VariableRows | PackedRows


class Cut(NamedTuple):
    """The pieces to take of rows that differ in length, int64 of shape (B,) each."""

    starts: Integers  # The first item of each piece in its row.
    lengths: Integers  # The items of each piece.


class Take(Protocol):
    """Copies rows into a batch, one leaf of length B per field.

    The slots come from `RowSource.locate`, int64 of shape (B,), on the source's device, or on the
    CPU if the rows of any field differ in length. On the CPU, fields whose rows have one shape are
    copied into the buffers. Text isn't cut.
    """

    def __call__(
        self, slots: Tensor, out: Buffers | None = None, cut: Cut | None = None
    ) -> Sequence[FieldRows]:
        """Copy the rows in some slots, or pieces of them."""


class RowSource(ABC):
    """Rows of some shards, in memory or in files that are read block by block."""

    device: torch.device  # The device of the rows that are fetched.
    is_released = False  # Whether the rows were freed.

    @abstractmethod
    def locate(self, sampler: Sampler, epoch: int, positions: range | Integers) -> Integers:
        """Return the slots of the rows at positions; undefined for rows of other sources.

        Args:
            sampler: The order.
            epoch: Epoch, counted from 0.
            positions: The positions; for documents of packs, the position of each document's pack.
        """

    @abstractmethod
    def epoch(self, sampler: Sampler, epoch: int, position: int) -> AbstractContextManager[Take]:
        """Open a function that fetches the rows of an epoch in order, from a position on."""

    def release(self) -> None:
        """Free the rows. A Trainer may keep loaders longer: they return no more batches."""
        self.is_released = True


class Steps(NamedTuple):
    """Consecutive steps of an epoch."""

    epoch: int
    first_step: int  # The index of the first one in the epoch.
    positions: range  # The positions of all steps that this process serves.
    local_sizes: list[int]  # Positions of each step that this process serves.
    weights: list[StepWeight]  # The weight of this process's loss in each step.


@dataclass
class Fetched:
    """The rows of some steps, for each receiver: one device for all rows, or every data device.

    With ``R`` receivers, row ``j`` of the steps goes to receiver ``(first_receiver + j) % R``.
    """

    steps: Steps
    first_receiver: int  # The receiver of the first row.
    leaves: list[list[FieldRows]]  # By receiver: one per field, and then dataset rows, if wanted.
    devices: Sequence[torch.device]  # By receiver.

    def rows_of(self, receiver: int) -> slice:
        """Return which rows of the steps a receiver has."""
        return rows_of_device(receiver, self.first_receiver, len(self.devices))

    def append_rows(self, rows: Tensor) -> None:
        """Append the dataset rows of all steps to the leaves."""
        for receiver, (leaves, device) in enumerate(zip(self.leaves, self.devices, strict=True)):
            leaves.append(send(rows[self.rows_of(receiver)].contiguous(), device))

    def by_step(self) -> list[list[Sequence[FieldRows]]]:
        """Split the leaves by step and receiver, last step first, and drop them here."""
        bounds = [0, *accumulate(self.steps.local_sizes)]
        count = len(self.devices)
        steps_by_receiver = []
        for receiver, leaves in enumerate(self.leaves):
            start = self.rows_of(receiver).start
            # Lists of a few steps are faster than arrays.
            stops = [(bound - start + count - 1) // count for bound in bounds]
            sizes = [*map(sub, stops[1:], stops)]
            split = (leaf.split_with_sizes(sizes) for leaf in leaves)
            steps_by_receiver.append(zip(*split, strict=True))
        self.leaves = []
        of_step: Callable[..., Any] = list if count == 1 else share_widths
        return [*map(of_step, zip(*steps_by_receiver, strict=True))][::-1]


def merge_in_order(
    fetched: Sequence[tuple[Integers, Sequence[FieldRows]]], device: torch.device
) -> list[FieldRows]:
    """Merge rows that were fetched separately.

    Args:
        fetched: The indices of rows in the result, and their leaves.
        device: The device of the leaves.
    """
    if len(fetched) == 1:
        return [*fetched[0][1]]
    indices = np.concatenate([rows for rows, _ in fetched])
    permutation = send(torch.from_numpy(np.argsort(indices)), device)
    columns = zip(*(leaves for _, leaves in fetched), strict=True)
    return [
        select(leaf, permutation) if isinstance(leaf, Tensor) else leaf[permutation.cpu().numpy()]
        for leaf in map(_concatenate, columns)
    ]


def _concatenate(parts: Sequence[FieldRows]) -> FieldRows:
    """Concatenate rows of one field from several sources."""
    packed = [part for part in parts if isinstance(part, PackedRows)]
    return concatenate_packs(packed) if packed else concatenate_rows(parts)  # type: ignore[arg-type]


def released_error() -> RuntimeError:
    """Make the error of a loader that outlived its shards."""
    return RuntimeError(
        "the shards of this loader were freed by teardown() or another setup(). Call setup() and"
        " create a new loader. A second Trainer within a fit needs another data module: see"
        " data.with_options()."
    )
