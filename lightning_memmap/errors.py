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
        raise TypeError(f"{name}={value!r}: give an integer")
    if least is not None and int(value) < least:
        raise ValueError(f"{name}={value}: {reason or f'at least {least} is needed'}")
    count = int(value)
    if count > MAX_INTEGER:
        raise ValueError(f"{name}={value}: at most 2**63 - 1")
    return count


def check_number(name: str, value: object) -> float:
    """Check an argument that measures something."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: give a number")
    return float(value)


def nearest(name: str, names: Iterable[str], shown: Callable[[str], object] = str) -> str:
    """A suggestion for a misspelt name, or for one of which this is the beginning."""
    folded, given = {other.casefold(): other for other in names}, name.casefold()
    found = [other for other in folded if other.startswith(given)]
    if len(found) != 1:
        found = get_close_matches(given, folded, n=1, cutoff=0.6)
    return f"; did you mean {str(shown(folded[found[0]]))!r}?" if found else ""


def nearest_file(path: str | Path) -> str:
    """Return a suggestion for a misspelt path: see `nearest`."""
    folder, name = Path(path).parent, Path(path).name
    try:
        names = {child.name for child in folder.iterdir()} - {name}
    except OSError:
        return ""
    return nearest(name, names, folder.joinpath)


def is_refused_call(error: BaseException) -> bool:
    """Whether a call failed before any Python code of what was called ran: wrong arguments."""
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


class Described:
    """Options in a dataclass. Messages show the call that makes them."""

    def __repr__(self) -> str:
        named = {each.name: getattr(self, each.name) for each in fields(cast(Any, self))}
        given = [f"{key}={short_repr(each)}" for key, each in named.items() if each is not None]
        return f"{type(self).__name__}({', '.join(given)})"


class MemmapError(Exception):
    """Base of all errors of this package."""


class SchemaError(MemmapError, TypeError):
    """A sample has a type, structure, shape or dtype that cannot be stored."""


class MismatchError(SchemaError):
    """A sample is not what a schema expects; what it has may fit another schema."""


class DatasetError(MemmapError):
    """A dataset failed at a row, is random, or is not the one in its store."""


@contextmanager
def naming(split: str) -> Iterator[None]:
    """Put the name of a split before the errors of its dataset."""
    try:
        yield
    except (DatasetError, SchemaError) as error:
        raise type(error)(f"{split}: {error}") from error.__cause__


class StoreNotFoundError(MemmapError, FileNotFoundError):
    """There is no store at a path."""


class StoreError(MemmapError):
    """A store is damaged, unsafe to open, or in a format that this version cannot read."""


class PlacementError(MemmapError):
    """The shards do not fit where the plan has to put them."""


class UnsuitableModuleError(MemmapError, TypeError):
    """A module cannot be trained under a strategy without a change."""


class UnsupportedVersionError(MemmapError, RuntimeError):
    """An installed version of torch or Lightning lacks what something here cannot do without."""


class RankMismatchError(MemmapError):
    """The processes of a run differ in something that must be the same on all of them."""


class MemberError(MemmapError):
    """Independently trained members failed; the others ran to their end."""
