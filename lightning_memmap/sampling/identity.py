"""Identify a row order in checkpoints, and describe how two orders differ."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

_REMEDIES = {
    "sampler": "the shuffle, shuffle_block and sampler of the checkpoint",
    "num_positions": "the num_samples and the rows of the checkpoint",
    "positions of sets": "the shares, num_samples and training sets of the checkpoint",
    "global_batch": "the batch size and the number of devices of the checkpoint",
    "num_rows": "the dataset, subset and windows of the checkpoint",
    "num_shards": "num_shards={was} and a number of data devices that divides it",
    "stores": "the training sets of the checkpoint",
    "subset": "the subset of the checkpoint",
    "windows": "the windows of the checkpoint",
    "num_packs": "the shuffle_block, num_shards and rows of the checkpoint",
    "packs_per_block": "the shuffle_block, num_shards and rows of the checkpoint",
    "version": "the release of the package that saved the checkpoint",
    "epoch": "the results of epoch {was}",
    "digest": "the rows, shares, weights and lengths of the checkpoint",
}
#: Shown for an entry that one of two orders lacks.
_MISSING = "nothing"
#: Hexadecimal digits of a digest that are shown.
_SHOWN_DIGITS = 8


class FrozenArray:
    """A read-only array that compares by content."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array.copy() if array.flags.writeable else array
        self.array.flags.writeable = False
        digest = xxhash.xxh3_128(f"{self.array.dtype.str} {self.array.shape} ".encode())
        digest.update(np.ascontiguousarray(self.array).data)
        self.digest = digest.hexdigest()

    @property
    def identity(self) -> dict[str, Any]:
        """The length, and a digest of the content."""
        return {"length": len(self), "digest": self.digest}

    def __len__(self) -> int:
        return len(self.array)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FrozenArray) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} of digest {self.digest[:8]})"


def identity_of(value: Any) -> Any:
    """Return a value as checkpoints store it: its ``identity`` if it has one, else itself."""
    return getattr(value, "identity", value)


def difference_of(
    saved: Mapping[str, Any], now: Mapping[str, Any]
) -> tuple[str, str, str, str] | None:
    """Find the most telling difference between the order of a checkpoint and the present one.

    Returns:
        The name of what differs, such as ``windows.length``, its value in the checkpoint and now,
        and what to resume with. None if the orders are equal.
    """
    differences = [*_differences(saved, now)]
    if not differences:
        return None
    # The length or digest of an array tells a user least.
    digests = [
        path[-1] in ("length", "digest") and path[-2:-1] != ("windows",) for path, *_ in differences
    ]
    path, saved_value, value = differences[digests.index(min(digests))]
    name = ".".join(name for name in path if name not in ("shards", "options"))
    name = re.sub(r"\.epoch (\d+)", r"[\1]", name)
    was = _text(saved_value)
    remedy = _REMEDIES.get(path[-1], "{name}={was}")
    return name, was, _text(value), remedy.format(name=name, was=was)


def _differences(
    saved: Mapping[str, Any], now: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    # Identities start with the most telling entries. Checkpoints may store another order.
    for key in dict.fromkeys([*now, *saved]):
        a = saved.get(key)
        b = now.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from _differences(a, b, (*path, key))
        elif a != b:
            # None may be the value of an option, but not a mapping.
            missing = _MISSING if isinstance(a, Mapping) or isinstance(b, Mapping) else None
            yield (*path, key), missing if a is None else a, missing if b is None else b


def _text(value: Any) -> str:
    if not isinstance(value, Mapping):
        is_digest = isinstance(value, str) and len(value) == 32
        return str(value)[:_SHOWN_DIGITS] if is_digest else str(value)
    if "sampler" in value:
        return str(value["sampler"])
    return f"({', '.join(f'{key}={_text(item)}' for key, item in value.items())})"
