"""Whole and local states of modules and optimizers under ``memmap_pipeline``, for checkpoints."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memmap.strategies.pipelining.exchange import gather_entries


def gather_module_state(
    module: nn.Module, group: dist.ProcessGroup, device: torch.device
) -> dict[str, Any]:
    """Return the state of the whole module on the pipeline's first rank, in the module's order."""
    state = module.state_dict()
    remote = _remote_names(state)
    local = {name: value for name, value in state.items() if name not in remote}
    merged = gather_entries(local, group, device)
    return {name: merged[name] for name in state} if merged else {}


def _remote_names(state: Mapping[str, Any]) -> set[str]:
    """Return the names of tensors that other processes of the pipeline hold."""
    return {name for name, t in state.items() if isinstance(t, Tensor) and t.is_meta}


def local_weights(module: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the weights of other processes by tensors without memory."""
    remote = _remote_names(module.state_dict())
    return {
        name: torch.empty_like(value, device="meta") if name in remote else value
        for name, value in weights.items()
    }


def local_state(optimizer: Optimizer, state: Mapping[int, Any]) -> dict[int, Any]:
    """Return the state of those parameters of an optimizer that this process holds."""
    parameters = [param for group in optimizer.param_groups for param in group["params"]]
    return {
        index: value
        for index, value in state.items()
        if index < len(parameters) and not parameters[index].is_meta
    }
