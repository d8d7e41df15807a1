"""The base class of table columns, whose rows are read many at once."""

from abc import ABC, abstractmethod
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from lightning_memmap.integers import Integers
from lightning_memmap.schema.stack import Branch
from lightning_memmap.store.workers import RowIndices

if TYPE_CHECKING:
    from lightning_memmap.store.sources.arrow_facts import ArrowFacts


class TableColumn(ABC):
    """A column of a table."""

    #: Whether samples have the values of the Arrow column, so that its types decide the fields.
    is_direct = True
    #: Whether samples have Python's numbers and lists instead of arrays.
    are_python = False
    #: Whether samples have NaN instead of None.
    has_nan = False

    @abstractmethod
    def rows(self, rows: RowIndices) -> Branch:
        """Read rows."""

    @abstractmethod
    def find_facts(self) -> "ArrowFacts":
        """Find the facts about all rows that decide the fields of the column."""

    def row_groups(self) -> Integers | None:
        """Return the row group of each row, int64, if files are read one row group at a time."""
        return None


def simplify_rows(rows: Integers) -> RowIndices:
    """Return consecutive rows as a range, which is read without a copy; other rows unchanged."""
    is_range = len(rows) > 0 and bool((np.diff(rows) == 1).all())
    return range(int(rows[0]), int(rows[-1]) + 1) if is_range else rows


def split_by_group(
    rows: RowIndices, stops: Integers
) -> tuple[list[tuple[int, RowIndices]], Integers | None]:
    """Split rows by the group that holds them.

    With groups that stop at rows 3 and 5, the rows [4, 0, 3] are row 0 of group 0, and rows 1 and 0
    of group 1. Read in this order, they are rows 0, 4 and 3, so the inverse is [1, 0, 2].

    Args:
        rows: The rows, counted over all groups.
        stops: The row after the last one of each group.

    Returns:
        The number of each group, with its rows counted from its first row. The indices that
        restore the order of `rows` once the groups are concatenated; None if it's the same order.
    """
    if isinstance(rows, range):
        first, last = np.searchsorted(stops, (rows.start, rows.stop - 1), side="right").tolist()
        bounds = [rows.start, *stops[first:last].tolist(), rows.stop]
        offsets = [0, *stops.tolist()][first : last + 1]
        ranges = (
            range(start - offset, stop - offset)
            for offset, (start, stop) in zip(offsets, pairwise(bounds), strict=True)
        )
        return [pair for pair in enumerate(ranges, first) if pair[1]], None
    indices = np.asarray(rows, np.int64)
    groups = np.searchsorted(stops, indices, side="right")
    inverse = None
    if (np.diff(groups) < 0).any():
        order = np.argsort(groups, kind="stable")
        indices = indices[order]
        groups = groups[order]
        inverse = np.argsort(order)
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    pairs = []
    for group, part in zip(groups[starts].tolist(), np.split(indices, starts[1:]), strict=True):
        offset = stops[group - 1] if group else 0
        pairs.append((group, simplify_rows(part - offset)))
    return pairs, inverse
