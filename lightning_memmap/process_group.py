"""Broadcasts tensors of any dtype, and leaves the process group at the end of a program."""

import atexit
from collections.abc import Iterable
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor


@cache
def leave_group_at_exit() -> None:
    """Register the process to leave its process group before the interpreter ends."""
    # Lightning does this for ``nccl`` alone. Threads of gloo that outlive the interpreter
    # occasionally abort the process (SIGABRT), after all of its work is done.
    atexit.register(_leave_group)


def _leave_group() -> None:
    if dist.is_available() and dist.is_initialized() and dist.get_backend() != "nccl":
        dist.destroy_process_group()


#: Dtypes that NCCL can send only as bytes.
_UNKNOWN_TO_NCCL = {torch.int16, torch.uint16, torch.uint32, torch.uint64}


def must_send_bytes(tensor: Tensor) -> bool:
    """Return whether the dtype of a tensor is one that NCCL does not support."""
    return tensor.dtype in _UNKNOWN_TO_NCCL


def view_as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as flat uint8."""
    return tensor.detach().view(-1).view(torch.uint8)


@torch.no_grad()
def broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup | None = None) -> None:
    """Broadcast a tensor of any dtype in place; ``source`` is a global rank."""
    contiguous = tensor.detach().contiguous()
    if contiguous.numel():
        dist.broadcast(view_as_bytes(contiguous), source, group=group)
    if contiguous.data_ptr() != tensor.data_ptr():
        tensor.copy_(contiguous)


@torch.no_grad()
def broadcast_all(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Broadcast tensors of any dtypes from a group's first process in place, in one message."""
    # The largest dtypes first, so that each tensor is aligned to its item size.
    tensors = sorted(tensors, key=lambda tensor: -tensor.itemsize)
    if not tensors or dist.get_world_size(group) == 1:
        return
    message = torch.cat([view_as_bytes(tensor.contiguous()) for tensor in tensors])
    dist.broadcast(message, group=group, group_src=0)
    parts = torch.split(message, [tensor.nbytes for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
