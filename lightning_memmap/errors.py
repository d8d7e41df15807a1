"""The errors of this package.

A wrong argument raises ValueError or TypeError. The classes here say that something outside the
call is wrong: the dataset, the store on disk, or the memory of the devices.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from reprlib import repr as short_repr
from typing import Any, cast

#: The largest integer that the order of rows, tensors and files can hold.
MAX_INTEGER = 2**63 - 1


def check_integer(name: str, value: object, least: int | None = None, reason: str = "") -> int:
    """Check an argument that counts something."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: must be an integer")
    count = int(value)
    if least is not None and count < least:
        raise ValueError(f"{name}={value}: {reason or f'must be at least {least}'}")
    if count > MAX_INTEGER:
        raise ValueError(f"{name}={value}: must be at most 2**63 - 1")
    return count


def check_number(name: str, value: object) -> float:
    """Check an argument that measures something."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: must be a number")
    return float(value)


def nearest(name: str, names: Iterable[str], shown: Callable[[str], object] = str) -> str:
    """Return a suggestion for a misspelt name or a prefix, or nothing: "; did you mean 'x'?"."""
    by_folded_name = {candidate.casefold(): candidate for candidate in names}
    folded = name.casefold()
    matches = [candidate for candidate in by_folded_name if candidate.startswith(folded)]
    if len(matches) != 1:
        matches = get_close_matches(folded, by_folded_name, n=1, cutoff=0.6)
    return f"; did you mean {str(shown(by_folded_name[matches[0]]))!r}?" if matches else ""


def nearest_file(path: str | Path) -> str:
    """Return a suggestion for a misspelt path: see `nearest`."""
    path = Path(path)
    try:
        names = {child.name for child in path.parent.iterdir()} - {path.name}
    except OSError:
        return ""
    return nearest(path.name, names, path.parent.joinpath)


def is_argument_mismatch(error: BaseException) -> bool:
    """Check whether a call failed before any Python code of the function ran: wrong arguments."""
    return error.__traceback__ is not None and error.__traceback__.tb_next is None


def describe_error(error: BaseException) -> str:
    """Return an error as text, even where its own message raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as other:
        return f"{type(error).__name__}, whose message raised {type(other).__name__}"


def with_article(name: str) -> str:
    """Put "a" or "an" before the name of a type, for a message."""
    return f"an {name}" if name[:1].lower() in {"a", "e", "i", "o"} else f"a {name}"


class ReprAsCall:
    """A dataclass whose repr is the call that makes it, without the fields that are None."""

    def __repr__(self) -> str:
        ordered = sorted(fields(cast(Any, self)), key=lambda field: field.kw_only is True)
        values = {field.name: getattr(self, field.name) for field in ordered}
        arguments = [
            f"{name}={short_repr(value)}" for name, value in values.items() if value is not None
        ]
        return f"{type(self).__name__}({', '.join(arguments)})"


class MemmapError(Exception):
    """Base of all errors of this package."""


class SchemaError(MemmapError, TypeError):
    """A sample has a type, structure, shape or dtype that cannot be stored."""


class MismatchError(SchemaError):
    """A sample does not fit a schema, but may fit another one."""


class DatasetError(MemmapError):
    """A dataset failed at a row, is random, or differs from its store."""


@contextmanager
def split_in_errors(split: str) -> Iterator[None]:
    """Prefix the errors of a dataset with the name of its split."""
    try:
        yield
    except (DatasetError, SchemaError) as error:
        raise type(error)(f"{split}: {error}") from error.__cause__


class StoreNotFoundError(MemmapError, FileNotFoundError):
    """A path has no store."""


class StoreError(MemmapError):
    """A store is damaged, unsafe to open, or in a format that this version cannot read."""


class PlacementError(MemmapError):
    """The shards do not fit into the memory that they are planned for."""


class UnsuitableModuleError(MemmapError, TypeError):
    """A module cannot be trained under a strategy without a change."""


class UnsupportedVersionError(MemmapError, RuntimeError):
    """An installed version of torch or Lightning lacks something that a strategy needs."""


class RankMismatchError(MemmapError):
    """The processes of a run differ in something that must be the same on all of them."""


class MemberError(MemmapError):
    """Independently trained members failed; the others ran to their end."""
