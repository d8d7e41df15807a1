"""Reads a checkpoint in a folder, as torch's distributed checkpoints are, in one process."""

import re
from pathlib import Path
from typing import Any

import torch

#: The file that makes a folder a checkpoint of Lightning's.
METADATA = "meta.pt"


def read_checkpoint_folder(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Return a checkpoint of Lightning's that is in a folder as if it was in a file, on the CPU."""
    # They take long to import.
    from torch.distributed.checkpoint import format_utils, state_dict_loader
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    sharded: dict[str, Any] = {}
    # Private names, looked up only where such a folder is read.
    planner: Any = vars(format_utils)["_EmptyStateDictLoadPlanner"]()
    load: Any = vars(state_dict_loader)["_load_state_dict"]
    load(sharded, FileSystemReader(path), planner=planner, no_dist=True)
    metadata = torch.load(path / METADATA, map_location="cpu", weights_only=weights_only)
    optimizers = sorted(name for name in sharded if re.fullmatch("optimizer_[0-9]+", name))
    states = [_numbered(sharded[f"optimizer_{index}"]) for index in range(len(optimizers))]
    return {**metadata, "state_dict": sharded["state_dict"], "optimizer_states": states}


def _numbered(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of an optimizer by the numbers of its parameters instead of their names."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    groups = [
        {**group, "params": [numbers[name] for name in group["params"]]}
        for group in state["param_groups"]
    ]
    values = state.get("state", {})
    by_number = {numbers[name]: values[name] for name in names if name in values}
    return {"state": by_number, "param_groups": groups}
