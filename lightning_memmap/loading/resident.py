"""Resident rows: copied to a device or to memory of the host, or in the file mapping."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_memmap.loading.buffers import Buffers, copy_rows
from lightning_memmap.loading.device_streams import has_streams
from lightning_memmap.loading.row_source import RandomAccessRows
from lightning_memmap.loading.store_offsets import StoreOffsets
from lightning_memmap.loading.upload import Uploader
from lightning_memmap.sampling import Integers, Sampler

#: Rows that lie apart whose offsets are computed at once.
_READ_ROWS = 2**16


class ResidentRows(RandomAccessRows):
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
        #: The rows; nothing once they are released.
        self.memory = Buffers.of(tensors)
        self.row_bytes = self.memory.row_bytes

    @override
    def release(self) -> None:
        super().release()
        self.memory = Buffers([], [])

    @override
    def locate(self, sampler: Sampler, epoch: int, positions: range) -> Integers:
        if isinstance(self._starts, StoreOffsets):
            return self._starts.of(*sampler.at(epoch, positions))
        return sampler.row_offsets(epoch, positions, self._starts)

    @override
    def fetch(
        self, locations: Tensor, out: Buffers | None = None, *, pin_memory: bool = False
    ) -> list[Tensor]:
        if self.device.type != "cpu":
            return [tensor.index_select(0, locations) for tensor in self.memory.tensors]
        if out is None:
            out = Buffers.empty(self.fields, len(locations), pin_memory=pin_memory)
        copy_rows(self.memory, locations, out)
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
    return ResidentRows(tensors, offsets if offsets.starts is None else offsets.starts)


def copied_rows(
    mapped: Sequence[Tensor],
    offsets: StoreOffsets,
    shards: list[int],
    device: torch.device,
) -> ResidentRows:
    """Rows of a store that are copied to a device, in long reads, each shard once.

    Args:
        mapped: A mapped tensor for each field that this process needs, with all rows of the store.
        offsets: Where the rows of the split lie in them.
        shards: The shards of the split to copy.
        device: Where to.

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
            target = torch.empty(shape, dtype=stored.dtype, device=device)
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
        assert offsets.starts is not None
        start = int(offsets.starts[shard]) + first
        out.copy_(mapped[start : start + len(out)])

    def read_apart(first: int, out: Tensor) -> None:
        # The rows of a re-striped shard and of an index view lie apart.
        for begin in range(0, len(out), _READ_ROWS):
            piece = out[begin : begin + _READ_ROWS]
            rows = np.arange(len(piece), dtype=np.int64) + (first + begin)
            found = offsets.of(np.full_like(rows, shard), rows)
            if piece.device.type == "cpu":
                torch.index_select(mapped, 0, torch.from_numpy(found), out=piece)
            else:
                piece.copy_(mapped.index_select(0, torch.from_numpy(found)))

    return read_apart if offsets.starts is None else read
