"""Where a stream stands: what a checkpoint holds of it, and the check of what is read from one."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeGuard

#: By field, what it must be, and in words.
_AT_LEAST_ONE, _NOT_NEGATIVE = (1, "a whole number of at least 1"), (0, "a whole number, 0 or more")
_LEAST = {
    "num_rows": _AT_LEAST_ONE,
    "num_shards": _AT_LEAST_ONE,
    "seed": _NOT_NEGATIVE,
    "shuffle_window": _AT_LEAST_ONE,
    "epoch": _NOT_NEGATIVE,
    "position": _NOT_NEGATIVE,
    "steps": _NOT_NEGATIVE,
}


@dataclass(frozen=True)
class LoaderState:
    """Where a stream stands, the same on every rank.

    Args:
        num_rows: Rows of the stream.
        num_shards: Shards of the stream.
        seed: Seed of the order.
        shuffle: Whether the rows are permuted.
        shuffle_window: Rows of a shard within which they are; None where it is the whole shard.
        epoch: The epoch.
        position: The first position of the epoch that was not delivered.
        steps: The steps of the epoch that were delivered.
    """

    num_rows: int
    num_shards: int
    seed: int
    shuffle: bool
    shuffle_window: int | None = None
    epoch: int = 0
    position: int = 0
    steps: int = 0

    @classmethod
    def read(cls, state: object) -> "LoaderState":
        """A state as ``dataclasses.asdict`` has written it, checked.

        Raises:
            ValueError: It is something else. The message names the key and its value.
        """
        names = [field.name for field in fields(cls)]
        if not isinstance(state, Mapping):
            raise _no_state(f"it is a {type(state).__name__}, not a dict")
        if missing := [name for name in names if name not in state]:
            raise _no_state(f"it lacks {', '.join(missing)}")
        if unknown := [str(name) for name in state if name not in names]:
            raise _no_state(
                f"it has {', '.join(unknown)}, which this version of lightning_memmap does not"
                " know: a later one may have written it"
            )
        for name, value in state.items():
            if name == "shuffle":
                if not isinstance(value, bool):
                    raise _no_state(f"{name}={value!r}: it must be True or False")
            elif not (name == "shuffle_window" and value is None):
                least, words = _LEAST[name]
                if not _is_whole(value) or value < least:
                    raise _no_state(f"{name}={value!r}: it must be {words}")
        read = cls(**state)
        if read.position > read.num_rows:
            raise _no_state(f"position={read.position}: it must be within num_rows={read.num_rows}")
        if not bool(read.position) <= read.steps <= read.position:
            raise _no_state(
                f"steps={read.steps}: each step has at least one of the position={read.position}"
                " rows that were delivered"
            )
        return read


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _no_state(problem: str) -> ValueError:
    return ValueError(
        f"the state of the training stream cannot be loaded: {problem}. Resume from a checkpoint"
        " that this version has written, or give load_state_dict what state_dict has returned"
    )
