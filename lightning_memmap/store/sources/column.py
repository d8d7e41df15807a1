"""What the sources have in common: a column, whose rows are read many at once."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

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
        """What taken rows, of a structure, have for each of its fields."""

    def pieces(self, rows: Integers) -> Integers | None:
        """In which piece of its files each row is, where a piece is read as a whole."""
        return None
