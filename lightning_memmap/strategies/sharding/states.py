"""Whole and sharded states of modules and optimizers under FSDP2."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_memmap._compat.tensors import local_part


def gather_state(state: dict[str, Any], keep: bool) -> dict[str, Any]:
    """Return a state with whole tensors on the CPU if ``keep``, else {}. All ranks must call it.

    Not by ``torch.distributed.checkpoint.state_dict``: for an optimizer, it would take a step to
    create missing states.
    """

    def gather(tensor: Tensor) -> Tensor | None:
        whole_tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return whole_tensor.cpu() if keep else None

    gathered: dict[str, Any] = apply_to_collection(state, Tensor, gather)
    return gathered if keep else {}


def shard_like(parameter: Any, value: Any) -> Any:
    """Shard a value on the CPU like a parameter, if it has the parameter's shape."""
    if not isinstance(parameter, DTensor) or getattr(value, "shape", None) != parameter.shape:
        return value
    sharded: Any = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    sharded.to_local().copy_(local_part(value, parameter))
    return sharded


def shard_optimizer_state(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Shard the state of a plain optimizer, on the CPU, like the parameters of another one."""
    parameters = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    by_number = dict(zip(numbers, parameters, strict=False))
    sharded = {
        number: {name: shard_like(by_number[number], value) for name, value in values.items()}
        for number, values in state["state"].items()
        if number in by_number
    }
    return {**state, "state": sharded}


def load_sharded_weights(
    path: Path, module: nn.Module, kept_names: Collection[str], strict: bool
) -> None:
    """Load the state of a module from a folder; some names may be missing in it."""
    # These take a while to import, and other strategies do not need them.
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(path)
    saved = {key[1] for key in reader.read_metadata().planner_data.values()}
    state = module.state_dict()
    loaded = {name: value for name, value in state.items() if name in saved}
    load({"state_dict": loaded}, storage_reader=reader)
    kept = {name: state[name] for name in kept_names}
    module.load_state_dict({**kept, **loaded}, strict=strict)


def load_sharded_optimizers(path: Path, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Load the states of optimizers from a folder; drop the states that aren't in it."""
    from torch.distributed.checkpoint import state_dict as sharded_state
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(path)
    keys = reader.read_metadata().planner_data.values()
    for index, optimizer in enumerate(optimizers):
        name = f"optimizer_{index}"
        saved = {key[2] for key in keys if key[:2] == (name, "state")}
        state: dict[str, Any] = sharded_state.get_optimizer_state_dict(module, optimizer)
        state["state"] = {key: values for key, values in state["state"].items() if key in saved}
        load({name: state}, storage_reader=reader)
        options = sharded_state.StateDictOptions(strict=False)
        sharded_state.set_optimizer_state_dict(module, optimizer, state, options=options)
