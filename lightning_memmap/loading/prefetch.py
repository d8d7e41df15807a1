"""Prefetch: coming steps are made ready while the present one is computed."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch

from lightning_memmap.loading.device_streams import SideStreams
from lightning_memmap.loading.nested import dense_tensors, named_leaves
from lightning_memmap.loading.super_batch import SuperBatch

#: A step that was enqueued and not yet delivered: its super-batch, its batch, and their event.
_Ready: TypeAlias = tuple[SuperBatch, Any, Any]


def prefetched(
    coming: Iterator[SuperBatch],
    devices: Sequence[torch.device],
    depth: int,
    deliver: Callable[[], None],
) -> Iterator[Any]:
    """The assembled batches of an epoch, made ready some steps ahead."""
    device, *others = devices
    streams = SideStreams(device, others)
    ready: deque[_Ready] = deque()
    used: deque[Any] = deque()
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
            super_batch, batch, event = ready.popleft()
            deliver()
            tensors = chain.from_iterable(dense_tensors(leaf) for _, leaf in named_leaves(batch))
            streams.hand_over(event, [*tensors])
            del tensors
            # Not referenced while the consumer works: its memory may be free by then.
            del super_batch
            yield batch
            del batch
            used.append(streams.mark())
            if len(used) > depth + 1:
                used.popleft().synchronize()
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
    coming: Iterator[SuperBatch], device: torch.device, streams: SideStreams
) -> _Ready | None:
    """Enqueue the next step, if there is one."""
    with streams.entered():
        super_batch = next(coming, None)
        if super_batch is None:
            return None
        batch = super_batch.to(device)
        return super_batch, batch, streams.mark()
