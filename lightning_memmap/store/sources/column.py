"""What the columns of tables have in common: their rows are read many at once."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from itertools import pairwise, zip_longest

import numpy as np

from lightning_memmap.sampling import Integers
from lightning_memmap.schema import Form, Nullable, Rows
from lightning_memmap.schema.fields import field_name
from lightning_memmap.schema.stack import Column
from lightning_memmap.schema.structure import Path
from lightning_memmap.store.workers import RowNumbers

#: By the keys in a sample, what is known of all rows without a look at their values:
#: of lists the least length and the greatest, and of lists in these; None where rows have no value.
Extents = dict[Path, list[set[int | None]]]


def join_extents(parts: Iterable[Extents]) -> Extents:
    """What all rows of several parts have."""
    found = Extents()
    for path, levels in (each for part in parts for each in part.items()):
        pairs = zip_longest(found.get(path, ()), levels, fillvalue=set[int | None]())
        found[path] = [one | other for one, other in pairs]
    return found


def forms_of(extents: Extents) -> dict[str, Form]:
    """The forms that a build needs, since a few rows may not show what the others have."""
    found = dict[str, Form]()
    for path, levels in extents.items():
        # What is None within a struct is found as in any sample.
        has_missing = None in levels[0] and len(path) == 1
        differ = [len(each - {None}) > 1 for each in levels]
        # Lists of one length have the shape of an array, or are a field for each item; those that
        # are all empty have no values that a form could be for.
        if differ[0] and {0} not in levels:
            found[field_name(path)] = Rows(len(differ) - differ[::-1].index(True), has_missing)
        elif has_missing:
            found[field_name(path)] = Nullable()
    return found


class TableColumn(ABC):
    """A column of a table."""

    @abstractmethod
    def rows(self, rows: RowNumbers) -> Column:
        """Some rows."""

    def extents(self) -> Extents:
        """What is known of all rows, and of the parts of structs."""
        return {}

    def pieces(self) -> Integers | None:
        """By row, in which piece of its files it is, where a piece is read as a whole."""
        return None


def as_range(rows: Integers) -> RowNumbers:
    """Rows as a range, where they are one: it is read without a copy."""
    is_range = len(rows) > 0 and bool((np.diff(rows) == 1).all())
    return range(int(rows[0]), int(rows[-1]) + 1) if is_range else rows


def by_piece(
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
