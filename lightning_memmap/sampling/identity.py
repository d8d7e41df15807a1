"""Identities: what tells a value that decides the order of rows from any other, and in words."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

_REMEDIES = {
    "sampler": "the shuffle, shuffle_window and sampler of the checkpoint",
    "num_positions": "the num_samples and the rows of the checkpoint",
    "positions of sets": "the shares, num_samples and training sets of the checkpoint",
    "global_batch": "the batch size and the number of devices of the checkpoint",
    "num_rows": "the dataset, subset and windows of the checkpoint",
    "num_shards": "num_shards={was} and a number of data devices that divides it",
    "stores": "the training sets of the checkpoint",
    "subset": "the subset of the checkpoint",
    "windows": "the windows of the checkpoint",
    "version": "the release of the package that saved the checkpoint",
    "digest": "the rows, shares, weights and lengths of the checkpoint",
}
#: In place of what an order lacks.
_LACKING = "nothing"
#: Digits of a digest that are shown.
_DIGITS = 8


class Numbers:
    """An array that is a value: it is read-only, and equal to others of the same content."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array.copy() if array.flags.writeable else array
        self.array.flags.writeable = False
        digest = xxhash.xxh3_128(f"{self.array.dtype.str} {self.array.shape} ".encode())
        digest.update(np.ascontiguousarray(self.array).data)
        self.digest = digest.hexdigest()

    @property
    def identity(self) -> dict[str, Any]:
        """The length and a digest of the content."""
        return {"length": len(self), "digest": self.digest}

    def __len__(self) -> int:
        return len(self.array)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Numbers) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} of digest {self.digest[:8]})"


def identity_of(value: Any) -> Any:
    """A value as a checkpoint holds it: JSON values, which tell it from others."""
    return getattr(value, "identity", value)


def difference_of(
    saved: Mapping[str, Any], now: Mapping[str, Any]
) -> tuple[str, str, str, str] | None:
    """Find the first difference of the order of a checkpoint and the present one.

    What differs, such as ``windows.length``, its value there and now, and what to resume with.
    """
    found = min(_differences(saved, now), key=_is_of_numbers, default=None)
    if found is None:
        return None
    path, one, other = found
    name, was = _name(path), _text(one)
    remedy = _REMEDIES.get(path[-1], "{name}={was}")
    return name, was, _text(other), remedy.format(name=name, was=was)


def _differences(
    one: Mapping[str, Any], other: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    # Identities begin with what says most. Those of checkpoints may have another order.
    for key in dict.fromkeys([*other, *one]):
        a, b = one.get(key), other.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from _differences(a, b, (*path, key))
        elif a != b:
            # None may be the value of an option.
            lacking = _LACKING if isinstance(a, Mapping) or isinstance(b, Mapping) else None
            yield (*path, key), lacking if a is None else a, lacking if b is None else b


def _is_of_numbers(difference: tuple[tuple[str, ...], Any, Any]) -> bool:
    """Whether an array differs, which says least."""
    path = difference[0]
    return path[-1] in ("length", "digest") and path[-2:-1] != ("windows",)


def _name(path: tuple[str, ...]) -> str:
    names = ".".join(name for name in path if name != "shards")
    return re.sub(r"\.epoch (\d+)", r"[\1]", names)


def _text(value: Any) -> str:
    if not isinstance(value, Mapping):
        is_digest = isinstance(value, str) and len(value) == 32
        return str(value)[:_DIGITS] if is_digest else str(value)
    if "sampler" in value:
        return str(value["sampler"])
    return f"({', '.join(f'{key}={_text(each)}' for key, each in value.items())})"
