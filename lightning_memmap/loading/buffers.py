"""Output buffers that are used again as soon as nobody else holds them.

Fresh memory costs several times what the copy into it costs: each new page faults. A buffer here
is handed out again only when its storage has no other owner: no view, no tensor saved for
backward, no numpy array.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_memmap._compat.tensors import storage_use_count

#: From this size on, torch's threads share a copy. One thread alone is faster with numpy.
_SHARED_COPY_BYTES = 2**19
#: From this size on, numpy asks for huge pages.
_HUGE_BYTES = 2**22
#: Of the memory that torch makes.
_ALIGNMENT = 64
#: Memory that takes the place of what was too small has so much more than is asked for.
_SLACK = 1.25
#: The shape of one row and the dtype of each field.
Fields: TypeAlias = Sequence[tuple[tuple[int, ...], torch.dtype]]


def rows_of(tensor: Tensor) -> NDArray[Any]:
    """The rows of a contiguous CPU tensor as raw bytes, one element per row, sharing its memory."""
    num_rows, row_bytes = len(tensor), tensor.element_size() * tensor.shape[1:].numel()
    if not num_rows * row_bytes:
        return np.empty(num_rows, np.dtype((np.void, row_bytes)))
    flat = tensor.detach().reshape(num_rows, -1).view(torch.uint8).numpy()
    return flat.view(np.dtype((np.void, row_bytes)))[:, 0]


@dataclass(frozen=True)
class Buffers:
    """Memory for the rows of a batch."""

    tensors: list[Tensor]
    rows: list[NDArray[Any]]  # The same as raw bytes.

    @classmethod
    def empty(cls, fields: Fields, num_rows: int, *, pin_memory: bool = False) -> "Buffers":
        """New buffers on the CPU, with undefined content."""
        made = partial(torch.empty, pin_memory=True) if pin_memory else _empty
        tensors = [made((num_rows, *shape), dtype=dtype) for shape, dtype in fields]
        return cls(tensors, [rows_of(tensor) for tensor in tensors])


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor on the CPU with undefined content, in huge pages where it is large."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _HUGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    # numpy asks the kernel for huge pages, and torch does not.
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[begin : begin + num_bytes]).view(dtype).view(shape)


def copy_rows(
    source: Tensor,
    rows: NDArray[Any] | None,
    places: Tensor,
    out: Tensor,
    taken: NDArray[Any],
) -> None:
    """Copy the rows at some places, in their order; raw bytes are given beside the tensors."""
    if rows is None:
        # numpy, which is faster where rows lie apart, would copy all windows that overlap first.
        torch.index_select(source.flatten(1), 0, places, out=out.flatten(1))
        return
    if torch.get_num_threads() > 1 and out.nbytes >= _SHARED_COPY_BYTES:
        torch.index_select(source, 0, places, out=out)
        return
    chosen: NDArray[np.int64] = places.numpy()
    # As an unsigned integer, a negative place is larger than any other.
    if len(chosen) and (largest := int(chosen.view(np.uint64).max())) >= len(rows):
        raise IndexError(f"place {np.uint64(largest).astype(np.int64)}: outside the rows")
    # No place is outside: "clip" only saves numpy a copy.
    rows.take(chosen, out=taken, mode="clip")


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
        slot = Buffers.empty(self.fields, self._num_rows)
        if not self._slots:
            self._idle_count = max(map(storage_use_count, slot.tensors), default=0)
        if len(self._slots) == self._max_slots:
            # The user keeps many batches. The oldest set does not come back to the pool.
            del self._slots[0]
        self._slots.append(slot)
        return self._handed_out(slot, num_rows)

    def _is_idle(self, slot: Buffers) -> bool:
        for tensor in slot.tensors:
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
            return Buffers([tensor.detach() for tensor in slot.tensors], slot.rows)
        tensors = [tensor[:num_rows] for tensor in slot.tensors]
        return Buffers(tensors, [rows[:num_rows] for rows in slot.rows])


def byte_pool() -> Callable[[int], Tensor]:
    """Gives memory for a number of bytes, uint8 of shape (bytes,), from a pool of its own."""
    pool = BufferPool([((), torch.uint8)])
    return lambda num_bytes: pool.get(num_bytes).tensors[0]
