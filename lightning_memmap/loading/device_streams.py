"""Streams and events of accelerators, and copies to them.

For a device without streams, torch's stand-ins for the CPU are used, which do nothing: its work is
done at once, or in the order in which it was enqueued.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

#: Size of a pinned buffer. Larger ones copy no faster, and overlap less work.
_PINNED_BYTES = 32 * 2**20
#: Number of pinned buffers: one is filled while a device copies the other.
_NUM_PINNED = 2


def stream_module(device: torch.device) -> Any:
    """Return the module of torch that creates the streams and events of a device."""
    try:
        module = torch.get_device_module(device)
    except RuntimeError:  # torch has no module of this type, as for "meta".
        return torch.cpu
    return module if hasattr(module, "Stream") else torch.cpu


@cache
def _side_stream(module: Any, device: torch.device, source: torch.device | None = None) -> Any:
    # Cached for the whole process, because the allocator has separate memory for each stream.
    return module.Stream(device)


def has_streams(device: torch.device) -> bool:
    """Return whether a device works asynchronously, in streams."""
    return stream_module(device) is not torch.cpu


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Make a device the current device."""
    module = stream_module(device)
    with module.stream(module.current_stream(device)):
        yield


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device. Only copies to the CPU are complete on return."""
    if tensor.device == device:
        return tensor
    if tensor.device.type == "cpu" and has_streams(device) and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    # The end of an asynchronous copy to the CPU would not be signaled.
    return tensor.to(device, non_blocking=device.type != "cpu")


def send_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return tensors of several devices on one device, copied concurrently."""
    # Each copy has its own stream on the target, so that it does not wait for the other copies. The
    # streams first wait for the last use of memory that they may reuse.
    module = stream_module(device)
    sent: list[Tensor] = []
    streams = [_side_stream(module, device, tensor.device) for tensor in tensors]
    now = module.current_stream(device)
    for tensor, stream in zip(tensors, streams, strict=True):
        stream.wait_stream(now)
        with module.stream(stream):
            sent.append(send(tensor, device))
    for stream in streams:
        now.wait_stream(stream)
    return sent


class SideStreams:
    """A side stream on each of several devices, on which the next steps are prefetched."""

    def __init__(self, targets: Sequence[torch.device], others: Sequence[torch.device]) -> None:
        #: The devices of prefetched batches.
        self._targets = [*dict.fromkeys(targets)]
        self._streams: list[tuple[torch.device, Any, Any]] = []
        # The first device is entered last, so that it is the current device inside `entered`.
        for device in reversed(dict.fromkeys([*targets, *others])):
            module = stream_module(device)
            self._streams.append((device, module, _side_stream(module, device)))

    def follow(self) -> None:
        """Let the side streams wait for all work enqueued on the current streams so far."""
        for device, module, stream in self._streams:
            stream.wait_stream(module.current_stream(device))

    def join(self) -> None:
        """Let the current streams wait for all work enqueued on the side streams so far."""
        for device, module, stream in self._streams:
            module.current_stream(device).wait_stream(stream)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make the side streams the current streams."""
        with ExitStack() as stack:
            for _, module, stream in self._streams:
                stack.enter_context(module.stream(stream))
            yield

    def mark(self, tensors: Iterable[Tensor] = ()) -> dict[torch.device, Any]:
        """Record an event on each target, for all work enqueued so far on its current stream.

        Args:
            tensors: Tensors whose devices are included, because a transform may have moved them.

        Returns:
            The event of each device.
        """
        elsewhere = (tensor.device for tensor in tensors if has_streams(tensor.device))
        events = {}
        for device in dict.fromkeys([*self._targets, *elsewhere]):
            module = stream_module(device)
            events[device] = module.Event()
            events[device].record(module.current_stream(device))
        return events

    def hand_over(self, events: Mapping[torch.device, Any], tensors: Iterable[Tensor]) -> None:
        """Let the current streams of devices use tensors of side streams.

        Args:
            events: The return value of `mark` for the tensors.
            tensors: The tensors.
        """
        streams = {device: stream_module(device).current_stream(device) for device in events}
        for device, event in events.items():
            event.wait(streams[device])
        for tensor in tensors:
            if has_streams(tensor.device):
                tensor.record_stream(streams[tensor.device])


def upload(parts: Iterable[Tensor], target: Tensor) -> None:
    """Fill memory of a device with rows on the CPU, part by part, without waiting for the end."""
    module = stream_module(target.device)
    copied: deque[Any] = deque()
    num_done = 0
    max_rows = max(1, _PINNED_BYTES // max(1, target[:1].nbytes))
    for part in parts:
        for start in range(0, len(part), max_rows):
            rows = part[start : start + max_rows]
            filled = target[num_done : num_done + len(rows)]
            num_done += len(rows)
            if not has_streams(target.device):
                filled.copy_(rows)
                continue
            # A file mapping is not pinned, so the driver would copy it through its own small
            # buffers. torch's host allocator reuses pinned memory only after the device has copied
            # it, and allocates more until then. Without this wait it could grow to all rows.
            if len(copied) == _NUM_PINNED:
                copied.popleft().synchronize()
            filled.copy_(rows.pin_memory(), non_blocking=True)
            copied.append(module.Event())
            copied[-1].record(module.current_stream(target.device))
