"""Compares facts that all processes of a run must share, before the first step.

Otherwise, if a process differs or failed to set up, the others wait in a collective forever.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from lightning_memmap.errors import RankMismatchError, describe_error

T = TypeVar("T")


def is_rank_zero() -> bool:
    """Return whether this is the first of all processes, or the only one."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def run_on_rank_zero(action: Callable[[], None]) -> None:
    """Run an action on rank 0. If it raises OSError, every rank does. All ranks must call this."""
    error: OSError | None = None
    if is_rank_zero():
        try:
            action()
        except OSError as raised:
            error = raised
    if (error := gather_from_ranks(error)[0]) is not None:
        raise error


def gather_from_ranks(value: T) -> list[T]:
    """Gather a value of each process. All ranks of the default process group must call this."""
    ranks = [value]
    if dist.is_available() and dist.is_initialized():
        ranks *= dist.get_world_size()
        dist.all_gather_object(ranks, value)
    return ranks


def check_ranks_match(
    facts: Mapping[str, object],
    error: BaseException | None = None,
    *,
    subject: str = "data in the same order",
    remedy: str = "Start all of them with the same arguments and the same stores",
) -> None:
    """Compare facts over all processes. All ranks of the default process group must call this.

    Args:
        facts: Values by name, compared as text.
        error: An error of this process, which is raised here; other ranks raise that it failed.
        subject: The thing that the facts describe, for the message.
        remedy: The way out if they differ, for the message.

    Raises:
        RankMismatchError: The processes differ, or another process failed.
    """
    texts = {name: str(value) for name, value in facts.items()}
    ranks = gather_from_ranks((texts, None if error is None else describe_error(error)))
    if error is not None:
        raise error
    if failed := [f"rank {rank}: {text}" for rank, (_, text) in enumerate(ranks) if text]:
        raise RankMismatchError("another process failed. " + "; ".join(failed))
    differing = []
    for name in dict.fromkeys(name for rank_texts, _ in ranks for name in rank_texts):
        by_value = defaultdict(list)
        for rank, (rank_texts, _) in enumerate(ranks):
            by_value[rank_texts.get(name, "missing")].append(str(rank))
        if len(by_value) > 1:
            values = (
                f"{value} on {'rank' if len(holders) == 1 else 'ranks'} {', '.join(holders)}"
                for value, holders in by_value.items()
            )
            differing.append(f"{name}: {'; '.join(values)}")
    if differing:
        rest = f" | {len(differing) - 4} more" if len(differing) > 4 else ""
        raise RankMismatchError(
            f"the processes must have the same {subject}, but differ in"
            f" {' | '.join(differing[:4])}{rest}. {remedy}"
        )


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Raise on all ranks if one rank fails. All ranks must enter this context."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    check_ranks_match({}, error)
