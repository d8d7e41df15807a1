"""Tensors in buckets, so that many are sent at once."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def take_buckets(tensors: Iterable[Tensor], max_bytes: int) -> Iterator[list[Tensor]]:
    """Yield lists of tensors of one dtype and device, each of about ``max_bytes``."""
    buckets: dict[Any, list[Tensor]] = {}
    sizes: dict[Any, int] = {}
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        if kind in buckets and sizes[kind] + tensor.nbytes > max_bytes:
            yield buckets.pop(kind)
        if kind not in buckets:
            buckets[kind] = []
            sizes[kind] = 0
        buckets[kind].append(tensor)
        sizes[kind] += tensor.nbytes
    yield from buckets.values()


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate flattened tensors of one dtype."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    # A single tensor needs no copy.
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a flat tensor with the shapes of others, as views."""
    parts = torch.split(flat, [tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
