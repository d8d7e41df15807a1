"""Helpers for callbacks in which all processes write together."""

from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist

from lightning_memmap.placement.topology import find_data_parallel_rank


def is_last_with_its_rows(trainer: L.Trainer) -> bool:
    """Check whether no higher rank has the same rows. All ranks must call this.

    The last process of a pipeline has the output of its last stage.
    """
    data_rank, _ = find_data_parallel_rank(trainer.strategy)
    tensor = torch.tensor(data_rank, device=trainer.strategy.root_device)
    # Over all processes: by default a strategy gathers over the data-parallel ones only.
    data_ranks = trainer.strategy.all_gather(tensor, group=dist.group.WORLD).flatten().tolist()
    return data_rank not in data_ranks[trainer.global_rank + 1 :]


def fill_member(path: Path, trainer: L.Trainer, owner: object) -> Path:
    """Return a path in which ``{member}`` is the number of this process's member."""
    if "{member}" not in str(path):
        return path
    member = getattr(trainer.strategy, "member", None)
    if member is None:
        raise ValueError(
            f"{type(owner).__name__}: the path {str(path)!r} has {{member}}, the number of a"
            " member, but only strategy='memmap_independent' has members"
        )
    return Path(str(path).replace("{member}", str(member)))
