"""Resident rows: copied to a device or to page-locked memory, or in the file mapping."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.loading.buffers import Buffers, copy_rows
from lightning_memmap.loading.device_streams import has_streams
from lightning_memmap.loading.row_source import EpochRows, released_error
from lightning_memmap.loading.store_offsets import StoreOffsets
from lightning_memmap.loading.upload import Uploader
from lightning_memmap.sampling import Integers, Sampler

#: Rows that lie apart whose offsets are computed at once.
_READ_ROWS = 2**16


class ResidentRows:
    """Rows of some shards in one place in memory.

    Args:
        tensors: One tensor per field, each of shape (rows here, *field shape).
        starts: Where each shard of the split starts in the tensors, int64 of shape (C,), -1 for
            shards of other sources. Or, where the tensors are the files of a store that is divided
            into other shards, where the rows lie in them.
    """

    def __init__(self, tensors: list[Tensor], starts: Integers | StoreOffsets) -> None:
        self.device = tensors[0].device
        self.fields = [(tuple(tensor.shape[1:]), tensor.dtype) for tensor in tensors]
        self._starts = starts
        self._memory: Buffers | None = Buffers.of(tensors)

    @property
    def memory(self) -> Buffers:
        """The rows.

        Raises:
            RuntimeError: They were freed.
        """
        if self._memory is None:
            raise released_error()
        return self._memory

    @property
    def is_released(self) -> bool:
        """Whether the rows were freed."""
        return self._memory is None

    def release(self) -> None:
        """Free the rows."""
        self._memory = None

    def check_sampler(self, sampler: Sampler) -> None:
        """Accept any order; see `RowSource.check_sampler`."""

    def epoch(
        self, sampler: Sampler, epoch: int, position: int
    ) -> AbstractContextManager[EpochRows]:
        """The rows in the order of an epoch; see `RowSource.epoch`."""
        return nullcontext(_ResidentEpoch(self, sampler, epoch))

    def locate(self, sampler: Sampler, epoch: int, positions: range) -> Integers:
        """Where the rows lie that supply positions; see `EpochRows.locate`.

        Args:
            sampler: The order.
            epoch: Epoch, counted from 0.
            positions: As for `lightning_memmap.sampling.Sampler.at`.

        Returns:
            Rows of the tensors, int64 of shape (len(positions),); undefined for rows of other
            sources.
        """
        if isinstance(self._starts, StoreOffsets):
            return self._starts.of(*sampler.at(epoch, positions))
        return sampler.row_offsets(epoch, positions, self._starts)


@dataclass(frozen=True)
class _ResidentEpoch:
    """Resident rows in the order of one epoch."""

    rows: ResidentRows
    sampler: Sampler
    number: int

    @property
    def device(self) -> torch.device:
        return self.rows.device

    @property
    def fields(self) -> Sequence[tuple[tuple[int, ...], torch.dtype]]:
        return self.rows.fields

    @cached_property
    def row_bytes(self) -> int:
        return self.rows.memory.row_bytes

    def locate(self, positions: range) -> Integers:
        return self.rows.locate(self.sampler, self.number, positions)

    def fetch(
        self, locations: Tensor, out: Buffers | None = None, *, pin_memory: bool = False
    ) -> list[Tensor]:
        memory = self.rows.memory
        if self.device.type != "cpu":
            return [tensor.index_select(0, locations) for tensor in memory.tensors]
        if out is None:
            out = Buffers.empty(self.fields, len(locations), pin_memory=pin_memory)
        copy_rows(memory, locations, out)
        return out.tensors


def mapped_rows(mapped: Sequence[Tensor], offsets: StoreOffsets) -> ResidentRows:
    """The rows in the file mapping of a store. Nothing is read yet.

    Args:
        mapped: A mapped tensor for each field that this process needs, with all rows of the store.
        offsets: Where the rows of the split lie in them.

    Returns:
        The rows of all shards, on the CPU.
    """
    tensors = [tensor.as_subclass(Tensor) for tensor in mapped]
    return ResidentRows(tensors, offsets.stored.starts if offsets.is_as_stored else offsets)


def copied_rows(
    mapped: Sequence[Tensor],
    offsets: StoreOffsets,
    shards: list[int],
    device: torch.device,
    *,
    pin_memory: bool,
) -> ResidentRows:
    """Rows of a store that are copied to a device, in long reads, each shard once.

    Args:
        mapped: A mapped tensor for each field that this process needs, with all rows of the store.
        offsets: Where the rows of the split lie in them.
        shards: The shards of the split to copy.
        device: Where to.
        pin_memory: Copy into page-locked memory of the host; ``device`` is the CPU then.

    Returns:
        The rows of these shards, on ``device``. All copies are done.
    """
    rows = offsets.shards.sizes[shards]
    starts = np.full(offsets.shards.num_shards, -1, np.int64)
    starts[shards] = np.cumsum(rows) - rows
    total = int(rows.sum())
    tensors = []
    with ExitStack() as stack:
        # From a file mapping, which is not page-locked, a device would copy through the driver's
        # own small buffers, and not begin before the pages are read.
        uploader = stack.enter_context(Uploader(device)) if has_streams(device) else None
        for stored in mapped:
            shape = (total, *stored.shape[1:])
            target = torch.empty(shape, dtype=stored.dtype, device=device, pin_memory=pin_memory)
            for shard, count in zip(shards, rows.tolist(), strict=True):
                shard_rows = target[starts[shard] : starts[shard] + count]
                read = _shard_reader(stored.as_subclass(Tensor), offsets, shard)
                if uploader is None:
                    read(0, shard_rows)
                else:
                    uploader.copy(shard_rows, read)
            tensors.append(target)
    return ResidentRows(tensors, starts)


def _shard_reader(
    mapped: Tensor, offsets: StoreOffsets, shard: int
) -> Callable[[int, Tensor], None]:
    """A function that fills a CPU tensor with the rows of a shard, from a given row on."""

    def read(first: int, out: Tensor) -> None:
        start = int(offsets.stored.starts[shard]) + first
        out.copy_(mapped[start : start + len(out)])

    def read_apart(first: int, out: Tensor) -> None:
        # The rows of a re-striped shard lie apart.
        for begin in range(0, len(out), _READ_ROWS):
            piece = out[begin : begin + _READ_ROWS]
            rows = np.arange(len(piece), dtype=np.int64) + (first + begin)
            found = offsets.of(np.full_like(rows, shard), rows)
            if piece.device.type == "cpu":
                torch.index_select(mapped, 0, torch.from_numpy(found), out=piece)
            else:
                piece.copy_(mapped.index_select(0, torch.from_numpy(found)))

    return read if offsets.is_as_stored else read_apart
