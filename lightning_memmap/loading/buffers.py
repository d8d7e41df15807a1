"""Output buffers that are used again as soon as nobody else holds them.

Fresh memory costs several times what the copy into it costs: each new page faults. A buffer here
is handed out again only when its storage has no other owner: no view, no tensor saved for
backward, no numpy array.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_memmap._compat.tensors import storage_use_count
from lightning_memmap.loading.device_streams import has_streams

#: Memory that takes the place of what was too small has so much more than is asked for.
_SLACK = 1.25
#: The shape of one row and the dtype of each field.
Fields: TypeAlias = Sequence[tuple[tuple[int, ...], torch.dtype]]
#: Memory for the rows of a batch, a tensor for each field.
Buffers: TypeAlias = list[Tensor]


def empty_buffers(fields: Fields, num_rows: int, *, pin_memory: bool = False) -> Buffers:
    """New buffers on the CPU, with undefined content."""
    return [
        torch.empty((num_rows, *shape), dtype=dtype, pin_memory=pin_memory)
        for shape, dtype in fields
    ]


class BufferPool:
    """Sets of CPU buffers for some fields, which are used again once nobody else holds them."""

    def __init__(self, fields: Fields, max_slots: int = 4) -> None:
        self.fields = fields
        # Where so many sets are in use, the oldest one is left to its user.
        self._max_slots = max_slots
        self._slots: list[Buffers] = []
        self._num_rows = self._idle_count = 0

    def get(self, num_rows: int) -> Buffers:
        """Buffers that nobody else holds, with undefined content.

        They stay the caller's until the last tensor that shares their memory is gone.
        """
        if num_rows > self._num_rows:
            # More again than before: the next ones may need more still.
            self._num_rows = int(num_rows * _SLACK) if self._num_rows else num_rows
            self._slots = []
        for slot in self._slots:
            if self._is_idle(slot):
                return self._handed_out(slot, num_rows)
        slot = empty_buffers(self.fields, self._num_rows)
        if not self._slots:
            self._idle_count = max(map(storage_use_count, slot), default=0)
        if len(self._slots) == self._max_slots:
            # The user keeps many batches. The oldest set does not come back to the pool.
            del self._slots[0]
        self._slots.append(slot)
        return self._handed_out(slot, num_rows)

    def _is_idle(self, slot: Buffers) -> bool:
        for tensor in slot:
            if storage_use_count(tensor) > self._idle_count:
                return False
            # Another process may map memory that was sent to it: it is not ours any more.
            shared = tensor.untyped_storage().is_shared()
            if shared or tensor.is_inference() != torch.is_inference_mode_enabled():
                return False
        return True

    def _handed_out(self, slot: Buffers, num_rows: int) -> Buffers:
        # New tensors: the pool's own must have no more owners than they began with.
        if num_rows == self._num_rows:
            # In a third of the time of slices.
            return [tensor.detach() for tensor in slot]
        return [tensor[:num_rows] for tensor in slot]


def memory_for(
    fields: Fields, devices: Iterable[torch.device], max_slots: int
) -> Callable[[int], Buffers]:
    """Gives memory on the CPU for a number of rows that go to devices."""
    # Copies to a device may still be reading it when the next rows come: torch's allocator does not
    # hand out pinned memory again before they are done.
    if any(map(has_streams, devices)):
        return partial(empty_buffers, fields, pin_memory=True)
    return BufferPool(fields, max_slots).get


def byte_pool() -> Callable[[int], Tensor]:
    """Gives memory for a number of bytes, uint8 of shape (bytes,), from a pool of its own."""
    pool = BufferPool([((), torch.uint8)])
    return lambda num_bytes: pool.get(num_bytes)[0]
