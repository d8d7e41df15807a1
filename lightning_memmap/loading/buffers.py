"""Output buffers that are used again as soon as nobody else holds them.

Fresh memory costs several times what the copy into it costs: each new page faults. A buffer here
is handed out again only when its storage has no other owner: no view, no tensor saved for
backward, no numpy array.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_memmap._compat.tensors import storage_use_count


class BufferPool:
    """Sets of CPU buffers, one tensor per field in each set.

    Args:
        shapes: Shape and dtype of each buffer.
        max_slots: Sets that are kept; where all are in use, the oldest is left to its user.
    """

    def __init__(
        self, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], max_slots: int = 4
    ) -> None:
        self._shapes = shapes
        self._max_slots = max_slots
        self._slots: list[list[Tensor]] = []
        self._idle_count = 0

    def get(self) -> list[Tensor]:
        """Buffers that nobody else holds, with undefined content.

        They stay the caller's until the last tensor that shares their memory is gone.
        """
        for slot in self._slots:
            if self._is_idle(slot):
                return [buffer.detach() for buffer in slot]
        slot = [torch.empty(shape, dtype=dtype) for shape, dtype in self._shapes]
        if not self._slots:
            self._idle_count = max((storage_use_count(buffer) for buffer in slot), default=0)
        if len(self._slots) == self._max_slots:
            # Somebody keeps many batches. The oldest set is theirs for good.
            del self._slots[0]
        self._slots.append(slot)
        return [buffer.detach() for buffer in slot]

    def _is_idle(self, slot: list[Tensor]) -> bool:
        for buffer in slot:
            if storage_use_count(buffer) > self._idle_count:
                return False
            # Another process may map memory that was sent to it: it is not ours any more.
            shared = buffer.untyped_storage().is_shared()
            if shared or buffer.is_inference() != torch.is_inference_mode_enabled():
                return False
        return True
