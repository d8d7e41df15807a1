"""The errors of this package that are more than a wrong argument.

A wrong argument raises ValueError or TypeError. These say that something outside the call does
not fit: the dataset, the store on disk, or the memory of the devices.
"""

from numbers import Integral


def check_integer(name: str, value: object) -> None:
    """Check an argument that counts something.

    Raises:
        TypeError: It is no integer.
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: give an integer")


class MemmapError(Exception):
    """Base of all errors of this package."""


class SchemaError(MemmapError, TypeError):
    """A sample has a type, structure, shape or dtype that cannot be stored."""


class DatasetError(MemmapError):
    """A dataset failed at a row, is random, or is not the one that its store was built from."""


class StoreNotFoundError(MemmapError, FileNotFoundError):
    """There is no store at a path."""


class StoreError(MemmapError):
    """A store is damaged, unsafe to open, or of a format that this version does not read."""


class PlacementError(MemmapError):
    """The shards do not fit where the plan must put them."""


class UnsuitableModuleError(MemmapError, TypeError):
    """A module cannot be trained under a strategy as it is."""


class RankMismatchError(MemmapError):
    """The processes of a run differ in what must be the same on all of them."""


class MemberError(MemmapError):
    """Members that train independently failed; the others have come to their end."""
