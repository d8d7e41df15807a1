"""Many small tensors as few large ones, to be sent at once."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def buckets(tensors: Sequence[Tensor], max_bytes: int) -> Iterator[list[Any]]:
    """Consecutive tensors of one dtype, up to a size."""
    bucket: list[Any] = []
    num_bytes = 0
    for tensor in tensors:
        is_full = num_bytes + tensor.nbytes > max_bytes
        if bucket and (is_full or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(tensor)
        num_bytes += tensor.nbytes
    if bucket:
        yield bucket


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """The values of tensors of one dtype, one after the other, of shape (values,)."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def split_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of what `flattened` returned, in the shapes of the tensors."""
    parts = flat.split_with_sizes([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
