"""Rows divided into ranges: about a second of work each, however long a row takes."""

from collections.abc import Callable, Iterable, Iterator

from lightning_memmap.sampling import Integers

#: Work of one range: short enough for the progress bar and the journal, long enough to be cheap.
_RANGE_S = 1.0
#: Ranges get smaller towards the end, so that all workers end together, down to this.
_MIN_RANGE_S = 0.05


class RowRanges:
    """Divides rows into ranges of about a second of work, while earlier ones are worked on."""

    def __init__(
        self,
        todo: Iterable[range],
        *,
        max_rows: int,
        num_workers: int,
        row_s: float,
        advance: Callable[[int], None] = lambda num_rows: None,
    ) -> None:
        self._todo = [rows for rows in todo if rows]
        self._max_rows = max_rows
        self._num_workers = num_workers
        self._row_s = row_s
        self._advance = advance
        self._num_left = sum(map(len, self._todo))

    def __iter__(self) -> Iterator[range]:
        for rows in self._todo:
            while rows:
                count = min(self._next_count(), len(rows))
                self._num_left -= count
                yield rows[:count]
                rows = rows[count:]

    def note(self, rows: range | Integers, duration_s: float) -> None:
        """Take into account how long rows took."""
        self._row_s = (self._row_s + duration_s / len(rows)) / 2
        self._advance(len(rows))

    def _next_count(self) -> int:
        row_s = max(self._row_s, 1e-9)
        wanted = _RANGE_S / row_s
        if self._num_workers > 1:
            # Each worker has one range in hand and one waiting. As much again is left for those
            # that are done with theirs sooner.
            fair = self._num_left / (4 * self._num_workers)
            wanted = min(wanted, max(fair, _MIN_RANGE_S / row_s))
        return max(1, min(self._max_rows, int(wanted)))


def merge_ranges(ranges: Iterable[range]) -> list[range]:
    """Return the same rows in as few ranges as possible, in ascending order."""
    merged: list[range] = []
    for rows in sorted(ranges, key=lambda rows: rows.start):
        if merged and rows.start <= merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, rows.stop))
        else:
            merged.append(rows)
    return merged


def missing_ranges(done: Iterable[range], stop: int, first: int = 0) -> list[range]:
    """Return the rows from ``first`` to ``stop`` that are in none of the ranges."""
    missing = []
    for rows in (*merge_ranges(done), range(stop, stop)):
        end = min(rows.start, stop)
        if end > first:
            missing.append(range(first, end))
        first = max(first, rows.stop)
    return missing
