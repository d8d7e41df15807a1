"""Weights and gradients that go from one device to others, many small ones at once."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_memmap._compat.tensors import add_tensors
from lightning_memmap.loading.device_streams import send
from lightning_memmap.strategies._buckets import buckets

#: Bytes that one GPU sends to the others at a time.
BUCKET_BYTES = 64 * 2**20


def add_gradients(sums: dict[nn.Parameter, Tensor], grads: dict[nn.Parameter, Tensor]) -> None:
    """Add gradients on one device, in place.

    Args:
        sums: By parameter, what is added to.
        grads: By parameter, what is added.
    """
    dense = []
    for parameter, grad in grads.items():
        if parameter not in sums:
            sums[parameter] = grad
        elif grad.is_sparse or sums[parameter].is_sparse:
            sums[parameter] = sums[parameter] + grad
        else:
            dense.append(parameter)
    if dense:
        add_tensors([sums[p] for p in dense], [grads[p] for p in dense])


def copies_on(
    tensors: list[Tensor], devices: Sequence[torch.device]
) -> dict[torch.device, list[Tensor]]:
    """Copies of tensors on other devices, each of which gets them at once.

    Devices that have them pass them on: a device sends them no more than log2 times.

    Args:
        tensors: Tensors of one dtype, on the first device.
        devices: The devices, each once.

    Returns:
        By device, its tensors; on the first device the given ones.
    """
    found = {devices[0]: tensors}
    flat = [_flattened(tensors)]
    for index, device in enumerate(devices[1:], 1):
        sender = index - 2 ** (index.bit_length() - 1)
        flat.append(send(flat[sender], device))
        found[device] = _split_like(flat[index], tensors)
    return found


def brought(grads: dict[nn.Parameter, Tensor], device: torch.device) -> dict[nn.Parameter, Tensor]:
    """Gradients of another device on this one, many small ones at once.

    Args:
        grads: The gradients by parameter, all on one device.
        device: Where they are brought.
    """
    found = {p: grad.to(device) for p, grad in grads.items() if grad.is_sparse}
    dense = [p for p in grads if p not in found]
    for group in buckets([grads[p] for p in dense], BUCKET_BYTES):
        tensors = [grads[p] for p in dense[group]]
        flat = send(_flattened(tensors), device)
        found.update(zip(dense[group], _split_like(flat, tensors), strict=True))
    return found


def _flattened(tensors: list[Tensor]) -> Tensor:
    flat = [tensor.reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _split_like(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    parts = flat.split_with_sizes([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
