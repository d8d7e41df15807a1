"""The state of a loader in a checkpoint."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from lightning_memmap.sampling.schedule import SkippedSteps

Count = Annotated[int, msgspec.Meta(ge=0)]


class _Order(msgspec.Struct, frozen=True):
    """The keys that the identity of every order contains."""

    shards: dict[str, Any]


class LoaderState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The position of a loader in its epoch, which is the same on every rank."""

    sampler: dict[str, Any]
    num_positions: Count
    seed: Count
    epoch: Count
    position: Count = 0
    steps: Count = 0
    skipped: SkippedSteps = SkippedSteps()
    #: The results that the order of the epoch depends on; None before its first step.
    results: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        msgspec.convert(self.sampler, _Order)
        if self.position > self.num_positions:
            raise ValueError(f"position={self.position} of num_positions={self.num_positions}")
        if not bool(self.position) <= self.steps <= self.position:
            raise ValueError(
                f"steps={self.steps}: with position={self.position} rows delivered, it must be 0 to"
                " that number, and at least 1 unless it is 0"
            )

    @property
    def num_rows(self) -> int:
        """The number of rows of the epoch that were delivered, without skipped rows."""
        skipped = self.skipped.of_epoch(self.epoch, self.num_positions)
        return self.position - sum(
            min(last, self.position) - min(first, self.position) for first, last in skipped
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the state as a dict of plain values."""
        state: dict[str, Any] = msgspec.to_builtins(self)
        if not self.skipped.steps:
            del state["skipped"]
        if not self.results:
            del state["results"]
        return state

    @classmethod
    def read(cls, state: object) -> "LoaderState":
        """Check a state that `as_dict` has returned."""
        try:
            return msgspec.convert(state, cls)
        except ValueError as error:
            raise ValueError(
                f"the state of the training loader cannot be loaded: {error}. Resume from a"
                " checkpoint that this version has written, or pass load_state_dict a dict that"
                " state_dict has returned"
            ) from error

    @property
    def subset(self) -> Mapping[str, Any] | None:
        """The identity of the subset of rows that the loader serves; None for all rows."""
        subset: Mapping[str, Any] | None = self.sampler["shards"].get("subset")
        return subset
