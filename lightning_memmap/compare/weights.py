"""Compares the weights of check runs at once. Only the reference's are written to a file.

The reference run writes its weights before the first step, and replaces them after the last one.
Every other run reads that file after its own last step. Before the first step, digests suffice.
Tensors are read one at a time, from a memory-mapped file.
"""

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from lightning_memmap.process_group import view_as_bytes

#: Elements that are compared in float64 at a time.
_CHUNK = 2**24


def digest_weights(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Compute the XXH3 of each tensor's bytes."""
    digests = {}
    for name, tensor in weights.items():
        plain = tensor.cpu().resolve_conj().contiguous()
        digests[name] = xxhash.xxh3_64_hexdigest(view_as_bytes(plain).numpy().data)
    return digests


def save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write the weights to a file, in place of its earlier content.

    Raises:
        OSError: The disk has not enough space. The file isn't changed.
    """
    num_bytes = sum(weight.nbytes for weight in weights.values())
    replaced_bytes = path.stat().st_size if path.exists() else 0
    free_bytes = shutil.disk_usage(path.parent).free + replaced_bytes
    if num_bytes > free_bytes:
        raise OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: the weights of the reference need {num_bytes} bytes, and"
            f" {free_bytes} are free. Free disk space, or set --out to a folder on a larger disk",
            str(path),
        )
    tensors = {}
    for name, weight in weights.items():
        tensor = weight.detach().cpu()
        # torch.save writes the whole storage of a view.
        is_view = tensor.untyped_storage().nbytes() > tensor.nbytes
        tensors[name] = tensor.clone() if is_view else tensor
    torch.save(tensors, path)


def squared_distance(weights: Mapping[str, Tensor], names: list[str], path: Path) -> float | None:
    """Sum the squared differences between weights and the weights in a file.

    Args:
        weights: Tensors by name.
        names: Names of the tensors that count.
        path: A file of `save_weights`.

    Returns:
        The sum, or None if names or shapes differ.
    """
    saved: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    shapes = {name: weight.shape for name, weight in weights.items()}
    if shapes != {name: tensor.shape for name, tensor in saved.items()}:
        return None
    total = 0.0
    for name in names:
        if name not in saved:
            continue
        left_chunks = torch.split(weights[name].detach().cpu().flatten(), _CHUNK)
        right_chunks = torch.split(saved[name].flatten(), _CHUNK)
        for a, b in zip(left_chunks, right_chunks, strict=True):
            dtype = torch.complex128 if a.is_complex() else torch.float64
            total += float((a.to(dtype) - b.to(dtype)).abs().square().sum())
    return total
