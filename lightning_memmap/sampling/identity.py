"""Identities: what tells a value that decides the order of rows from any other."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import xxhash
from numpy.typing import NDArray
from typing_extensions import override

#: Numbers that are hashed at once.
_HASHED = 2**17


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
        return {"length": len(self), "digest": self.digest}

    def at(self, index: NDArray[np.int64]) -> NDArray[Any]:
        """The numbers at some places."""
        found: NDArray[Any] = self.array[index]
        return found

    def __len__(self) -> int:
        return len(self.array)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Numbers) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} of digest {self.digest[:8]})"


class Repeating(Numbers):
    """The numbers below a limit that leave some remainders, ascending: none of them is kept."""

    def __init__(self, limit: int, divisor: int, remainders: Sequence[int]) -> None:
        self._divisor, self._remainders = divisor, np.array(sorted(remainders), np.int64)
        rounds, more = divmod(limit, divisor)
        self._length = rounds * len(remainders) + int((self._remainders < more).sum())
        # That of the array.
        digest = xxhash.xxh3_128(f"{self._remainders.dtype.str} {(self._length,)} ".encode())
        for first in range(0, self._length, _HASHED):
            numbers = self.at(np.arange(first, min(first + _HASHED, self._length)))
            digest.update(np.ascontiguousarray(numbers).data)
        self.digest = digest.hexdigest()

    @override
    def at(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        rounds = index // len(self._remainders)
        found: NDArray[np.int64] = self._remainders[index - rounds * len(self._remainders)]
        return found + rounds * self._divisor

    @override
    def __len__(self) -> int:
        return self._length


def identity_of(value: Any) -> Any:
    """A value as a checkpoint holds it."""
    return value.identity if isinstance(value, Identified) else value
