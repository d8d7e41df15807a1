"""Rows drawn by weight: exact in the mean, as even as can be, in shards of equal weight."""

import tracemalloc
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_memmap.sampling import Bucketed, Pool, Sampler, Weighted
from lightning_memmap.sampling.weighted import WeightedSampler
from tests.support.rows import StridedRows, pool_of

pytestmark = pytest.mark.slow


class Table:
    """Fields of a dataset in memory."""

    def __init__(self, num_rows: int, **fields: Any) -> None:
        self.num_rows = num_rows
        self.fields = {name: np.asarray(values) for name, values in fields.items()}

    def values(self, field: str, rows: np.ndarray | None = None) -> np.ndarray:
        return self.fields[field] if rows is None else self.fields[field][rows]

    def given(self, field: str) -> np.ndarray:
        return np.ones(self.num_rows, np.bool_)


def made(weights: Any, num_shards: int = 4, seed: int = 0, **options: Any) -> WeightedSampler:
    num_rows = len(weights)
    return Weighted(weights, **options).make(pool_of(num_rows, num_shards), seed, Table(num_rows))


def drawn(sampler: Sampler, epoch: int) -> np.ndarray:
    """How often each row comes in an epoch."""
    rows = sampler.dataset_rows(epoch, range(sampler.num_positions))
    return np.bincount(rows, minlength=sampler.pool.rows.num_rows)


@st.composite
def weights(draw: st.DrawFn) -> list[float]:
    values = st.sampled_from([0.0, 1.0, 1.0, 2.5, 0.3, 1e-6, 40.0])
    found = draw(st.lists(values, min_size=1, max_size=80))
    return found if any(found) else [*found, 1.0]


@given(weights(), st.integers(1, 9), st.integers(1, 150), st.integers(0, 3))
def test_each_row_comes_as_often_as_it_should_up_to_rounding(
    given_weights: list[float], num_shards: int, num_samples: int, epoch: int
) -> None:
    sampler = made(given_weights, num_shards, num_samples=num_samples)
    assert sampler.num_positions == num_samples
    counts = drawn(sampler, epoch)
    assert counts.sum() == num_samples
    total = sum(map(Fraction, given_weights))
    for count, weight in zip(counts.tolist(), given_weights, strict=True):
        expected = num_samples * Fraction(weight) / total
        # Up to the rounding of float64.
        assert -1 - 1e-9 < count - expected < 1 + 1e-9
        assert weight or not count


@given(weights(), st.integers(1, 9), st.integers(1, 150))
def test_lengths_fill_the_line_and_shards_cover_it(
    given_weights: list[float], num_shards: int, num_samples: int
) -> None:
    sampler = made(given_weights, num_shards, num_samples=num_samples)
    pool, lengths = sampler.pool, sampler.lengths.array
    assert sampler.positions_per_shard.tolist() == [
        len(range(shard, num_samples, num_shards)) for shard in range(num_shards)
    ]
    # In whole units, and so exactly as long as the epoch.
    unit = int(lengths.sum()) // num_samples
    assert int(lengths.sum()) == unit * num_samples
    held = [row for shard in range(num_shards) for row in pool.shard_dataset_rows(shard).tolist()]
    assert set(held) == set(np.flatnonzero(given_weights).tolist())
    # Only a row on a cut is in two shards.
    assert pool.num_rows <= len(given_weights) + num_shards - 1


# Distributions. The seeds are fixed, so each outcome is fixed; the critical values are 99.9 %
# quantiles of the chi-square distribution.

UNEVEN = np.array([0.2, 5, 1, 1, 0, 1, 3, 0.5, 1, 1, 9, 1, 1, 2, 1, 0.1, 1, 1, 4, 1])


@pytest.mark.parametrize("num_shards", [1, 4, 7])
def test_each_position_of_a_round_is_drawn_with_the_right_probability(num_shards: int) -> None:
    # One position of each of many epochs, which are independent, at random places of the order.
    sampler = made(UNEVEN, num_shards, num_samples=5 * num_shards)
    counts = np.zeros(len(UNEVEN))
    draws = 3000
    for epoch in range(draws):
        position = epoch % sampler.num_positions
        counts[sampler.dataset_rows(epoch, range(position, position + 1))] += 1
    expected = UNEVEN / UNEVEN.sum() * draws
    assert not counts[expected == 0].any()
    used = expected > 0
    chi_square = float(((counts - expected)[used] ** 2 / expected[used]).sum())
    # 18 degrees of freedom.
    assert chi_square < 42.31


def test_rows_come_as_often_as_their_weights_say_in_the_mean_over_epochs() -> None:
    # The weights of a class lie in one shard alone, so that shards differ in weight.
    given_weights = np.where(np.arange(48) % 4 == 1, 6.0, 1.0)
    sampler = made(given_weights, 4, num_samples=12)
    epochs = 1500
    counts = sum(drawn(sampler, epoch) for epoch in range(epochs)) / epochs
    expected = 12 * given_weights / given_weights.sum()
    assert expected.max() < 1
    # 5 standard errors of a binomial variable.
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected * (1 - expected) / epochs)).all()


def test_few_positions_of_many_rows_take_little_memory() -> None:
    num_rows = 2_000_000
    sampler = made(np.ones(num_rows), num_shards=48, num_samples=48)
    sampler.dataset_rows(0, range(48))
    tracemalloc.start()
    try:
        sampler.dataset_rows(1, range(48))
        # Not as much as all shards together.
        assert tracemalloc.get_traced_memory()[1] < 4 * num_rows
    finally:
        tracemalloc.stop()


def test_rows_that_share_an_epoch_are_others_in_another() -> None:
    # Half of the rows come in an epoch. Two of one shard come together in about a quarter.
    sampler = made(np.ones(48), 2, num_samples=24)
    epochs = 1000
    both = sum(int(drawn(sampler, epoch)[[10, 12]].all()) for epoch in range(epochs))
    assert abs(both - 0.24 * epochs) < 5 * np.sqrt(0.25 * 0.75 * epochs)


def test_first_and_last_rows_of_shards_do_not_come_together() -> None:
    # One of two rows of each shard, none of which lies on a cut.
    sampler = made([1] * 48, 24, num_samples=24)
    assert len({tuple(drawn(sampler, epoch)) for epoch in range(40)}) == 40


def test_any_two_rows_share_an_epoch_as_often_as_independent_draws_would() -> None:
    # Of equal weight: whole layers of shards must not come together.
    epochs = 1500
    for given_weights, related in ((np.ones(2000), 1.5), (np.arange(1, 2001) % 7 + 1, 1.2)):
        sampler = made(given_weights, 24, num_samples=1000)
        counts = np.stack([drawn(sampler, epoch) for epoch in range(epochs)])
        found = np.corrcoef(counts.T)[~np.eye(2000, dtype=bool)]
        # 1 if they were independent; rows on cuts are related to their neighbours.
        assert np.sqrt(epochs * (found**2).mean()) < related


def test_shards_that_differ_in_size_hold_what_their_weights_say() -> None:
    # From many rows of a shard down to a single one.
    given_weights = 1 / np.arange(1, 20_001)
    sampler = made(given_weights, 24, num_samples=4800)
    assert sampler.pool.sizes.min() == 1
    assert sampler.pool.sizes.max() > 1500
    counts = np.stack([drawn(sampler, epoch) for epoch in range(200)])
    expected = 4800 * given_weights / given_weights.sum()
    assert (counts >= np.floor(expected - 1e-9)).all()
    assert (counts <= np.ceil(expected + 1e-9)).all()
    for rows in (slice(1, 20), slice(20, 400), slice(400, None)):
        assert abs(counts[:, rows].sum(axis=1).mean() - expected[rows].sum()) < 1
    blocks = sampler.in_blocks(50)
    for epoch in range(3):
        assert (drawn(blocks, epoch) == counts[epoch]).all()


def test_classes_of_a_field_come_equally_often() -> None:
    label = np.array([0] * 90 + [1] * 9 + [2])
    sampler = Weighted("label").make(pool_of(100, 8), 3, Table(100, label=label))
    counts = np.mean([np.bincount(label, drawn(sampler, epoch)) for epoch in range(100)], axis=0)
    assert (np.abs(counts - 100 / 3) < 0.5).all()


def test_classes_are_counted_in_the_training_rows_alone() -> None:
    label = np.array([0, 1, 1] * 40)
    pool = Pool.of(StridedRows(0, 2).among(pool_of(120, 8).rows), 8)
    fields = Table(120, label=label, weight=label.astype(np.float32))
    sampler = Weighted("label").make(pool, 0, fields)
    rows = np.stack([sampler.dataset_rows(epoch, range(60)) for epoch in range(400)])
    assert (rows % 2 == 0).all()
    assert abs(label[rows].sum(1).mean() - 30) < 0.5
    # Classes that are stored as floating-point values are taken for weights.
    with pytest.warns(UserWarning, match=r"Weighted\('weight'\): .*20 of 60 rows"):
        sampler = Weighted("weight", num_samples=200).make(pool, 0, fields)
    assert (label[sampler.dataset_rows(0, range(200))] == 1).all()


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_weights_may_be_a_list_an_array_or_a_tensor(kind: Any) -> None:
    given_weights = [1.0, 0.0, 3.0, 1.0]
    sampler = made(kind(given_weights), num_samples=10)
    assert drawn(sampler, 0).tolist() == [2, 0, 6, 2]


def test_identity_is_that_of_the_weights() -> None:
    one, same, other = made([1.0, 2.0]), made(torch.tensor([2.0, 4.0])), made([1.0, 2.1])
    assert one == same
    assert one.identity == same.identity != other.identity
    assert made([1.0, 2.0], num_samples=3).identity != one.identity
    assert repr(one.lengths) == repr(same.lengths)


def test_known_weights_and_seed_give_known_rows() -> None:
    # Checkpoints stand for this order: it must never change.
    sampler = made(UNEVEN, 3, seed=42, num_samples=24)
    assert sampler.dataset_rows(5, range(24)).tolist() == GOLDEN_SMALL
    large = made(np.arange(100_003) % 11, 24, seed=7)
    assert large.dataset_rows(2, range(50_000, 50_005)).tolist() == GOLDEN_LARGE
    # Shards of three sizes: the largest, half of it, and less than a quarter.
    uneven = made(np.array([9, 2, 1])[np.arange(100_003) % 24 // 8], 24, seed=7)
    assert uneven.dataset_rows(2, range(50_000, 50_024)).tolist() == GOLDEN_UNEVEN


GOLDEN_SMALL = [18, 10, 2, 18, 10, 13, 6, 10, 16, 1, 10, 19]
GOLDEN_SMALL += [6, 7, 10, 18, 1, 5, 9, 1, 8, 3, 10, 17]
GOLDEN_LARGE = [2744, 69969, 83674, 50771, 66420]
GOLDEN_UNEVEN = [56475, 22300, 65380, 5045, 77213, 95789, 44238, 99414, 29311, 58495, 91400, 91283]
GOLDEN_UNEVEN += [49428, 31287, 17009, 83205, 25104, 65040, 31369, 43417, 90289, 62978]
GOLDEN_UNEVEN += [74234, 45171]


@pytest.mark.parametrize(
    ("given_weights", "options", "words"),
    [
        ([1.0, -1.0], {}, "row 1 has the weight -1"),
        ([1.0, float("nan")], {}, "row 1 has the weight nan"),
        ([float("inf"), 1.0], {}, "row 0 has the weight inf"),
        ([0.0, 0.0], {}, "weights .* are 0"),
        ([[1.0], [1.0]], {}, r"weights of shape \(2, 1\), and the dataset has 2 rows"),
        ([1.0], {"num_samples": 0}, "num_samples=0"),
        ([1.0], {"num_samples": 1.5}, r"num_samples=1\.5"),
        (["a", "b"], {}, "weights of <U1"),
        ([1j, 2.0], {}, "weights of complex128"),
    ],
)
def test_weights_that_cannot_be_are_refused(
    given_weights: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        made(given_weights, **options)


@pytest.mark.parametrize("given_weights", [None, 3, {1.0}])
def test_weights_that_are_no_sequence_are_refused_at_once(given_weights: Any) -> None:
    with pytest.raises(TypeError, match=rf"weights={given_weights}"):
        Weighted(given_weights)
    with pytest.raises(TypeError, match=rf"lengths={given_weights}"):
        Bucketed(given_weights, 8)
