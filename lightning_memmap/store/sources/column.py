"""What the sources have in common: a column, whose rows are read many at once."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_memmap.sampling import Integers
from lightning_memmap.schema import Field, Node, Values

#: Rows in a range of step 1, or in any order, int64 of shape (n,).
Rows = range | Integers


class Column(ABC):
    """Rows that lie in an array or a column of a table, with one field or several."""

    @abstractmethod
    def take(self, rows: Rows) -> Any:
        """Some rows, as an array or a column of the same library."""

    @abstractmethod
    def values(self, found: Any, node: Node, fields: Sequence[Field]) -> list[Values]:
        """What taken rows have for each field. A SchemaError has them read one by one."""

    def pieces(self, rows: Integers) -> Integers | None:
        """In which piece of its files each row is, where a piece is read as a whole."""
        return None


def as_range(rows: Integers) -> Rows:
    """Rows as a range, where they are one: it is read without a copy."""
    is_range = len(rows) > 0 and bool((np.diff(rows) == 1).all())
    return range(int(rows[0]), int(rows[-1]) + 1) if is_range else rows


def by_piece(pieces: Integers) -> tuple[list[Integers], Integers | None]:
    """Where the rows of each piece are among some rows, and their order once they are joined."""
    if (np.diff(pieces) >= 0).all():
        order, back = np.arange(len(pieces)), None
    else:
        order = np.argsort(pieces, kind="stable")
        back = np.argsort(order)
    return np.split(order, np.flatnonzero(np.diff(pieces[order])) + 1), back
