"""What the columns of tables have in common: their rows are read many at once."""

from abc import ABC, abstractmethod
from itertools import pairwise
from typing import Any

import numpy as np

from lightning_memmap.sampling.rows import Integers
from lightning_memmap.schema.stack import Branch
from lightning_memmap.store.workers import RowNumbers


class TableColumn(ABC):
    """A column of a table."""

    @abstractmethod
    def rows(self, rows: RowNumbers) -> Branch:
        """Some rows."""

    def representative_values(self) -> list[Any]:
        """A few of its values, which show what all have: None and others, the shortest list and the
        longest. None where all are alike."""
        return []

    def row_groups(self) -> Integers | None:
        """By row, in which piece of its files it is, where a piece is read as a whole."""
        return None


def as_range(rows: Integers) -> RowNumbers:
    """Rows as a range, where they are one: it is read without a copy."""
    is_range = len(rows) > 0 and bool((np.diff(rows) == 1).all())
    return range(int(rows[0]), int(rows[-1]) + 1) if is_range else rows


def split_by_group(
    rows: RowNumbers, ends: Integers
) -> tuple[list[tuple[int, RowNumbers]], Integers | None]:
    """The pieces in which rows are, by where each piece ends: its number, and its rows counted from
    its first one; and the order of all rows once these are joined, where it is another one."""
    if isinstance(rows, range):
        first, last = np.searchsorted(ends, (rows.start, rows.stop - 1), side="right").tolist()
        edges = [rows.start, *ends[first:last].tolist(), rows.stop]
        starts = [0, *ends.tolist()][first : last + 1]
        pairs = zip(starts, pairwise(edges), strict=True)
        within = (range(begin - start, end - start) for start, (begin, end) in pairs)
        return [each for each in enumerate(within, first) if each[1]], None
    numbers, back = np.asarray(rows, np.int64), None
    pieces = np.searchsorted(ends, numbers, side="right")
    if (np.diff(pieces) < 0).any():
        order = np.argsort(pieces, kind="stable")
        numbers, pieces, back = numbers[order], pieces[order], np.argsort(order)
    begins = np.flatnonzero(np.diff(pieces, prepend=-1))
    found = zip(pieces[begins].tolist(), np.split(numbers, begins[1:]), strict=True)
    return [
        (piece, as_range(each - (ends[piece - 1] if piece else 0))) for piece, each in found
    ], back
