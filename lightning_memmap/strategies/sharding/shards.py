"""The state of a plain optimizer, for the shards of this process."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer


def distributed(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Shard the state of a plain optimizer.

    Args:
        state: What its ``state_dict`` has returned, on the CPU.
        optimizer: The optimizer that takes it, of sharded parameters.

    Returns:
        The state, in which tensors of a parameter's shape are sharded like it.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]

    def distribute(value: Any, parameter: Tensor) -> Any:
        if not isinstance(parameter, DTensor) or not isinstance(value, Tensor):
            return value
        if value.shape != parameter.shape:
            return value
        # Each rank reads its shard from the file, to where its shard of the parameter is.
        sharded: Any = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
        _copy_shard(sharded, value)
        return sharded

    values = {
        number: {
            name: distribute(value, parameter) for name, value in state["state"][number].items()
        }
        for number, parameter in zip(numbers, parameters, strict=False)
        if number in state["state"]
    }
    return {**state, "state": values}


def _copy_shard(target: DTensor, whole: Tensor) -> None:
    """Copy the part of a tensor that this process holds of a sharded one."""
    mesh = target.device_mesh
    for dimension, placement in enumerate(target.placements):
        if isinstance(placement, Shard):
            # As torch shards: equal parts, but for the last ones, which may be empty.
            parts = whole.chunk(mesh.size(dimension), placement.dim)
            rank = mesh.get_local_rank(dimension)
            whole = parts[rank] if rank < len(parts) else whole.narrow(placement.dim, 0, 0)
    target.to_local().copy_(whole)
