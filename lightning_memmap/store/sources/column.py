"""What the columns of tables have in common: their rows are read many at once."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from itertools import pairwise, zip_longest
from typing import NamedTuple

import numpy as np

from lightning_memmap import schema
from lightning_memmap.sampling import Integers
from lightning_memmap.schema.stack import Column
from lightning_memmap.schema.structure import Path

#: Rows in a range of step 1, or in any order, int64 of shape (n,).
Rows = range | Integers


class Extent(NamedTuple):
    """What is known of all rows of a column without a look at their values."""

    has_missing: bool = False
    lengths: tuple[tuple[int, int], ...] = ()
    """Of lists, and of the lists in these: the least length and the greatest."""

    @property
    def form(self) -> schema.Form | None:
        """The form that a build needs; None where any few rows show what the others have."""
        differ = [least < most for least, most in self.lengths]
        # Lists of one length have the shape of an array, or are a field for each item.
        if differ and differ[0]:
            return schema.Rows(len(differ) - differ[::-1].index(True), self.has_missing)
        return schema.Nullable() if self.has_missing else None


#: By the keys that lead to it in a sample, what has an extent.
Extents = dict[Path, Extent]


def join_extents(parts: Iterable[Extents]) -> Extents:
    """What all rows of several parts have."""
    found = Extents()
    for path, (has_missing, lengths) in (each for part in parts for each in part.items()):
        known = found.get(path, Extent())
        levels = [[*filter(None, pair)] for pair in zip_longest(known.lengths, lengths)]
        joined = tuple((min(each)[0], max(most for _, most in each)) for each in levels)
        found[path] = Extent(known.has_missing or has_missing, joined)
    return found


class TableColumn(ABC):
    """A column of a table."""

    @abstractmethod
    def rows(self, rows: Rows) -> Column:
        """Some rows."""

    def extents(self) -> Extents:
        """What is known of all rows, and of the parts of structs."""
        return {}

    def pieces(self) -> Integers | None:
        """By row, in which piece of its files it is, where a piece is read as a whole."""
        return None


def as_range(rows: Integers) -> Rows:
    """Rows as a range, where they are one: it is read without a copy."""
    is_range = len(rows) > 0 and bool((np.diff(rows) == 1).all())
    return range(int(rows[0]), int(rows[-1]) + 1) if is_range else rows


def by_piece(rows: Rows, ends: Integers) -> tuple[list[tuple[int, Rows]], Integers | None]:
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
