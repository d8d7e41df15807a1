"""Sending tensors of any dtype, and leaving the process group at the end of a program."""

import atexit
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor


@cache
def leave_group_at_exit() -> None:
    """Register the process to leave its process group before the interpreter ends.

    Lightning does this for the backend ``nccl`` alone, and not for ``gloo`` or
    ``cpu:gloo,cuda:nccl``. Threads of gloo that outlive the interpreter occasionally abort the
    process (SIGABRT), after all of its work is done. Calling this twice has no effect.
    """
    atexit.register(_leave_group)


def _leave_group() -> None:
    if dist.is_available() and dist.is_initialized() and dist.get_backend() != "nccl":
        dist.destroy_process_group()


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as flat uint8, on the same memory: NCCL does not know all dtypes."""
    return tensor.detach().view(-1).view(torch.uint8)


@torch.no_grad()
def broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup | None = None) -> None:
    """Broadcast a tensor of any dtype in place; ``source`` is a global rank."""
    contiguous = tensor.detach().contiguous()
    if contiguous.numel():
        dist.broadcast(as_bytes(contiguous), source, group=group)
    if contiguous.data_ptr() != tensor.data_ptr():
        tensor.copy_(contiguous)


def broadcast_nested(
    value: Any,
    source: int,
    group: dist.ProcessGroup,
    device: torch.device,
    keep: Callable[[Tensor], Any] = Tensor.detach,
) -> Any:
    """Broadcast any nesting of tensors and other values, tensor by tensor.

    Args:
        value: What the process with the global rank ``source`` gives; of others it is not used.
        source: The rank.
        group: The processes, which must all call this.
        device: The device of this process.
        keep: What becomes of each tensor as soon as it is there.

    Returns:
        The nesting, with what ``keep`` returned in place of tensors.
    """
    tensors: list[Tensor] = []
    described = [None]
    if dist.get_rank() == source:
        apply_to_collection(value, Tensor, tensors.append)
        described = [apply_to_collection(value, Tensor, lambda tensor: tensor.to("meta"))]
    dist.broadcast_object_list(described, source, group, device)
    given = iter(tensors)

    def bring(like: Tensor) -> Any:
        mine = next(given, None)
        tensor = torch.empty_like(like, device=device) if mine is None else mine.to(device)
        broadcast(tensor, source, group)
        return keep(tensor)

    return apply_to_collection(described[0], Tensor, bring)
