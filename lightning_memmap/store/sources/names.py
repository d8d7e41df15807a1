"""The names of the columns that are used of a table."""

from collections.abc import Sequence
from typing import Any


def chosen(names: Sequence[str] | None, found: Sequence[Any]) -> list[Any]:
    """Check which columns to use.

    Args:
        names: The names that a user gives; None for all columns.
        found: The names of all columns of the table.

    Returns:
        The names of the columns to use, in order.

    Raises:
        TypeError: A single string is given in place of names.
        ValueError: A name is not among those of the table, or is there twice.
    """
    if isinstance(names, str):
        raise TypeError(f"names={names!r}: give a list of names")
    wanted = list(found if names is None else names)
    for name in wanted:
        if found.count(name) != 1 or wanted.count(name) != 1:
            what = "there is no such column" if name not in found else "it is there twice"
            raise ValueError(
                f"column {name!r}: {what}; the columns are {', '.join(map(str, found))}"
            )
    return wanted
