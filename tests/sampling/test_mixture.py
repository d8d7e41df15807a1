"""Mixtures in windows: each row as often as its set's share says, and near its neighbours."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from lightning_memmap.sampling import Curriculum, Mixture, Pool, Sampler, Weighted
from lightning_memmap.sampling.factory import make_sampler
from lightning_memmap.sampling.identity import FrozenArray
from lightning_memmap.sampling.mixture import MixtureSampler
from lightning_memmap.sampling.rows import JoinedRows, Shards, StoreRows, WindowedRows
from tests.support.rows import at, pool_of

FIELDS: Any = None


def joined(sizes: list[int], num_shards: int) -> JoinedRows:
    names = tuple("abcdef"[: len(sizes)])
    parts = tuple(StoreRows(Shards(size, num_shards)) for size in sizes)
    return JoinedRows(names, parts)


def mixture(
    sizes: list[int],
    shares: list[float],
    count: int,
    window: int | None,
    num_shards: int,
    seed: int,
) -> MixtureSampler:
    factory = Mixture(dict(zip("abcdef", shares, strict=False)), count)
    pool = Pool.of(joined(sizes, num_shards), num_shards)
    made = make_sampler(factory, pool, seed, FIELDS, window)
    assert isinstance(made, MixtureSampler)
    return made


@st.composite
def mixtures(draw: st.DrawFn) -> MixtureSampler:
    sizes = draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
    shares = [draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])) for _ in sizes]
    shares[0] = shares[0] or 1.0
    count = draw(st.integers(1, 400))
    window = draw(st.sampled_from([None, 1, 3, 10, 1000]))
    return mixture(sizes, shares, count, window, draw(st.sampled_from([1, 4, 7])), 5)


def rows_of(sampler: Sampler, epoch: int) -> np.ndarray:
    return sampler.dataset_rows(epoch, range(sampler.num_positions))


@given(mixtures(), st.integers(0, 40))
@settings(deadline=None, max_examples=40)
def test_each_row_comes_as_often_as_its_set_says(sampler: MixtureSampler, epoch: int) -> None:
    pool, sets = sampler.pool, sampler.sets
    homes, offsets = at(sampler, epoch, range(sampler.num_positions))
    counts = Counter(rows_of(sampler, epoch).tolist())
    first, used = 0, set[int]()
    for size, count in zip(sets.rows_per_set, sets.positions_per_set, strict=True):
        found = [counts[row] for row in range(first, first + size)]
        assert sum(found) == count
        assert min(found) >= count // size
        assert max(found) <= -(-count // size)
        used |= set(range(first, first + size)) if count else set()
        first += size
    if pool.file_starts is not None:
        assert (
            pool.file_rows(pool.starts[homes] + offsets) == pool.file_starts[homes] + offsets
        ).all()
    # Shards are pieces of the files, unless a set without a share lies in between.
    assert pool.file_starts is not None or 0 in sets.positions_per_set
    # The rows that its shards have are those that they may need, and no others.
    assert set(pool.dataset_rows(pool.indices()).tolist()) == used


@given(mixtures(), st.integers(1, 60))
@settings(deadline=None, max_examples=30)
def test_epochs_go_on_where_those_before_ended(sampler: MixtureSampler, num_epochs: int) -> None:
    found = np.zeros(sum(sampler.sets.rows_per_set), int)
    for epoch in range(num_epochs):
        np.add.at(found, rows_of(sampler, epoch), 1)
    for counts in np.split(found, np.cumsum(sampler.sets.rows_per_set)[:-1]):
        # One more or less for each of the pieces that have the row, and one for the rounds of each.
        assert np.ptp(counts) <= 4


def test_rest_of_the_shares_goes_to_the_largest_fractions() -> None:
    sampler = mixture([50, 50, 50], [0.47, 0.29, 0.24], 10, None, 1, 0)  # 4.7, 2.9 and 2.4.
    assert [*sampler.sets.positions_per_set] == [5, 3, 2]


def test_all_steps_have_the_shares() -> None:
    sampler = mixture([900, 300], [2, 1], 2400, 10, 12, 0)
    stores = joined([900, 300], 12).set_index_of(rows_of(sampler, 2)).reshape(-1, 12)
    assert (stores.sum(axis=1) == 4).all()


def test_rows_of_a_window_are_neighbours() -> None:
    sampler = mixture([10_000, 500], [0.5, 0.5], 4000, 50, 4, 0)
    windows = rows_of(sampler, 1)[: 4000 // 200 * 200].reshape(-1, 50, 4)
    for window in windows:
        for shard in range(4):
            places = np.unique(sampler.pool.rows.file_rows(window[:, shard]))
            # In one run, or where a round ends in two.
            assert (np.diff(places) != 1).sum() <= 2


def test_sampler_of_huge_sets_keeps_nothing_for_a_row() -> None:
    sizes, count = [10**10, 10**7], 24 * 10**6
    sampler = mixture(sizes, [0.7, 0.3], count, 10**5, 24, 1)
    assert len(sampler.sets.sections(24).set_index) <= 26
    # One shard, as a process has it.
    rows = sampler.dataset_rows(3, range(count - 24 * 240 + 17, count, 24))
    assert ((rows >= 0) & (rows < sum(sizes))).all()
    assert len(rows) == 240


def test_windows_over_series_are_mixed() -> None:
    series = joined([5, 9], 3)
    line = WindowedRows(series, ("x",), FrozenArray(np.full(14, 20)), 5, 3)
    factory = Mixture({"a": 0.5, "b": 0.5}, 120)
    made = make_sampler(factory, Pool.of(line, 3), 0, FIELDS, 4)
    stores = series.set_index_of(line.store_rows(rows_of(made, 0)))
    assert np.bincount(stores).tolist() == [60, 60]


def test_draws_by_weight_come_window_by_window() -> None:
    fields: Any = SimpleNamespace(num_rows=1000)
    made = Weighted(np.tile([1.0, 2.0], 500)).make(pool_of(1000, 2), 7, fields).in_blocks(25)
    orders = [rows_of(made, epoch).reshape(-1, 25, 2) for epoch in (0, 1)]
    assert not np.array_equal(*orders)
    for window in orders[0]:
        for shard in range(2):
            # 25 draws of rows that are neighbours in the file, or at both ends of it.
            places = np.sort(made.pool.rows.file_rows(window[:, shard]) % 500)
            assert (np.diff(places) > 30).sum() <= 1


def test_curriculum_of_windows_has_the_rows_of_its_stages() -> None:
    pool = Pool.of(joined([60, 100], 4), 4)
    mixed = Mixture({"a": 1, "b": 3}, 160)
    other = Mixture({"a": 3, "b": 1}, 160)
    sampler = make_sampler(Curriculum({0: mixed, 2: other}), pool, 1, FIELDS, 8)
    assert sampler.shuffle_block == 8
    for epoch, factory in ((1, mixed), (2, other)):
        stage = factory.make(pool, 1, FIELDS).in_blocks(8)
        assert rows_of(sampler, epoch).tolist() == rows_of(stage, epoch).tolist()


@pytest.mark.parametrize("num_shards", [24, 192])
@pytest.mark.parametrize("batch", [8, 32, 256])
def test_steps_have_all_sets_also_if_they_have_rows_of_some_shards_only(
    num_shards: int, batch: int
) -> None:
    sampler = mixture([9000, 11_000], [0.7, 0.3], 20_000, None, num_shards, 3)
    order = sampler.dataset_rows(1, range(20_000 // batch * batch)).reshape(-1, batch)
    assert (np.abs((order < 9000).sum(axis=1) - 0.7 * batch) < 1 + 0.02 * batch).all()


def batches(sizes: list[int], num_shards: int, global_batch: int) -> Pool:
    return replace(Pool.of(joined(sizes, num_shards), num_shards), global_batch=global_batch)


@st.composite
def by_batch(draw: st.DrawFn) -> MixtureSampler:
    sizes = draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
    shares = [draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])) for _ in sizes]
    shares[0] = shares[0] or 1.0
    num_shards = draw(st.sampled_from([1, 4, 6, 7, 24]))
    factory = Mixture(dict(zip("abcdef", shares, strict=False)), draw(st.integers(1, 400)), True)
    batch = draw(st.sampled_from([1, 2, 4, 6, 9, 16, 24, 60]))
    pool = batches(sizes, num_shards, batch)
    window = draw(st.sampled_from([None, 1, 3, 10, 1000]))
    try:
        made = make_sampler(factory, pool, 5, FIELDS, window)
    except ValueError as error:
        if "would be of" not in str(error):
            raise
        reject()
    assert isinstance(made, MixtureSampler)
    return made


@given(by_batch(), st.integers(0, 5))
def test_by_batch_each_batch_is_of_one_set_and_sets_have_their_shares(
    sampler: MixtureSampler, epoch: int
) -> None:
    size, count = sampler.sets.global_batch, sampler.num_positions
    assert size is not None
    assert count == sum(sampler.sets.positions_per_set) == max(1, count // size) * size
    rows = sampler.pool.rows
    assert isinstance(rows, JoinedRows)
    order = sampler.dataset_rows(epoch, range(count))
    sets = rows.set_index_of(order).reshape(-1, size)
    assert (sets == sets[:, :1]).all()
    found = np.bincount(sets.ravel(), minlength=len(sampler.sets.positions_per_set))
    assert found.tolist() == list(sampler.sets.positions_per_set)
    # A row as often as the others of its set, or once more.
    times = np.bincount(order, minlength=rows.num_rows)
    for number, (rows_of_set, positions) in enumerate(
        zip(sampler.sets.rows_per_set, sampler.sets.positions_per_set, strict=True)
    ):
        first = rows.starts[number]
        each = times[first : first + rows_of_set]
        assert positions // rows_of_set <= each.min()
        assert each.max() <= -(-positions // rows_of_set)


def test_by_batch_sets_come_in_random_order_and_rows_of_a_set_in_turn() -> None:
    factory = Mixture({"a": 0.75, "b": 0.25}, 1600, by_batch=True)
    sampler = factory.make(batches([900, 500], 24, 16), 3, FIELDS)
    orders = [sampler.dataset_rows(epoch, range(1600)) for epoch in range(4)]
    sets = np.stack([(order[::16] >= 900) for order in orders])
    assert sets.sum(axis=1).tolist() == [25] * 4
    related = np.corrcoef(sets)
    assert (np.abs(related - np.eye(4)) < 0.4).all()
    # 400 of 500 rows in an epoch: the next one goes on with the others.
    small = [{*order[order >= 900].tolist()} for order in orders]
    assert all(len(found) == 400 for found in small)
    assert len(small[0] | small[1]) > 480
    assert sampler.identity["sets"]["global_batch"] == 16
    rare = Mixture({"a": 0.985, "b": 0.015}, 240, by_batch=True)
    with pytest.raises(ValueError, match=r"30 batches .* 'b'"):
        rare.make(batches([900, 500], 24, 8), 3, FIELDS)
    with pytest.raises(ValueError, match="by_batch"):
        Mixture({"a": 1}, by_batch=True).make(Pool.of(joined([9], 2), 2), 3, FIELDS)
    with pytest.raises(TypeError, match="by_batch=1"):
        Mixture({"a": 1}, by_batch=1)  # type: ignore[arg-type]
