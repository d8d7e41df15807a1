"""Attributes of other objects, set for as long as a strategy is set up."""

from typing import Any


class Overrides:
    """Sets attributes of instances, and restores them."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, dict[str, Any]]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute until `undo`."""
        before = {name: vars(owner)[name]} if name in vars(owner) else {}
        self._before.append((owner, name, before))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Restore the attributes that were set. A second call does nothing."""
        while self._before:
            owner, name, before = self._before.pop()
            vars(owner).pop(name, None)
            vars(owner).update(before)
