"""Strategies look for the private names that they need when they are made."""

from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import Any

import pytest

from lightning_memmap._compat.required import REQUIRED, has_name
from lightning_memmap.errors import UnsupportedVersionError
from lightning_memmap.strategies import STRATEGIES

CLASSES = {name: strategy for name, strategy, _ in STRATEGIES}


def test_every_strategy_names_what_it_needs_and_has_it_here() -> None:
    assert REQUIRED.keys() == CLASSES.keys()
    for _, *names in REQUIRED.values():
        for alternatives in names:
            assert any(map(has_name, alternatives.split("|")))


@pytest.mark.parametrize("name", CLASSES)
def test_strategy_without_a_name_that_it_needs_says_so(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    strategy: Any = CLASSES[name]
    alternative, *names = REQUIRED[name]
    strategy()
    for alternatives in names:
        for path in alternatives.split("|"):
            if has_name(path):
                delete(monkeypatch, path)
        with pytest.raises(UnsupportedVersionError) as raised:
            strategy()
        monkeypatch.undo()
        package = path.partition(".")[0]
        for word in (repr(name), f"{package} {version(package)}", alternative):
            assert word in str(raised.value)


def delete(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Remove a name from its module, or the class that it leads to."""
    module, _, attributes = path.partition(":")
    *owners, last = attributes.split(".")
    owner: Any = import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    if not isinstance(owner, type | ModuleType):
        # An attribute of an object of C++ can't be removed; the object can.
        monkeypatch.delattr(import_module(module).Variable, owners[-1])
        return
    owners_of_it = [base for base in getattr(owner, "__mro__", ()) if last in vars(base)]
    monkeypatch.delattr((owners_of_it or [owner])[0], last)
