"""What members in one process have of their own: copies of what the program hands to a Trainer."""

import copy
from collections.abc import Iterable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import lightning as L
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_memmap.errors import UnsuitableModuleError

_WAY_OUT = (
    "make it in configure_model or setup, which each member calls by itself, or leave out"
    " processes=False"
)
#: What a function of two members must not share.
_OWN = (nn.Module, Tensor, L.LightningDataModule, L.Callback, L.Trainer, Strategy)


class MemberCopies:
    """What one member has in place of the program's own objects.

    An object is copied as a member first meets it, and stands for the same copy from then on, as
    long as it lives: a module that one Trainer has trained and another one tests is the member's
    own module in both. It keeps nothing of the program's own objects alive.
    """

    def __init__(self) -> None:
        self._copies: Any = WeakIdKeyDictionary()
        self._failures: Any = WeakIdKeyDictionary()

    def copy(self, value: Any, instead: dict[int, Any]) -> Any:
        """A copy of all that a value reaches; of what the member knows, the copy that it has.

        Args:
            value: What to copy.
            instead: By the ``id`` of objects, what takes their place.

        Raises:
            UnsuitableModuleError: There is something that cannot be copied.
        """
        known = list(self._copies.items())
        memo: dict[int, Any] = {id(original): copied for original, copied in known}
        memo.update(instead)
        try:
            copied = copy.deepcopy(value, memo)
        except Exception as error:
            raise UnsuitableModuleError(
                "processes=False: each member has copies of its own of the module, the data and the"
                f" Trainer, and something in them cannot be copied: {type(error).__name__}:"
                f" {error}. For what cannot be copied: {_WAY_OUT}"
            ) from error
        # The originals, which are kept while they are copied.
        originals = [kept for kept in memo.pop(id(memo), []) if isinstance(kept, _OWN)]
        _check_functions(memo.values(), {id(original) for original in originals})
        return copied

    def keep(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Let the first of each pair stand for the second one from now on."""
        for original, copied in pairs:
            if _can_be_known(original):
                self._copies[original] = copied

    def knows(self, original: Any) -> bool:
        """Whether the member has met this object before."""
        return original in self._copies or original in self._failures

    def forget(self, originals: Iterable[Any]) -> None:
        """Let go of the copies of these objects."""
        for original in originals:
            if _can_be_known(original):
                self._copies.pop(original, None)

    def fail(self, originals: Iterable[Any], reason: str) -> None:
        """The member has failed with these objects, and is done with them."""
        for original in originals:
            self._failures[original] = reason

    def failure(self, originals: Iterable[Any]) -> str | None:
        """Why the member is done with one of these objects; None where it is with none."""
        found = (self._failures.get(original) for original in originals)
        return next((reason for reason in found if reason is not None), None)


def _can_be_known(value: Any) -> bool:
    """Whether there may be weak references to it; to numbers, strings and None there are none."""
    return type(value).__weakrefoffset__ != 0


def _check_functions(copied: Iterable[Any], originals: set[int]) -> None:
    """Copies share the functions of what they are copies of: a closure that holds on to an original
    would train that one.

    Raises:
        UnsuitableModuleError: There is such a function.
    """
    seen: set[int] = set()
    open_: list[tuple[Any, FunctionType | None]] = [(value, None) for value in copied]
    while open_:
        value, function = open_.pop()
        if function is not None and id(value) in originals:
            code = function.__code__
            raise UnsuitableModuleError(
                "processes=False: each member has a copy of its own of what the Trainer was given,"
                f" but the function {function.__qualname__} ({code.co_filename}, line"
                f" {code.co_firstlineno}) holds on to the {type(value).__name__} that was copied,"
                f" as hooks do that are closures: {_WAY_OUT}"
            )
        if id(value) in seen:
            continue
        seen.add(id(value))
        within = value if isinstance(value, FunctionType) else function
        open_ += [(part, within) for part in _parts(value)]


def _parts(value: Any) -> Iterator[Any]:
    """What containers and functions hold."""
    if isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            # An empty cell is that of a variable without a value.
            yield from () if _is_empty(cell) else (cell.cell_contents,)
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        yield from vars(value).values()
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value


def _is_empty(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False
