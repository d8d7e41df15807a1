"""Which member this process trains, and which fold or part of a selection that is."""

from typing import Any

from lightning_memmap.data.options import DataOptions
from lightning_memmap.sampling.selection import Selection


def find_member(options: DataOptions, strategy: Any, reason: str) -> int:
    """Return the number of the member that this process trains.

    Args:
        options: The options, whose ``member`` comes first.
        strategy: The Trainer's strategy, or None. ``memmap_independent`` knows its member.
        reason: The argument that needs the member, for the error.
    """
    if options.member is not None:
        return options.member
    member: int | None = getattr(strategy, "member", None)
    if member is None:
        raise ValueError(
            f"{reason}: the member is unknown: train with strategy='memmap_independent', or set"
            " member=..."
        )
    return member


def find_fold(selection: Selection, options: DataOptions, strategy: Any) -> int:
    """Return the fold or part of a selection that this process uses; 0 if there is only one."""
    count = selection.num_members
    if count is None:
        return 0
    reason = f"subset={options.subset!r}"
    member = find_member(options, strategy, reason)
    if options.member is not None:
        if member >= count:
            raise ValueError(f"member={member} with {reason}: choose 0 to {count - 1}")
    elif (num_members := strategy.num_members) % count:
        raise ValueError(
            f"{reason} with {num_members} members: some folds would be trained less often than"
            f" others: use {count} members or a multiple of it, with devices=... or"
            f" IndependentStrategy(num_members={count})"
        )
    return member % count
