"""Makes one file of a sharded checkpoint."""

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
    """Make one file of a checkpoint that several processes saved their shards to.

    ``load_from_checkpoint`` of the plain module loads the file, and any strategy resumes from it.
    One process calls it; the checkpoint must fit into its memory. A sharded checkpoint has parts
    that are unpickled: do not open those of people whom you do not trust.

    Args:
        folder: What ``memmap_fsdp2`` or Lightning's ``ModelParallelStrategy`` has saved with
            ``save_distributed_checkpoint=True``.
        file: Where to write; must not exist.
        weights_only: Refuse to unpickle what callbacks, hyperparameters and the like have saved,
            as in ``torch.load``.

    Raises:
        ValueError: ``folder`` is no sharded checkpoint.
        FileExistsError: ``file`` exists.
    """
    folder, file = Path(folder), Path(file)
    if not (folder / _META).is_file() or not (folder / ".metadata").is_file():
        raise ValueError(
            f"folder={str(folder)!r}: it has no {_META} and .metadata, so it is no sharded"
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
    """Weights and optimizer states as the Trainer saves them without shards."""
    count = sum(re.fullmatch(r"optimizer_\d+", key) is not None for key in tensors)
    states = [_numbered(tensors[f"optimizer_{index}"]) for index in range(count)]
    return {"state_dict": tensors["state_dict"], "optimizer_states": states}


def _numbered(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer state whose parameters have names, with the numbers that torch gives them."""
    numbers: dict[str, int] = {}
    groups = []
    for group in state["param_groups"]:
        members = [numbers.setdefault(name, len(numbers)) for name in group["params"]]
        groups.append({**group, "params": members})
    values = {numbers[name]: value for name, value in state.get("state", {}).items()}
    return {"state": values, "param_groups": groups}
