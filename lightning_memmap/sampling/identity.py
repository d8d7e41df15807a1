"""Identities: what tells a value that decides the order of rows from any other."""

from typing import Any, Protocol, runtime_checkable

import numpy as np
import xxhash
from numpy.typing import NDArray


@runtime_checkable
class Identified(Protocol):
    """A value that a checkpoint cannot hold as it is."""

    @property
    def identity(self) -> Any:
        """What tells it from others, as JSON values; equal values have the same."""


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
        return {"length": len(self.array), "digest": self.digest}

    def __len__(self) -> int:
        return len(self.array)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Numbers) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} of digest {self.digest[:8]})"


def identity_of(value: Any) -> Any:
    """A value as a checkpoint holds it."""
    return value.identity if isinstance(value, Identified) else value
