"""Prefetching: the next steps are fetched and assembled while the current one is computed."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_memmap.loading.device_streams import SideStreams
from lightning_memmap.loading.nested import dense_tensors, named_leaves
from lightning_memmap.loading.super_batch import SuperBatch

#: A prefetched step: its super-batch, its batch, all tensors of it, and the events of its copies.
_Step: TypeAlias = tuple[SuperBatch, Any, list[Tensor], dict[torch.device, Any]]


def prefetched(
    coming: Iterator[SuperBatch],
    device: torch.device | None,
    data_devices: Sequence[torch.device],
    depth: int,
    deliver: Callable[[SuperBatch, Any], None],
) -> Iterator[Any]:
    """Yield the batches of an epoch, and prefetch the next ones on side streams.

    Args:
        coming: The super-batches of the epoch.
        device: The device to assemble batches on; None to yield super-batches.
        data_devices: The devices that hold the rows.
        depth: Number of steps to prefetch.
        deliver: Called with each super-batch, and with what is yielded for it, just before.
    """
    streams = SideStreams(data_devices if device is None else [device], data_devices)
    ready: deque[_Step] = deque()
    used: deque[dict[torch.device, Any]] = deque()
    error: Exception | None = None
    is_open = True
    # Copies of the rows to the devices may still be in progress.
    streams.follow()
    try:
        while True:
            while is_open and len(ready) <= depth:
                step = None
                try:
                    step = _enqueue_next(coming, device, streams)
                except Exception as caught:
                    error = caught
                if step is not None:
                    ready.append(step)
                is_open = step is not None
                del step
            if not ready:
                break
            super_batch, batch, tensors, events = ready.popleft()
            streams.hand_over(events, tensors)
            del tensors
            deliver(super_batch, batch)
            # Drop the reference, so that its memory can be reused while the consumer works.
            del super_batch
            yield batch
            del batch
            used.append(streams.mark())
            if len(used) > depth + 1:
                for event in used.popleft().values():
                    event.synchronize()
    finally:
        # Later work that frees or overwrites the rows must wait for the work that reads them.
        streams.join()
    if error is not None:
        try:
            raise error
        finally:
            # Break the reference cycle: its traceback refers to this frame.
            del error


def _enqueue_next(
    coming: Iterator[SuperBatch], device: torch.device | None, streams: SideStreams
) -> _Step | None:
    """Enqueue the work of the next step; return None at the end of the epoch."""
    with streams.entered():
        super_batch = next(coming, None)
        if super_batch is None:
            return None
        batch = super_batch if device is None else super_batch.to(device)
        tensors: list[Tensor] = []
        for _, leaf in named_leaves(super_batch.batches if device is None else batch):
            tensors += dense_tensors(leaf)
        return super_batch, batch, tensors, streams.mark(tensors)
