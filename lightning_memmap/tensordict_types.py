"""Type checks for TensorDicts that do not import tensordict.

Importing it takes as long as the rest of this package, and values can only be TensorDicts if it was
imported.
"""

import sys
from typing import Any


def tensordict_types() -> tuple[Any, ...]:
    """Return the base class of TensorDicts, for ``isinstance``; empty if it is not imported."""
    base = getattr(sys.modules.get("tensordict"), "TensorDictBase", None)
    return () if base is None else (base,)


def is_tensorclass(value: Any) -> bool:
    """Return whether a value is an instance of a tensorclass."""
    check = getattr(sys.modules.get("tensordict"), "is_tensorclass", None)
    return check is not None and bool(check(value))


def is_exactly(value: Any, name: str) -> bool:
    """Return whether the class of a value is a class of tensordict, and not a subclass of it."""
    return type(value) is getattr(sys.modules.get("tensordict"), name, None)
