"""Collectives of pipelines outside of a schedule: for outputs, gradients and states."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_memmap._compat.tensors import copy_all
from lightning_memmap.process_group import broadcast
from lightning_memmap.strategies.common.buckets import flatten, take_buckets, unflatten

#: Gradients are averaged over processes in tensors of about this size.
_BUCKET_BYTES = 25 * 2**20


def broadcast_nested(
    value: Any,
    source: int,
    group: dist.ProcessGroup,
    device: torch.device,
    keep: Callable[[Tensor], Any] = Tensor.detach,
) -> Any:
    """Broadcast any nesting of tensors and other values, tensor by tensor.

    Args:
        value: The value, on the source.
        source: Global rank of the source.
        group: The processes, all of which call this.
        device: The device on which tensors are sent.
        keep: Called with each tensor; what it returns takes the place of the tensor.
    """
    tensors: list[Tensor] = []
    structure = [None]
    if dist.get_rank() == source:
        apply_to_collection(value, Tensor, tensors.append)
        structure = [apply_to_collection(value, Tensor, lambda tensor: tensor.to("meta"))]
    dist.broadcast_object_list(structure, source, group, device)
    to_send = iter(tensors)

    def send_or_receive(like: Tensor) -> Any:
        ours = next(to_send, None)
        tensor = torch.empty_like(like, device=device) if ours is None else ours.to(device)
        broadcast(tensor, source, group)
        return keep(tensor)

    return apply_to_collection(structure[0], Tensor, send_or_receive)


def average_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average the gradient of each parameter over the processes of a group, which all call this."""
    size = dist.get_world_size(group)
    if size == 1:
        return
    for bucket in take_buckets(parameters, _BUCKET_BYTES):
        missing = [index for index, parameter in enumerate(bucket) if parameter.grad is None]
        # One number per parameter: on how many processes it has a gradient.
        counts = bucket[0].detach().new_ones(len(bucket))
        for index in missing:
            counts[index] = 0
            bucket[index].grad = torch.zeros_like(bucket[index])
        grads: list[Any] = [parameter.grad for parameter in bucket]
        # Divided before the sum, which in float16 might be infinite.
        flat = flatten([counts, *grads]).div_(size)
        dist.all_reduce(flat, group=group)
        counts, *means = unflatten(flat, [counts, *grads])
        copy_all(grads, means)
        # The program waits for the device only where a gradient is missing.
        for index in missing:
            if counts[index] == 0:
                bucket[index].grad = None


def gather_entries(
    entries: Mapping[Any, Any], group: dist.ProcessGroup, device: torch.device
) -> dict[Any, Any]:
    """Merge the entries of all ranks on the group's first rank; return {} on other ranks.

    Tensors are sent one by one, to the CPU. If several ranks have an entry, the first of them is
    used.
    """
    first, *other_ranks = dist.get_process_group_ranks(group)
    is_first = dist.get_rank() == first
    merged = dict(entries) if is_first else {}
    for rank in other_ranks:
        keep = Tensor.cpu if is_first else lambda _: None
        received = broadcast_nested(entries, rank, group, device, keep)
        merged = {**received, **merged} if is_first else {}
    return merged
