"""Output buffers that are reused once no other object refers to their memory.

Allocating new memory costs several times as much as the copy into it, because each new page faults.
A buffer is reused only if its storage has no other owner: no view, no tensor saved for backward, no
numpy array.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_memmap._compat.tensors import storage_use_count
from lightning_memmap.loading.device_streams import has_streams

#: Factor by which memory that was too small grows beyond the request.
_SLACK = 1.25
#: The shape of one row and the dtype of each field.
Fields: TypeAlias = Sequence[tuple[tuple[int, ...], torch.dtype]]
#: Memory for the rows of a batch, a tensor for each field.
Buffers: TypeAlias = list[Tensor]


def empty_buffers(fields: Fields, num_rows: int, *, pin_memory: bool = False) -> Buffers:
    """Return new buffers on the CPU, with undefined content."""
    return [
        torch.empty((num_rows, *shape), dtype=dtype, pin_memory=pin_memory)
        for shape, dtype in fields
    ]


class BufferPool:
    """Sets of CPU buffers, one per field, that are reused once no other object refers to them."""

    def __init__(self, fields: Fields, max_slots: int = 4) -> None:
        self.fields = fields
        # If this number of sets is in use, the pool forgets the oldest one.
        self._max_slots = max_slots
        self._slots: list[Buffers] = []
        self._num_rows = 0
        #: The use count of a storage that only the pool refers to.
        self._idle_count = 0

    def get(self, num_rows: int) -> Buffers:
        """Return unused buffers, with undefined content.

        They are not reused before the last tensor that shares their memory is gone.
        """
        if num_rows > self._num_rows:
            # The size grows, and may grow again.
            self._num_rows = int(num_rows * _SLACK) if self._num_rows else num_rows
            self._slots = []
        for slot in self._slots:
            if self._is_idle(slot):
                break
        else:
            slot = empty_buffers(self.fields, self._num_rows)
            if not self._slots:
                self._idle_count = max(map(storage_use_count, slot), default=0)
            if len(self._slots) == self._max_slots:
                # The consumer keeps many batches.
                del self._slots[0]
            self._slots.append(slot)
        # New tensors, because the use counts of the pool's own tensors show which sets are idle.
        if num_rows == self._num_rows:
            # Three times as fast as slices.
            return [tensor.detach() for tensor in slot]
        return [tensor[:num_rows] for tensor in slot]

    def _is_idle(self, slot: Buffers) -> bool:
        for tensor in slot:
            if storage_use_count(tensor) > self._idle_count:
                return False
            # Another process may map memory that was sent to it.
            shared = tensor.untyped_storage().is_shared()
            if shared or tensor.is_inference() != torch.is_inference_mode_enabled():
                return False
        return True


def memory_for(
    fields: Fields, devices: Iterable[torch.device], max_slots: int
) -> Callable[[int], Buffers]:
    """Return a function that allocates CPU memory for rows that are sent to devices."""
    # Copies to a device may still read it while the next rows are fetched. torch's allocator does
    # not reuse pinned memory before they are done.
    if any(map(has_streams, devices)):
        return partial(empty_buffers, fields, pin_memory=True)
    return BufferPool(fields, max_slots).get


def byte_pool() -> Callable[[int], Tensor]:
    """Return a function that allocates bytes from a new pool, as uint8 of shape (bytes,)."""
    pool = BufferPool([((), torch.uint8)])
    return lambda num_bytes: pool.get(num_bytes)[0]
