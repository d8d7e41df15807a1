"""How rows are given to workers: each row once, and no worker is left waiting."""

import heapq
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memmap.store.ranges import RowRanges, merge_ranges, missing_ranges

row_ranges = st.builds(
    lambda first, count: range(first, first + count), st.integers(0, 300), st.integers(1, 100)
)


@given(
    st.lists(row_ranges, max_size=20),
    st.integers(0, 9),
    st.integers(1, 200),
    st.floats(1e-9, 1e3),
    st.lists(st.floats(0, 1e4), min_size=1),
)
def test_ranges_deal_each_missing_row_once_whatever_rows_cost(
    done: list[range], num_workers: int, max_rows: int, row_s: float, durations: list[float]
) -> None:
    todo = missing_ranges(done, 400)
    ranges = RowRanges(todo, max_rows=max_rows, num_workers=num_workers, row_s=row_s)
    dealt = []
    for index, rows in enumerate(ranges):
        assert 1 <= len(rows) <= max_rows
        dealt += rows
        ranges.note(rows, durations[index % len(durations)])
    assert sorted([*dealt, *{row for rows in done for row in rows}]) == list(range(400))
    assert sum(map(len, merge_ranges(done))) + len(dealt) == 400


def makespan_s(num_rows: int, row_s: float, num_workers: int, known_row_s: float) -> float:
    """The time when the last worker ends. Each has one range in hand and one waiting."""
    ranges = RowRanges([range(num_rows)], max_rows=1024, num_workers=num_workers, row_s=known_row_s)
    tasks, ends = iter(ranges), [(0.0, worker) for worker in range(num_workers)]
    waiting = [deque([next(tasks), next(tasks)]) for _ in range(num_workers)]
    last_s = 0.0
    while ends:
        now_s, worker = heapq.heappop(ends)
        if waiting[worker]:
            rows = waiting[worker].popleft()
            last_s = now_s + len(rows) * row_s
            ranges.note(rows, len(rows) * row_s)
            waiting[worker].extend([task] if (task := next(tasks, None)) else [])
            heapq.heappush(ends, (last_s, worker))
    return last_s


@pytest.mark.parametrize("known_row_s", [0.001, 0.05, 1.0])
def test_ranges_of_slow_rows_keep_all_workers_busy_to_the_end(known_row_s: float) -> None:
    # Each of 4 workers has 100 rows to read in the best case.
    assert makespan_s(400, 0.05, 4, known_row_s) <= 1.1 * 100 * 0.05


def test_ranges_of_cheap_rows_are_as_large_as_they_may_be() -> None:
    ranges = list(RowRanges([range(100_000)], max_rows=1024, num_workers=4, row_s=1e-5))
    assert len(ranges) == -(-100_000 // 1024)
