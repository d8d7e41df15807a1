"""Uploads rows from files to a device at the speed of the slower of the two."""

from collections.abc import Callable
from types import TracebackType

import torch
from torch import Tensor

from lightning_memmap.loading.device_streams import SideStreams, has_streams

#: Of each of the two buffers. Larger ones copy no faster, and less of the work is side by side.
_BUFFER_BYTES = 32 * 2**20


class Uploader:
    """Copies rows to a device through two page-locked buffers in turn.

    While the device copies from one, the next rows are read into the other. A context manager: at
    its end all copies are done.

    Args:
        device: Where the rows go.
        buffer_bytes: Size of each buffer at most, unless a row is larger.
    """

    def __init__(self, device: torch.device, buffer_bytes: int = _BUFFER_BYTES) -> None:
        self._streams = SideStreams(device, [])
        self._is_pinned = has_streams(device)
        self._buffer_bytes = buffer_bytes
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._copied = [self._streams.mark(), self._streams.mark()]
        self._turn = 0

    def __enter__(self) -> "Uploader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for event in self._copied:
            event.synchronize()

    def copy(self, target: Tensor, read: Callable[[int, Tensor], None]) -> None:
        """Fill rows of a tensor on the device. The last copies may still run when this returns."""
        row_bytes = target[:1].nbytes
        if not row_bytes:
            return
        step = max(1, self._buffer_bytes // row_bytes)
        for first in range(0, len(target), step):
            piece = target[first : first + step]
            buffer = self._next_buffer(piece)
            read(first, buffer)
            piece.copy_(buffer, non_blocking=True)
            self._copied[self._turn] = self._streams.mark()

    def _next_buffer(self, piece: Tensor) -> Tensor:
        """The other buffer, in the shape of a piece, once no copy reads from it any more."""
        self._turn = 1 - self._turn
        self._copied[self._turn].synchronize()
        if len(self._buffers[self._turn]) < piece.nbytes:
            # Of small fields no more is page-locked than they have.
            self._buffers[self._turn] = torch.empty(
                piece.nbytes, dtype=torch.uint8, pin_memory=self._is_pinned
            )
        return self._buffers[self._turn][: piece.nbytes].view(piece.dtype).view(piece.shape)
