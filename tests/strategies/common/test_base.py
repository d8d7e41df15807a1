"""Attributes that a strategy replaces are there again once it undoes that."""

from types import SimpleNamespace

from lightning_memmap.strategies.common.base import Overrides


def test_undo_restores_what_was_there_and_removes_the_rest() -> None:
    owner = SimpleNamespace(theirs=1)
    overrides = Overrides()
    for value in (2, 3):
        overrides.set(owner, "theirs", value)
        overrides.set(owner, "ours", value)
    assert vars(owner) == {"theirs": 3, "ours": 3}
    overrides.undo()
    assert vars(owner) == {"theirs": 1}
