"""Names of fields, each of which is safe as the name of a file."""

from collections.abc import Iterable
from reprlib import repr as short_repr
from urllib.parse import quote

from lightning_memmap.errors import SchemaError

#: The longest name of a field: what file systems allow, less the longest suffix of its files.
MAX_NAME_LENGTH = 255 - len(".memmap")


def field_name(path: Iterable[str | int]) -> str:
    """Return the name of the field at a path of keys, which is safe as the name of a file.

    Args:
        path: Keys, names and positions from the outermost container to the leaf. It is empty for a
            sample that is a leaf itself.

    Returns:
        The parts in percent-encoding with ``~`` in place of ``%``, joined by dots; ``value`` for an
        empty path.
    """
    return ".".join(map(_encode, path)) or "value"


def _encode(key: str | int) -> str:
    # Percent-encoding, with "~" for "%", keeps names unique and safe as file names; tensordict
    # encodes a "%" once more. A dot separates levels.
    encoded = quote(str(key), safe="", errors="surrogatepass")
    return encoded.replace(".", "%2E").replace("~", "%7E").replace("%", "~") or "~"


def check_name_length(name: str) -> None:
    """Check that a field's name fits into a file name.

    Args:
        name: The name, as `field_name` makes it.

    Raises:
        SchemaError: It has more than `MAX_NAME_LENGTH` characters.
    """
    if len(name) > MAX_NAME_LENGTH:
        raise SchemaError(
            f"field {short_repr(name)}: the name is longer than the {MAX_NAME_LENGTH} characters"
            " that fit into a file name: use shorter keys in the dataset"
        )


def check_names(names: Iterable[str]) -> None:
    """Check that each field's name leads to a file of its own.

    Args:
        names: The names of all fields of a schema.

    Raises:
        SchemaError: A name is too long, or two names differ at most in upper and lower case.
    """
    seen: dict[str, str] = {}
    for name in names:
        check_name_length(name)
        # Compared without case, for file systems that do the same.
        folded = name.casefold()
        if folded in seen:
            raise SchemaError(
                f"the fields {seen[folded]!r} and {name!r} would share one file name: rename one"
                " of them in the dataset"
            )
        seen[folded] = name
