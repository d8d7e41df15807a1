"""Where a loader stands in its epoch: what a checkpoint contains of it, and its check."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from lightning_memmap.errors import with_article
from lightning_memmap.sampling.schedule import SkippedSteps

_NUMBERS = ("num_positions", "seed", "epoch", "position", "steps")


@dataclass(frozen=True)
class LoaderState:
    """Where a loader stands, the same on every rank."""

    sampler: dict[str, Any]
    num_positions: int
    seed: int
    epoch: int = 0
    position: int = 0
    steps: int = 0
    skipped: SkippedSteps = field(default_factory=SkippedSteps)

    def as_dict(self) -> dict[str, Any]:
        """The state as plain values."""
        state = {name: getattr(self, name) for name in _names()}
        return {**state, "skipped": self.skipped.as_lists()} if self.skipped.steps else state

    @classmethod
    def read(cls, state: object) -> "LoaderState":
        """Check a state that `as_dict` has returned."""
        names = _names()
        if not isinstance(state, Mapping):
            raise _no_state(f"it is {with_article(type(state).__name__)}, not a dict")
        if missing := [name for name in names if name not in state]:
            raise _no_state(f"it lacks {', '.join(missing)}")
        if unknown := [str(name) for name in state if name not in (*names, "skipped")]:
            raise _no_state(
                f"it has {', '.join(unknown)}, which this version of lightning_memmap does not"
                " know: a later one may have written it"
            )
        for name in _NUMBERS:
            value = state[name]
            if type(value) is not int or value < 0:
                raise _no_state(f"{name}={value!r}: it must be a whole number, 0 or more")
        sampler = state["sampler"]
        if not isinstance(sampler, Mapping) or not isinstance(sampler.get("shards"), Mapping):
            raise _no_state(f"sampler={sampler!r}: it is not the identity of a sampler")
        try:
            skipped = SkippedSteps.read(state.get("skipped", ((), ())))
        except ValueError as error:
            raise _no_state(str(error)) from error
        read = cls(**{**state, "skipped": skipped})
        if read.position > read.num_positions:
            raise _no_state(
                f"position={read.position}: it must be within num_positions={read.num_positions}"
            )
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


def _names() -> list[str]:
    """The names of what every state has."""
    return [each.name for each in fields(LoaderState) if each.name != "skipped"]


def _no_state(problem: str) -> ValueError:
    return ValueError(
        f"the state of the training loader cannot be loaded: {problem}. Resume from a checkpoint"
        " that this version has written, or give load_state_dict what state_dict has returned"
    )
