"""Helpers for callbacks in which all processes write together."""

import lightning as L
import torch
import torch.distributed as dist

from lightning_memmap.placement.topology import find_data_parallel_rank


def is_first_with_its_rows(trainer: L.Trainer) -> bool:
    """Check whether no lower rank has the same rows. All ranks must call this."""
    data_rank, _ = find_data_parallel_rank(trainer.strategy)
    tensor = torch.tensor(data_rank, device=trainer.strategy.root_device)
    # Over all processes: by default a strategy gathers over the data-parallel ones only.
    data_ranks = trainer.strategy.all_gather(tensor, group=dist.group.WORLD).flatten().tolist()
    return data_rank not in data_ranks[: trainer.global_rank]
