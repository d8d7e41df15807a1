"""Copies of what the program gives to a Trainer, for the sequential members of one process."""

import copy
import gc
from collections.abc import Iterable
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import lightning as L
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_memmap.errors import UnsuitableModuleError

_WAY_OUT = (
    "make it in configure_model or setup, which run for each member, or leave out processes=False"
)
#: What the search for such functions looks into. An empty cell refers to nothing.
_CONTAINERS = (MethodType, CellType, partial, dict, list, tuple, set, frozenset)
#: What no function may share between members.
_NOT_SHARED = (nn.Module, Tensor, L.LightningDataModule, L.Callback, L.Trainer, Strategy)


class MemberCopies:
    """One member's copies of the program's objects.

    An object is copied the first time a member needs it. The member then uses the same copy as
    long as the object lives: a module that one Trainer trains and another one tests is the same
    copy in both. The program's own objects are referenced weakly.
    """

    def __init__(self) -> None:
        self._copies: Any = WeakIdKeyDictionary()
        self._failures: Any = WeakIdKeyDictionary()

    def copy(self, value: Any, replacements: dict[int, Any]) -> Any:
        """Copy a value and everything it refers to, except what the member has a copy of.

        Args:
            value: What to copy.
            replacements: By the ``id`` of an object, what to use in its place.

        Returns:
            The copy, which refers to the member's existing copies of what was copied before.

        Raises:
            UnsuitableModuleError: Something cannot be copied, or a function refers to what was
                copied.
        """
        known = list(self._copies.items())
        memo: dict[int, Any] = {id(original): copied for original, copied in known}
        memo.update(replacements)
        try:
            copied = copy.deepcopy(value, memo)
        except Exception as error:
            raise UnsuitableModuleError(
                "processes=False: each member has its own copies of the module, the data and the"
                f" Trainer, and something in them cannot be copied: {type(error).__name__}:"
                f" {error}. For what cannot be copied: {_WAY_OUT}"
            ) from error
        # deepcopy keeps the originals in a list, under the id of the memo.
        originals = [kept for kept in memo.pop(id(memo), []) if isinstance(kept, _NOT_SHARED)]
        _check_functions(memo.values(), {id(original) for original in originals})
        return copied

    def keep(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Use the second of each pair as the copy of the first from now on.

        Args:
            pairs: Originals and their copies. Pairs whose original cannot be referenced weakly,
                such as a number, are ignored.
        """
        for original, copied in pairs:
            if _is_weakly_referable(original):
                self._copies[original] = copied

    def knows(self, original: Any) -> bool:
        """Whether the member has a copy of this object, or failed with it.

        Args:
            original: An object of the program, by identity.

        Returns:
            True if it was copied, kept or noted as failed before, and not forgotten since.
        """
        return original in self._copies or original in self._failures

    def forget(self, originals: Iterable[Any]) -> None:
        """Drop the copies of these objects.

        Args:
            originals: Objects of the program; those without a copy are ignored.
        """
        for original in originals:
            if _is_weakly_referable(original):
                self._copies.pop(original, None)

    def fail(self, originals: Iterable[Any], reason: str) -> None:
        """Note that the member failed with these objects, and why.

        Args:
            originals: Objects of the program that can be referenced weakly.
            reason: The text for `failure`.
        """
        for original in originals:
            self._failures[original] = reason

    def failure(self, originals: Iterable[Any]) -> str | None:
        """Why the member failed with one of these objects.

        Args:
            originals: Objects of the program.

        Returns:
            The reason of the first that has one; None if the member did not fail with any.
        """
        found = (self._failures.get(original) for original in originals)
        return next((reason for reason in found if reason is not None), None)


def _is_weakly_referable(value: Any) -> bool:
    """Whether weak references to it are possible; to numbers, strings and None they are not."""
    return type(value).__weakrefoffset__ != 0


def _check_functions(copied: Iterable[Any], originals: set[int]) -> None:
    """Check that no function refers to an original: copies share the functions of the original.

    Raises:
        UnsuitableModuleError: A closure refers to an original, and would train that one.
    """
    seen: set[int] = set()
    open_: list[tuple[Any, FunctionType | None]] = [(value, None) for value in copied]
    while open_:
        value, function = open_.pop()
        if function is not None and id(value) in originals:
            code = function.__code__
            raise UnsuitableModuleError(
                "processes=False: each member has its own copy of what the Trainer was given, but"
                f" the function {function.__qualname__} ({code.co_filename}, line"
                f" {code.co_firstlineno}) refers to the {type(value).__name__} that was copied, as"
                f" hooks do that are closures: {_WAY_OUT}"
            )
        if id(value) in seen:
            continue
        seen.add(id(value))
        within = value if isinstance(value, FunctionType) else function
        open_ += [(child, within) for child in _children(value)]


def _children(value: Any) -> list[Any]:
    """What a container or a function refers to, except for its globals."""
    if isinstance(value, FunctionType):
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value)]
    return gc.get_referents(value) if isinstance(value, _CONTAINERS) else []
