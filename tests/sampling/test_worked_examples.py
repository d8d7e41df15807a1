"""The worked examples at the head of the files in sampling/ hold."""

import numpy as np
import pytest

from lightning_memmap.integers import Runs, ranges
from lightning_memmap.sampling import (
    Bucketed,
    DrawnSampler,
    Pool,
    SequentialSampler,
    ShuffledSampler,
    Weighted,
)
from lightning_memmap.sampling.identity import FrozenArray
from lightning_memmap.sampling.mixture import Sets, _read_in_turn
from lightning_memmap.sampling.permutations import BlockPermutation, _Rotated
from lightning_memmap.sampling.rows import Shards, StoreRows, WindowedRows
from lightning_memmap.sampling.schedule import BatchSchedule
from tests.support.rows import pool_of

SEVEN = Shards(7, 3)


def rows_of_shards(pool: Pool) -> list[list[int]]:
    return [pool.shard_dataset_rows(shard).tolist() for shard in range(pool.num_shards)]


def test_sampler_positions_are_served_by_their_shards() -> None:
    pool = pool_of(7, 3)
    assert rows_of_shards(pool) == [[0, 3, 6], [1, 4], [2, 5]]
    assert SequentialSampler(pool).dataset_rows(0, range(7)).tolist() == [0, 1, 2, 3, 4, 5, 6]
    for seed in range(100):
        order = ShuffledSampler(pool, seed).dataset_rows(0, range(7))
        assert (order % 3).tolist() == [0, 1, 2, 0, 1, 2, 0]
        if order.tolist() == [3, 4, 2, 6, 1, 5, 0]:
            return
    pytest.fail("the order shown is not an order of any seed")


def test_rows_have_three_numberings() -> None:
    subset = StoreRows.of(SEVEN, np.array([6, 1, 4, 3]))
    numbers = np.arange(4)
    assert subset.dataset_rows(numbers).tolist() == [6, 1, 4, 3]
    assert subset.file_rows(numbers).tolist() == [2, 3, 4, 1]
    assert subset.storage_ranks.tolist() == [0, 2, 3, 1]
    assert SEVEN.rows(np.arange(7)).tolist() == [0, 3, 6, 1, 4, 2, 5]
    assert ranges(np.array([5, 0]), np.array([2, 3])).tolist() == [5, 6, 0, 1, 2]


def test_windows_are_numbered_series_after_series() -> None:
    class BFirst(StoreRows):
        def subset_index_at(self, ranks: np.ndarray) -> np.ndarray:
            return 1 - ranks

    windows = WindowedRows(BFirst(Shards(2, 1)), ("x",), FrozenArray(np.array([5, 6])), 3, 2)
    numbers = np.arange(4)
    assert windows.file_rows(numbers).tolist() == [2, 3, 0, 1]
    assert windows.names(numbers) == [[0, 0], [0, 2], [1, 0], [1, 2]]


def test_pools_are_striped_contiguous_or_chosen() -> None:
    rows = StoreRows(SEVEN)
    striped = Pool.of(rows, 3, True)
    assert rows_of_shards(striped) == [[0, 3, 6], [1, 4], [2, 5]]
    line = Pool.of(
        WindowedRows(StoreRows(Shards(1, 1)), ("x",), FrozenArray(np.array([7])), 1, 1), 3
    )
    assert rows_of_shards(line) == [[0, 1, 2], [3, 4], [5, 6]]
    chosen = striped.choose(np.array([2, 2, 2]), np.array([1, 2, 2, 4, 5, 6]))
    assert rows_of_shards(chosen) == [[3, 6], [6, 4], [2, 5]]
    runs = striped.choose(np.array([2, 1, 1]), Runs(np.array([0, 2]), np.array([0, 2])))
    assert rows_of_shards(runs) == [[0, 3], [4], [2]]


def test_drawn_sampler_draws_permutes_and_arranges() -> None:
    class Example(DrawnSampler):
        def draw(self, epoch: int, shard: int) -> np.ndarray:
            return np.array([0, 1, 1, 2]) if shard == 1 else super().draw(epoch, shard)

    pool = pool_of(9, 3)
    pool = pool.choose(np.array([4, 3, 3]), np.array([0, 1, 2, 2, 3, 4, 5, 6, 7, 8]))
    order = Example(pool, num_samples=11)
    assert order.positions_per_shard.tolist() == [4, 4, 3]
    rows = order.dataset_rows(0, range(11))
    assert sorted(rows[1::3].tolist()) == [1, 4, 4, 7]


def test_rotated_permutations_of_two_shards() -> None:
    rotated = object.__new__(_Rotated)
    first, last = np.array([2, 0, 3, 1], np.uint32), np.array([1, 3, 0, 2], np.uint32)
    rotated._first, rotated._last = first, np.concatenate([last, last])
    rotated._rotations = np.array([0, 1], np.uint32)
    rotated._replaced, rotated._replacement = np.array([-1, -1]), np.array([0, 0])
    grid = rotated.grid(0, 4, np.arange(2), np.zeros(2, np.int64)).reshape(4, 2)
    assert grid.T.tolist() == [[0, 1, 2, 3], [2, 3, 1, 0]]


def test_blocks_are_cut_from_a_circle() -> None:
    for seed in range(1000):
        blocks = BlockPermutation(np.array([8, 7, 7]), 3, seed, 0)
        runs = [[row for run in blocks.runs(number) for row in run] for number in range(3)]
        if runs == [[1, 2, 3], [5, 6, 0], [4, 7]]:
            return
        assert sorted(row for run in runs for row in run) == list(range(8))
    pytest.fail("the blocks shown are not the blocks of any seed")


class OneField:
    """Seven rows, and no field to look up."""

    num_rows = 7


def test_weighted_rows_are_laid_out_on_a_line() -> None:
    sampler = Weighted([2, 1, 1, 1, 1, 1, 1], num_samples=8).make(
        Pool.of(StoreRows(Shards(7, 1)), 3, False), 0, OneField()
    )
    assert sampler.positions_per_shard.tolist() == [3, 3, 2]
    assert rows_of_shards(sampler.pool) == [[0, 1], [2, 3, 4], [5, 6]]
    rows = sampler.dataset_rows(0, range(8))
    assert sorted(rows.tolist()) == [0, 0, 1, 2, 3, 4, 5, 6]


def test_mixture_sets_are_cut_into_shards() -> None:
    sections = Sets((4, 2), (3, 3)).sections(3)
    shown = [
        (shard, number, stop - start, list(range(row_start, row_stop)))
        for shard, number, start, stop, row_start, row_stop, _ in zip(
            *(column.tolist() for column in sections), strict=True
        )
    ]
    assert shown == [(0, 0, 2, [0, 1, 2]), (1, 1, 2, [0, 1]), (2, 0, 1, [2, 3]), (2, 1, 1, [0])]
    runs = _read_in_turn(np.array([10]), np.array([3]), np.array([2]), np.array([5]))
    assert ranges(*runs).tolist() == [12, 10, 11, 12, 10]
    assert len(runs[0]) == 3


def test_buckets_hold_rows_of_similar_length() -> None:
    lengths = [5, 9, 1, 7, 2, 8]
    sampler = Bucketed(lengths, bucket_size=2, num_buckets=3).make(
        pool_of(6, 1), 0, type("Six", (), {"num_rows": 6})()
    )
    epochs = [
        [lengths[row] for row in sampler.dataset_rows(epoch, range(6)).tolist()]
        for epoch in range(60)
    ]
    assert [5, 7, 1, 2, 8, 9] in epochs
    for order in epochs:
        buckets = sorted([order[:2], order[2:4], order[4:]])
        assert buckets == [[1, 2], [5, 7], [8, 9]]


def test_last_step_shares_rows_with_the_step_before() -> None:
    for num_shards, stops in ((3, [8, 16, 22]), (12, [8, 15, 22])):
        schedule = BatchSchedule(22, 8, num_shards)
        assert [schedule.bounds(step)[1] for step in range(len(schedule))] == stops


def test_computed_order_over_a_pool_of_other_sizes_is_rejected() -> None:
    pool = pool_of(9, 3).choose(np.array([4, 3, 2]), np.arange(9))
    with pytest.raises(ValueError, match="ShuffledSampler"):
        ShuffledSampler(pool)


@pytest.mark.parametrize("kind", [SequentialSampler, ShuffledSampler])
def test_blocks_below_one_row_are_rejected(kind: type) -> None:
    with pytest.raises(ValueError, match="shuffle_block=0"):
        kind(pool_of(9, 3), shuffle_block=0)
    with pytest.raises(ValueError, match="seed=-1"):
        kind(pool_of(9, 3), -1)
