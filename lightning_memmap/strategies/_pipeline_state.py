"""What the processes of pipelines exchange outside of a schedule: gradients, and checkpoints."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memmap.process_group import as_bytes, broadcast

#: Gradients are averaged over processes in tensors of about this size.
_BUCKET_BYTES = 25 * 2**20


def broadcast_tensors(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Broadcast tensors in place from the first process of a group to the others."""
    if dist.get_world_size(group) > 1:
        source = dist.get_global_rank(group, 0)
        for tensor in tensors:
            broadcast(tensor, source, group)


def _send(tensor: Tensor, group: dist.ProcessGroup, device: torch.device) -> None:
    """Send a dense tensor to the first process of a group, which calls `_receive`."""
    sent = as_bytes(tensor.detach().to(device).contiguous())
    if sent.numel():
        dist.send(sent, dist.get_global_rank(group, 0), group=group)


def _receive(
    shape: Sequence[int],
    dtype: torch.dtype,
    sender: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> Tensor:
    """Receive a tensor in the first process of a group, to the CPU."""
    received = torch.empty(shape, dtype=dtype, device=device)
    if received.numel():
        dist.recv(as_bytes(received), dist.get_global_rank(group, sender), group=group)
    return received.cpu()


def average_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average the gradient of each parameter over the processes of a group, which all call this.

    A missing gradient counts as zero. A parameter without a gradient on any process gets none.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return
    by_dtype = itertools.groupby(parameters, lambda parameter: parameter.dtype)
    for same in (list(same) for _, same in by_dtype):
        # In the order of the module. One larger than a bucket has its own.
        sums = itertools.accumulate(parameter.nbytes for parameter in same)
        numbers = (num_bytes // _BUCKET_BYTES for num_bytes in sums)
        pairs = zip(numbers, same, strict=True)
        for _, bucket in itertools.groupby(pairs, lambda pair: pair[0]):
            _average_bucket([parameter for _, parameter in bucket], size, group)


def _average_bucket(
    parameters: Sequence[nn.Parameter], size: int, group: dist.ProcessGroup
) -> None:
    grads = [parameter.grad for parameter in parameters]
    # One number per parameter: on how many processes it has a gradient. The program waits for the
    # device only where that is in question.
    is_known = all(grad is not None for grad in grads)
    counts = (
        parameters[0].new_ones(len(grads))
        if is_known
        else parameters[0].new_tensor([float(grad is not None) for grad in grads])
    )
    flattened = [
        torch.zeros_like(parameter).flatten() if grad is None else grad.flatten()
        for parameter, grad in zip(parameters, grads, strict=True)
    ]
    flat = torch.cat([counts, *flattened]).detach()
    # Before the sum, which in float16 might be infinite.
    flat[len(grads) :].div_(size)
    dist.all_reduce(flat, group=group)
    found = [True] * len(grads) if is_known else flat[: len(grads)].bool().tolist()
    flat = flat[len(grads) :]
    for parameter, count, mean in zip(
        parameters, found, flat.split_with_sizes([p.numel() for p in parameters]), strict=True
    ):
        if not count:
            continue
        if parameter.grad is None:
            parameter.grad = mean.view_as(parameter).clone()
        else:
            parameter.grad.copy_(mean.view_as(parameter))


@dataclass(frozen=True)
class StageStates:
    """The states of all stages of a pipeline, gathered on its first process.

    All processes of the pipeline must call its methods.

    Args:
        module: The module, of which this process has its own stages alone.
        rank: This process's rank in the pipeline.
        group: The processes of the pipeline.
        device: The device of this process.
    """

    module: LightningModule
    rank: int
    group: dist.ProcessGroup
    device: torch.device

    def of_module(self, owners: Mapping[int, int]) -> dict[str, Any]:
        """The state of the whole module on the first process; ``owners`` are by ``id``."""
        tensors = self.module.state_dict(keep_vars=True)
        found = self.module.state_dict()
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor) or not (owner := owners.get(id(tensor), 0)):
                continue
            if self.rank == owner:
                _send(found[name], self.group, self.device)
            elif self.rank == 0:
                found[name] = _receive(tensor.shape, tensor.dtype, owner, self.group, self.device)
        return found if self.rank == 0 else {}

    def of_others(self, state: dict[int, Any]) -> dict[int, Any]:
        """The state of an optimizer for the parameters of all other stages, tensor by tensor.

        ``state`` is that for the parameters of this process, by their number.
        """
        if self.rank != 0:
            without_tensors = apply_to_collection(state, Tensor, _Absent.of)
            dist.gather_object(without_tensors, None, 0, self.group)
            apply_to_collection(state, Tensor, _send, self.group, self.device)
            return {}
        every: list[Any] = [None] * dist.get_world_size(self.group)
        dist.gather_object(None, every, 0, self.group)
        found: dict[int, Any] = {}
        for sender, other in enumerate(every[1:], 1):

            def receive(absent: _Absent, sender: int = sender) -> Tensor:
                return _receive(absent.shape, absent.dtype, sender, self.group, self.device)

            found.update(apply_to_collection(other, _Absent, receive))
        return found


def local_weights(module: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of a whole module, as a process loads them that has only some stages."""
    state = module.state_dict()
    remote = {name for name, t in state.items() if isinstance(t, Tensor) and t.is_meta}
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


@dataclass(frozen=True)
class _Absent:
    """Stands for a tensor that comes by itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "_Absent":
        return cls(tuple(tensor.shape), tensor.dtype)
