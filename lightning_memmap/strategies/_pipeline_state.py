"""What the processes of pipelines exchange outside of a schedule: gradients, and checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memmap.process_group import broadcast

#: Gradients are averaged over processes in tensors of about this size.
_BUCKET_BYTES = 25 * 2**20
#: Many small tensors as few large ones; torch has no public names for these functions.
_utils: Any = torch._utils


def broadcast_tensors(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Broadcast tensors in place from the first process of a group to the others."""
    if dist.get_world_size(group) > 1:
        source = dist.get_global_rank(group, 0)
        for tensor in tensors:
            broadcast(tensor, source, group)


def broadcast_nested(
    value: Any,
    source: int,
    group: dist.ProcessGroup,
    device: torch.device,
    keep: Callable[[Tensor], Any] = Tensor.detach,
) -> Any:
    """Broadcast any nesting of tensors and other values, tensor by tensor."""
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


def average_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average the gradient of each parameter over the processes of a group, which all call this."""
    size = dist.get_world_size(group)
    if size == 1:
        return
    for bucket in _utils._take_tensors(parameters, _BUCKET_BYTES):
        missing = [index for index, parameter in enumerate(bucket) if parameter.grad is None]
        # One number per parameter: on how many processes it has a gradient.
        counts = bucket[0].detach().new_ones(len(bucket))
        for index in missing:
            counts[index] = 0
            bucket[index].grad = torch.zeros_like(bucket[index])
        grads = [parameter.grad for parameter in bucket]
        # Divided before the sum, which in float16 might be infinite.
        flat = _utils._flatten_dense_tensors([counts, *grads]).div_(size)
        dist.all_reduce(flat, group=group)
        counts, *means = _utils._unflatten_dense_tensors(flat, [counts, *grads])
        torch._foreach_copy_(grads, means)
        # The program waits for the device only where a gradient is missing.
        for index in missing:
            if counts[index] == 0:
                bucket[index].grad = None


def gathered(
    own: Mapping[Any, Any], group: dist.ProcessGroup, device: torch.device
) -> dict[Any, Any]:
    """What all processes of a group have, on its first process; on others nothing."""
    first, *others = dist.get_process_group_ranks(group)
    is_first = dist.get_rank() == first
    whole = dict(own) if is_first else {}
    # Tensors come one by one, to the CPU; what several processes have, the first of them gives.
    for rank in others:
        found = broadcast_nested(own, rank, group, device, Tensor.cpu if is_first else _forget)
        whole = {**found, **whole} if is_first else {}
    return whole


def _forget(tensor: Tensor) -> None:
    """What other processes than the first keep of a tensor."""


def module_state(
    module: nn.Module, group: dist.ProcessGroup, device: torch.device
) -> dict[str, Any]:
    """The state of a whole module on the first process of its pipeline, in the module's order."""
    state = module.state_dict()
    remote = _remote(state)
    own = {name: value for name, value in state.items() if name not in remote}
    whole = gathered(own, group, device)
    return {name: whole[name] for name in state} if whole else {}


def _remote(state: Mapping[str, Any]) -> set[str]:
    """The names of what other processes of the pipeline have."""
    return {name for name, t in state.items() if isinstance(t, Tensor) and t.is_meta}


def local_weights(module: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of a whole module, as a process loads them that has only some stages."""
    remote = _remote(module.state_dict())
    return {
        name: torch.empty_like(value, device="meta") if name in remote else value
        for name, value in weights.items()
    }


def local_state(optimizer: Optimizer, state: Mapping[int, Any]) -> dict[int, Any]:
    """The state of an optimizer for those of its parameters that this process has."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    return {
        index: value
        for index, value in state.items()
        if index < len(parameters) and not parameters[index].is_meta
    }
