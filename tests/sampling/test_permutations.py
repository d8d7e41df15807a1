"""Windows of rows: what comes together lies together, and is well mixed."""

import math
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from time import sleep
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memmap.sampling import Sampler, permutations
from lightning_memmap.sampling.permutations import BlockPermutation
from lightning_memmap.sampling.rows import shard_rows
from lightning_memmap.sampling.schedule import DEFAULT_BLOCK_BYTES, Blocks, default_block
from tests.sampling.test_sampler import CHI_SQUARE_999, chi_square
from tests.support.rows import at, make_sampler

SEEDS = st.integers(0, 2**63 - 1)


@st.composite
def windows(draw: st.DrawFn) -> Blocks:
    rows = draw(st.sampled_from([1, 2, 3, 7, 20, 1024, 1300]))
    # Some windows, the last of which may be short.
    few = st.integers(1, 300)
    num_rows = draw(few if rows < 1000 else few | st.integers(3000, 9000))
    shuffle = draw(st.booleans())
    sampler = make_sampler(num_rows, draw(st.integers(1, 25)), draw(SEEDS), shuffle, rows)
    return Blocks(sampler)


def offsets_by_window(cut: Blocks, epoch: int) -> list[list[list[int]]]:
    """By window and shard, the offsets that come then."""
    sampler, size = cut.sampler, cut.num_rounds * cut.sampler.num_shards
    found = []
    for first in range(0, sampler.num_positions, size):
        shards, offsets = at(sampler, epoch, range(first, min(sampler.num_positions, first + size)))
        found.append([offsets[shards == shard].tolist() for shard in range(sampler.num_shards)])
    return found


def test_block_is_permuted_once_for_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    order, calls, permuted = (
        BlockPermutation(np.array([90, 90]), 9, 1, 0),
        [],
        permutations.permuted,
    )

    def slow(*arguments: Any) -> Any:
        calls.append(arguments)
        sleep(0.02)
        return permuted(*arguments)

    monkeypatch.setattr(permutations, "permuted", slow)
    zeros = np.zeros(2, np.int64)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: order.grid(0, 9, np.arange(2), zeros), range(4)))
    assert all(np.array_equal(each, found[0]) for each in found)
    # That of the blocks was made before.
    assert len(calls) == 1


@given(windows(), st.integers(0, 5))
def test_window_is_the_runs_of_each_shard(cut: Blocks, epoch: int) -> None:
    sizes = shard_rows(cut.sampler.num_positions, cut.sampler.num_shards)
    found = offsets_by_window(cut, epoch)
    assert len(cut) == len(found)
    for number, by_shard in enumerate(found):
        runs = cut.sampler.block_runs(epoch, number)
        wanted = [offset for run in runs for offset in run]
        # Few runs, and long ones: at most a wrap around, and the row that some shards have more.
        assert len(runs) <= 2 + (number == len(cut) - 1)
        assert len(wanted) <= cut.num_rounds
        assert len(wanted) == cut.num_rounds or number == len(cut) - 1
        for shard, offsets in enumerate(by_shard):
            assert sorted(offsets) == sorted(o for o in wanted if o < sizes[shard])
            # A short shard lacks the last one alone.
            assert len(offsets) >= len(wanted) - 1


def test_windows_known_seed_gives_known_rows() -> None:
    # Checkpoints stand for this order: it must never change.
    def rows(sampler: Sampler, epoch: int, positions: range) -> list[int]:
        shards, offsets = at(sampler, epoch, positions)
        return (offsets * sampler.num_shards + shards).tolist()

    assert rows(make_sampler(13, 3, 42, True, 2), 5, range(13)) == GOLDEN_SMALL
    middle = make_sampler(100_003, 24, 7, True, 300)
    assert rows(middle, 2, range(50_000, 50_005)) == GOLDEN_MIDDLE
    large = make_sampler(10**9, 24, 7, True, 50_000)
    assert rows(large, 2, range(123_456_789, 123_456_794)) == GOLDEN_LARGE


GOLDEN_SMALL = [9, 10, 2, 0, 1, 11, 3, 4, 8, 6, 7, 5, 12]
GOLDEN_MIDDLE = [80576, 78537, 79858, 77723, 80172]
GOLDEN_LARGE = [107128077, 107194942, 106584191, 107172384, 106425025]


def test_windows_of_huge_dataset_are_small_in_memory() -> None:
    tracemalloc.start()
    try:
        sampler = make_sampler(10**10, 24, 1, True, 20_000)
        for start in (0, 5 * 10**9, 10**10 - 50_000):
            _, offsets = at(sampler, 3, range(start, start + 50_000))
            assert offsets.max() < 10**10 // 24 + 1
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Of 10 billion rows and 20,000 windows. Seen: 3 MB.
    assert peak_bytes < 2**25


# Mixing: see `test_sampler`.


@pytest.mark.slow
def test_windows_come_in_each_order_equally_often() -> None:
    # 4 windows of 5 rows of one shard, told by their first offset from where they were cut.
    found: Counter[tuple[int, ...]] = Counter()
    for seed in range(2400):
        firsts = [make_sampler(20, 1, seed, True, 5).block_runs(0, n)[0].start for n in range(4)]
        found[tuple(np.argsort(np.argsort(firsts)).tolist())] += 1
    assert len(found) == 24
    assert chi_square(np.array(list(found.values())), 100) < CHI_SQUARE_999[23]


@pytest.mark.parametrize("window", [3, 2])
@pytest.mark.slow
def test_each_row_is_equally_often_at_a_position(window: int) -> None:
    # With a rest of 2 rows, and at 10 windows of 2 rows.
    counts = np.zeros((20, 20))
    for seed in range(4000):
        sampler = make_sampler(20, 1, seed, True, window)
        for position in (0, 7, 10, 19):
            _, offsets = at(sampler, 0, range(position, position + 1))
            counts[position, offsets] += 1
    for position in (0, 7, 10, 19):
        assert chi_square(counts[position], 200) < CHI_SQUARE_999[19]


def test_windows_and_epochs_have_orders_of_their_own() -> None:
    sampler = make_sampler(24 * 50, 1, 3, True, 50)
    _, first = at(sampler, 0, range(1200))
    inside = [
        tuple((part - sampler.block_runs(0, number)[0].start) % 1200)
        for number, part in enumerate(first.reshape(24, 50))
    ]
    assert len(set(inside)) == 24
    orders = [at(sampler, epoch, range(1200))[1].tolist() for epoch in range(4)]
    assert all(one != other for one, other in pairwise(orders))


@pytest.mark.slow
def test_other_rows_share_a_window_in_another_epoch() -> None:
    # Rows 0 and 1 of a shard are in one window of 4 of 100 rows with probability 3/4: not always,
    # and not never. 4 standard errors of a binomial variable.
    together = 0
    for epoch in range(1000):
        sampler = make_sampler(100, 1, 5, True, 4)
        _, offsets = at(sampler, epoch, range(100))
        numbers = np.argsort(offsets) // 4
        together += int(numbers[0] == numbers[1])
    assert abs(together - 750) < 4 * math.sqrt(1000 * 0.75 * 0.25)


def test_default_block_is_of_the_store_alone() -> None:
    rows = default_block(24, 150_528)
    assert rows * 24 * 150_528 <= DEFAULT_BLOCK_BYTES < (rows + 1) * 24 * 150_528
    assert default_block(24, 2**40) == 1
    assert default_block(24, 0) > 0
