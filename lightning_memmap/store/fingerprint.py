"""The identity of a dataset: what distinguishes it from others without reading a row."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_memmap.store.dataset_parts import MAX_TEXT_LENGTH, parts_of


@dataclass(frozen=True)
class Fingerprint:
    """The identity of a dataset, in named parts, so that a difference can be named.

    The parts are the class, the length, the source text of the class, and the attributes: values
    and containers of values by their content, functions by their code and what they refer to,
    datasets and other objects by their own attributes. For an attribute that is the path of a file,
    the file's size and time are a part as well. A mismatch costs one comparison of rows, so that
    this need not be finer: of arrays beyond 64 MiB it covers samples, and nothing of the files in a
    directory, of open files, of objects of compiled classes, and of functions that are called.

    Args:
        parts: Text or digest by name of the part.
        given: The fingerprint that the user has given. It decides alone where both sides have one.
    """

    parts: Mapping[str, str]
    given: str | None = None

    @classmethod
    def of(cls, dataset: Any, given: str | None = None) -> "Fingerprint":
        """Take the identity of a dataset, without reading a row.

        Args:
            dataset: The dataset.
            given: The fingerprint that the user has given for it.

        Returns:
            The identity: texts by what they describe, and what was given.

        Raises:
            TypeError: The dataset has no length, and is none that is iterated over.
        """
        return cls(parts_of(dataset), given)

    def difference(self, other: "Fingerprint") -> str | None:
        """Say in words what changed from this identity to another one.

        Args:
            other: The later identity. If the user has given a fingerprint for it, that alone
                decides.

        Returns:
            The changes, at most three of them by name; None if there are none.
        """
        if other.given is not None:
            if self.given == other.given:
                return None
            if self.given is None:
                return f"it was stored without a fingerprint, and now has {other.given!r}"
            return f"its fingerprint was {self.given!r} and is {other.given!r}"
        changed = [
            name
            for name in dict.fromkeys((*self.parts, *other.parts))
            if self.parts.get(name) != other.parts.get(name)
            and not (_is_private(name) and (name in self.parts) != (name in other.parts))
        ]
        if not changed:
            return None
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        return f"{', '.join(changed[:3])}{more} changed"

    def to_json(self) -> dict[str, Any]:
        """Convert this identity to JSON values, as `from_json` reads them.

        Returns:
            A dict with the keys ``given`` and ``parts``.
        """
        return {"given": self.given, "parts": dict(self.parts)}

    @classmethod
    def from_json(cls, value: Any) -> "Fingerprint":
        """Read an identity from JSON values that have not been checked.

        Args:
            value: A dict with the keys ``parts`` and ``given``.

        Raises:
            ValueError: The values describe no identity.
        """
        parts, given = (
            (value.get("parts"), value.get("given")) if isinstance(value, dict) else (0, 0)
        )
        if not isinstance(parts, dict) or not isinstance(given, str | None):
            raise ValueError("its fingerprint is not a JSON object")
        texts = [*parts, *parts.values(), given or ""]
        if not all(isinstance(text, str) and len(text) <= MAX_TEXT_LENGTH for text in texts):
            raise ValueError("its fingerprint holds more than short texts")
        return cls(parts, given)


def check_given(given: str | None, name: str = "fingerprint") -> None:
    """Check what a user gives as a fingerprint.

    Args:
        given: The value; None is allowed.
        name: Name of the argument, for messages.

    Raises:
        TypeError: It is not a string.
        ValueError: It is empty or too long.
    """
    if given is None:
        return
    if not isinstance(given, str):
        raise TypeError(f"{name}={given!r}: give a string that changes whenever the rows do")
    if not 0 < len(given) <= MAX_TEXT_LENGTH:
        raise ValueError(
            f"{name} has {len(given)} characters: give 1 to {MAX_TEXT_LENGTH}, such as a version"
            " or a hash"
        )


def _is_private(name: str) -> bool:
    """Whether a part is that of a private attribute, which may come and go."""
    return name.startswith("attribute ") and name.split(" ")[1].rpartition(".")[2].startswith("_")
