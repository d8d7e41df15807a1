"""Converts a sharded checkpoint to one file."""

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

_META = "meta.pt"


def consolidate_checkpoint(
    folder: str | Path, file: str | Path, *, weights_only: bool = True
) -> None:
    """Convert a sharded checkpoint of several processes to one file.

    ``load_from_checkpoint`` of the plain module loads the file, and any strategy resumes from it.
    Call it in one process; the checkpoint must fit into its memory. Parts of a sharded checkpoint
    are unpickled: do not open one from a source that you do not trust.

    Args:
        folder: What ``memmap_fsdp2`` or Lightning's ``ModelParallelStrategy`` saved with
            ``save_distributed_checkpoint=True``.
        file: The file to write; must not exist. It has another name until it is complete.
        weights_only: Refuse to unpickle the states of callbacks, hyperparameters and the like, as
            in ``torch.load``.

    Raises:
        ValueError: ``folder`` is not a sharded checkpoint.
        FileExistsError: ``file`` exists.
        pickle.UnpicklingError: With ``weights_only=True``, the checkpoint contains something other
            than tensors and plain values.
    """
    folder, file = Path(folder), Path(file)
    if not (folder / _META).is_file() or not (folder / ".metadata").is_file():
        raise ValueError(
            f"folder={str(folder)!r}: it has no {_META} and .metadata, so it is not a sharded"
            " checkpoint; a checkpoint of one file needs no consolidation"
        )
    if file.exists():
        raise FileExistsError(f"file={str(file)!r} exists: remove it, or choose another name")
    partial = file.with_name(f"{file.name}.partial")
    try:
        dcp_to_torch_save(folder, partial)
        tensors = torch.load(partial, map_location="cpu", weights_only=True)
        rest = torch.load(folder / _META, map_location="cpu", weights_only=weights_only)
        torch.save({**rest, **_plain(tensors)}, partial)
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def _plain(tensors: dict[str, Any]) -> dict[str, Any]:
    """Weights and optimizer states in the format in which the Trainer saves them unsharded."""
    count = sum(re.fullmatch(r"optimizer_\d+", key) is not None for key in tensors)
    states = [_numbered(tensors[f"optimizer_{index}"]) for index in range(count)]
    return {"state_dict": tensors["state_dict"], "optimizer_states": states}


def _numbered(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer state by parameter names, converted to torch's parameter numbers."""
    numbers: dict[str, int] = {}
    groups = []
    for group in state["param_groups"]:
        params = [numbers.setdefault(name, len(numbers)) for name in group["params"]]
        groups.append({**group, "params": params})
    values = {numbers[name]: value for name, value in state.get("state", {}).items()}
    return {"state": values, "param_groups": groups}
