import numpy as np
import pytest

from lightning_memmap.integers import (
    Runs,
    bounds_of,
    ceil_div,
    differs_from_previous,
    distinct,
    elements_of,
    group_of,
    group_sums,
    index_in_group,
    num_strided,
    ranges,
    starts_of,
    strided,
)

SIZES = np.array([3, 0, 1, 2])


def test_groups_are_described_as_in_the_worked_example() -> None:
    assert starts_of(SIZES).tolist() == [0, 3, 3, 4]
    assert bounds_of(SIZES).tolist() == [0, 3, 3, 4, 6]
    assert group_of(SIZES).tolist() == [0, 0, 0, 2, 3, 3]
    assert index_in_group(SIZES).tolist() == [0, 1, 2, 0, 0, 1]
    assert elements_of(np.array([3, 0]), SIZES).tolist() == [4, 5, 0, 1, 2]
    assert bounds_of([]).tolist() == [0]


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.int32, np.int64, np.float32])
def test_group_sums_do_not_overflow_and_empty_groups_are_zero(dtype: type) -> None:
    values = np.array([200, 100, 1, 7, 0, 90]).astype(dtype)
    expected = [int(part.sum(dtype=np.int64)) for part in np.split(values, [3, 3, 4])]
    sums = group_sums(values, SIZES)
    assert sums.tolist() == expected
    assert sums.dtype == (np.float64 if dtype == np.float32 else np.int64)


def test_ceil_div_rounds_up() -> None:
    assert [ceil_div(value, 3) for value in range(-3, 5)] == [-1, 0, 0, 0, 1, 1, 1, 2]
    assert ceil_div(np.array([6, 7]), np.array([3, 3])).tolist() == [2, 3]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_strided_integers_are_counted_as_they_are_listed(size: int) -> None:
    for rank in range(size):
        counts = [len([i for i in range(stop) if i % size == rank]) for stop in range(13)]
        assert [num_strided(stop, rank, size) for stop in range(13)] == counts
        assert num_strided(np.arange(13), rank, size).tolist() == counts
        for start in range(7):
            assert [*strided(start, 12, rank, size)] == [
                i for i in range(start, 12) if i % size == rank
            ]


def test_values_that_differ_from_the_one_before() -> None:
    values = np.array([4, 4, 1, 1, 1, 4])
    assert np.flatnonzero(differs_from_previous(values)).tolist() == [0, 2, 5]
    assert differs_from_previous(values[:0]).tolist() == []
    assert distinct(values).tolist() == [1, 4]


def test_runs_of_ranges_hold_their_integers_one_range_after_another() -> None:
    starts = np.array([7, 50, 20, 8])
    runs = Runs.of_ranges(starts, SIZES)
    assert runs.at(np.arange(6)).tolist() == [7, 8, 9, 20, 8, 9]
    assert runs.at(np.arange(6)).tolist() == ranges(starts, SIZES).tolist()
