"""Where a loader stands in its epoch: what a checkpoint contains of it, and its check."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from lightning_memmap.sampling.schedule import SkippedSteps

Count = Annotated[int, msgspec.Meta(ge=0)]


class _Order(msgspec.Struct, frozen=True):
    """What the identity of every order has."""

    shards: dict[str, Any]


class LoaderState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a loader stands, the same on every rank."""

    sampler: dict[str, Any]
    num_positions: Count
    seed: Count
    epoch: Count
    position: Count = 0
    steps: Count = 0
    skipped: SkippedSteps = msgspec.field(default_factory=SkippedSteps)

    def as_dict(self) -> dict[str, Any]:
        """The state as plain values."""
        state = msgspec.structs.asdict(self)
        skipped = state.pop("skipped")
        return {**state, "skipped": skipped.as_lists()} if skipped.steps else state

    @classmethod
    def read(cls, state: object) -> "LoaderState":
        """Check a state that `as_dict` has returned."""
        given: Any = state
        skipped = None
        if isinstance(state, Mapping):
            given, skipped = {**state}, state.get("skipped")
            given.pop("skipped", None)
        try:
            read = msgspec.convert(given, cls)
            msgspec.convert(read.sampler, _Order)
            if skipped is not None:
                read = msgspec.structs.replace(read, skipped=SkippedSteps.read(skipped))
        except ValueError as error:
            raise _no_state(str(error)) from error
        if read.position > read.num_positions:
            raise _no_state(f"position={read.position} of num_positions={read.num_positions}")
        if not bool(read.position) <= read.steps <= read.position:
            raise _no_state(
                f"steps={read.steps}: each step has at least one of the position={read.position}"
                " rows that were delivered"
            )
        return read

    @property
    def subset(self) -> Mapping[str, Any] | None:
        """The rows of the dataset that the loader has; None where it has all of them."""
        found: Mapping[str, Any] | None = self.sampler["shards"].get("subset")
        return found


def _no_state(problem: str) -> ValueError:
    return ValueError(
        f"the state of the training loader cannot be loaded: {problem}. Resume from a checkpoint"
        " that this version has written, or give load_state_dict what state_dict has returned"
    )
