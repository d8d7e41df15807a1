"""Helpers for callbacks in which all processes write together."""

from collections.abc import Iterator
from contextlib import contextmanager

import lightning as L
import torch
import torch.distributed as dist

from lightning_memmap.placement.topology import find_data_parallel_rank
from lightning_memmap.ranks import check_ranks_match


def is_first_with_its_rows(trainer: L.Trainer) -> bool:
    """Check whether no lower rank has the same rows. All ranks must call this."""
    data_rank, _ = find_data_parallel_rank(trainer.strategy)
    tensor = torch.tensor(data_rank, device=trainer.strategy.root_device)
    # Over all processes: by default a strategy gathers over the data-parallel ones only.
    data_ranks = trainer.strategy.all_gather(tensor, group=dist.group.WORLD).flatten().tolist()
    return data_rank not in data_ranks[: trainer.global_rank]


@contextmanager
def all_or_none() -> Iterator[None]:
    """Raise on all ranks if one rank fails. All ranks must enter this context."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    check_ranks_match({}, error)
