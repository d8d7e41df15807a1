"""Prefetch: coming steps are made ready while the present one is computed."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_memmap.loading.device_streams import SideStreams, has_streams
from lightning_memmap.loading.nested import dense_tensors, named_leaves
from lightning_memmap.loading.super_batch import SuperBatch

#: A step that was enqueued and not yet delivered: its batch, all tensors of it, and events.
_Ready: TypeAlias = tuple[SuperBatch, Any, list[Tensor], dict[torch.device, Any]]

#: Steps to prefetch for a device that works asynchronously.
_DEFAULT_STEPS = 2


def default_prefetch(device: torch.device) -> int:
    """Return the steps to prefetch for a consumer on a device, where nothing else is asked for."""
    return _DEFAULT_STEPS if has_streams(device) else 0


def prefetched(
    coming: Iterator[SuperBatch],
    device: torch.device | None,
    data_devices: Sequence[torch.device],
    depth: int,
    deliver: Callable[[SuperBatch], None],
) -> Iterator[Any]:
    """The batches of an epoch, assembled on a device, or with None its super-batches as they are,
    made ready some steps ahead."""
    streams = SideStreams(data_devices if device is None else [device], data_devices)
    ready: deque[_Ready] = deque()
    used: deque[dict[torch.device, Any]] = deque()
    error: Exception | None = None
    is_open = True
    # The rows may have been brought to the devices just now.
    streams.follow()
    try:
        while True:
            while is_open and len(ready) <= depth:
                try:
                    step = _make_next(coming, device, streams)
                except Exception as caught:
                    error, step = caught, None
                if step is not None:
                    ready.append(step)
                is_open = step is not None
                del step
            if not ready:
                break
            super_batch, batch, tensors, events = ready.popleft()
            deliver(super_batch)
            streams.hand_over(events, tensors)
            del tensors
            # Not referenced while the consumer works: its memory may be free by then.
            del super_batch
            yield batch
            del batch
            used.append(streams.mark())
            if len(used) > depth + 1:
                for event in used.popleft().values():
                    event.synchronize()
    finally:
        # Work that frees or overwrites the rows later must come after the work that reads them.
        streams.join()
    if error is not None:
        try:
            raise error
        finally:
            # Its traceback refers to this frame, and so would the error to itself.
            del error


def _make_next(
    coming: Iterator[SuperBatch], device: torch.device | None, streams: SideStreams
) -> _Ready | None:
    """Enqueue the next step, if there is one."""
    with streams.entered():
        super_batch = next(coming, None)
        if super_batch is None:
            return None
        batch = super_batch if device is None else super_batch.to(device)
        parts = super_batch.batches if device is None else batch
        tensors = [each for _, leaf in named_leaves(parts) for each in dense_tensors(leaf)]
        return super_batch, batch, tensors, streams.mark(tensors)
