"""What the processes of a run must have in common is compared before the first step.

Otherwise a process that differs, or that failed to set up, shows as a collective that never ends.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import TypeVar

import torch.distributed as dist

from lightning_memmap.errors import RankMismatchError

T = TypeVar("T")


def gather_from_ranks(value: T) -> list[T]:
    """Return a value of each process. All ranks of the default process group must call it."""
    ranks = [value]
    if dist.is_available() and dist.is_initialized():
        ranks *= dist.get_world_size()
        dist.all_gather_object(ranks, value)
    return ranks


def check_ranks_match(facts: Mapping[str, object], error: BaseException | None = None) -> None:
    """Compare facts over all processes. All ranks of the default process group must call it."""
    ours = ({name: str(value) for name, value in facts.items()}, _described(error))
    ranks = gather_from_ranks(ours)
    if error is not None:
        raise error
    if failed := [f"rank {rank}: {text}" for rank, (_, text) in enumerate(ranks) if text]:
        raise RankMismatchError("another process failed. " + "; ".join(failed))
    differing = []
    for name in dict.fromkeys(name for known, _ in ranks for name in known):
        by_value = defaultdict(list)
        for rank, (known, _) in enumerate(ranks):
            by_value[known.get(name, "missing")].append(str(rank))
        if len(by_value) > 1:
            values = (
                f"{value} on {'rank' if len(holders) == 1 else 'ranks'} {', '.join(holders)}"
                for value, holders in by_value.items()
            )
            differing.append(f"{name}: {'; '.join(values)}")
    if differing:
        raise RankMismatchError(
            "the processes must have the same data in the same order, and they differ in "
            + " | ".join(differing)
            + ": start all of them with the same arguments and the same stores"
        )


def _described(error: BaseException | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"
