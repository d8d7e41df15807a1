"""Checkpoints of a pipeline: as one process would save them, from the stages of several."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memmap.strategies.pipelining.groups import receive_tensor, send_tensor


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
        """The state of the whole module.

        Args:
            owners: By the ``id`` of each parameter and buffer, the rank of the process that has it.

        Returns:
            The state on the first process; nothing on the others.
        """
        tensors = self.module.state_dict(keep_vars=True)
        found = self.module.state_dict()
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor) or not (owner := owners.get(id(tensor), 0)):
                continue
            if self.rank == owner:
                send_tensor(found[name], self.group, self.device)
            elif self.rank == 0:
                found[name] = receive_tensor(
                    tensor.shape, tensor.dtype, owner, self.group, self.device
                )
        return found if self.rank == 0 else {}

    def of_others(self, state: dict[int, Any]) -> dict[int, Any]:
        """The state of an optimizer for the parameters of all other stages, tensor by tensor.

        Args:
            state: That for the parameters of this process, by their number.

        Returns:
            That of the others on the first process; nothing on the others.
        """
        if self.rank != 0:
            without_tensors = apply_to_collection(state, Tensor, _Absent.of)
            dist.gather_object(without_tensors, None, 0, self.group)
            apply_to_collection(state, Tensor, send_tensor, self.group, self.device)
            return {}
        every: list[Any] = [None] * dist.get_world_size(self.group)
        dist.gather_object(None, every, 0, self.group)
        found: dict[int, Any] = {}
        for sender, other in enumerate(every[1:], 1):

            def receive(absent: _Absent, sender: int = sender) -> Tensor:
                return receive_tensor(absent.shape, absent.dtype, sender, self.group, self.device)

            found.update(apply_to_collection(other, _Absent, receive))
        return found


def local_weights(module: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of a whole module, as a process loads them that has only some of its stages.

    Args:
        module: The module, whose other stages are on the meta device.
        weights: Its weights by name.
    """
    state = module.state_dict()
    remote = {name for name, t in state.items() if isinstance(t, Tensor) and t.is_meta}
    return {
        name: torch.empty_like(value, device="meta") if name in remote else value
        for name, value in weights.items()
    }


def local_state(optimizer: Optimizer, state: Mapping[int, Any]) -> dict[int, Any]:
    """The state of an optimizer for those of its parameters that this process has.

    Args:
        optimizer: The optimizer of all parameters.
        state: Its state by number of the parameter.
    """
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
