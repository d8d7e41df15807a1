"""Streams and events of accelerators, and copies to them: everything the package knows of them.

A device without streams gets torch's stand-ins for the CPU, which do nothing: work that is enqueued
there is done at once, or in the order in which it was enqueued.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

#: Of pinned memory. Larger pieces copy no faster, and less of the work is side by side.
_PIECE_BYTES = 32 * 2**20
#: One is filled while a device copies the other.
_NUM_PIECES = 2


def stream_module(device: torch.device) -> Any:
    """The module of torch that makes the streams and events of a device."""
    try:
        module = torch.get_device_module(device)
    except RuntimeError:  # torch has no module of this type, as for "meta".
        return torch.cpu
    return module if hasattr(module, "Stream") else torch.cpu


@cache
def _side_stream(module: Any, device: torch.device, source: torch.device | None = None) -> Any:
    # Kept for the whole process: the allocator keeps memory apart by streams.
    return module.Stream(device)


def has_streams(device: torch.device) -> bool:
    """Whether a device works asynchronously, in streams."""
    return stream_module(device) is not torch.cpu


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    """A context in which a device is the one that is meant where none is named."""
    module = stream_module(device)
    with module.stream(module.current_stream(device)):
        yield


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device. Only a copy to the CPU is waited for."""
    if tensor.device == device:
        return tensor
    if tensor.device.type == "cpu" and has_streams(device) and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    # Nothing would signal the end of an asynchronous copy to the CPU.
    return tensor.to(device, non_blocking=device.type != "cpu")


def send_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of several devices on another one, whose copies are under way side by side."""
    # A copy waits for the stream that it goes to, and this for the copy: each has one of its own,
    # which begins after the last use of the memory that it may use again.
    module, sent = stream_module(device), list[Tensor]()
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
    """A side stream on each of several devices, on which coming steps are made ready."""

    def __init__(self, targets: Sequence[torch.device], others: Sequence[torch.device]) -> None:
        #: Where what is made ready lies.
        self._targets = [*dict.fromkeys(targets)]
        # The first of them comes last, so that it is the current device inside `entered`.
        devices = reversed(dict.fromkeys([*targets, *others]))
        self._streams = [
            (device, module, _side_stream(module, device))
            for device, module in ((each, stream_module(each)) for each in devices)
        ]

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
        """A context in which the side streams are the current ones."""
        with ExitStack() as stack:
            for _, module, stream in self._streams:
                stack.enter_context(module.stream(stream))
            yield

    def mark(self, tensors: Iterable[Tensor] = ()) -> dict[torch.device, Any]:
        """Record events for all work enqueued so far on the current streams of the targets, and of
        other devices where tensors are. Returns an event per device."""
        # A transform may have moved a tensor anywhere.
        elsewhere = (tensor.device for tensor in tensors if has_streams(tensor.device))
        events = {}
        for device in dict.fromkeys([*self._targets, *elsewhere]):
            module = stream_module(device)
            events[device] = module.Event()
            events[device].record(module.current_stream(device))
        return events

    def hand_over(self, events: Mapping[torch.device, Any], tensors: Iterable[Tensor]) -> None:
        """Let the current streams of devices use tensors that side streams make.

        Args:
            events: What `mark` has returned for the tensors.
            tensors: The tensors.
        """
        streams = {device: stream_module(device).current_stream(device) for device in events}
        for device, event in events.items():
            event.wait(streams[device])
        for tensor in tensors:
            if has_streams(tensor.device):
                tensor.record_stream(streams[tensor.device])


def upload(parts: Iterable[Tensor], target: Tensor) -> None:
    """Fill memory of a device with rows on the CPU, part by part. It may still be under way."""
    module, copied, done = stream_module(target.device), deque[Any](), 0
    step = max(1, _PIECE_BYTES // max(1, target[:1].nbytes))
    pieces = (part[first : first + step] for part in parts for first in range(0, len(part), step))
    for piece in pieces:
        into, done = target[done : done + len(piece)], done + len(piece)
        if not has_streams(target.device):
            into.copy_(piece)
            continue
        # From a file mapping, which is not pinned, a device would copy through the driver's own
        # small buffers. torch's host allocator gives pinned memory again only once the device has
        # copied it, and more of it until then: without a wait, it could be as much as all rows.
        if len(copied) == _NUM_PIECES:
            copied.popleft().synchronize()
        into.copy_(piece.pin_memory(), non_blocking=True)
        copied.append(module.Event())
        copied[-1].record(module.current_stream(target.device))
