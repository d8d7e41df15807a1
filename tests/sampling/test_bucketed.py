"""Rows of similar length together: each once, in any division, in buckets in random order."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_memmap.sampling import Bucketed, Pool, Sampler
from lightning_memmap.sampling.bucketed import BucketedSampler
from tests.support.rows import StridedRows, pool_of


class Table:
    """Fields of a dataset in memory, all of which are rows of known lengths."""

    def __init__(self, num_rows: int, **lengths: Any) -> None:
        self.num_rows = num_rows
        self.fields = {name: np.asarray(values) for name, values in lengths.items()}

    def lengths(self, field: str) -> np.ndarray:
        return self.fields[field]


def made(
    lengths: Any, num_shards: int = 4, bucket_size: int = 8, seed: int = 0, **options: Any
) -> BucketedSampler:
    num_rows = len(lengths)
    factory = Bucketed(lengths, bucket_size, **options)
    return factory.make(pool_of(num_rows, num_shards), seed, Table(num_rows))


def order_of(sampler: Sampler, epoch: int = 0) -> np.ndarray:
    return sampler.dataset_rows(epoch, range(sampler.num_positions))


def padding(lengths: np.ndarray, order: np.ndarray, batch: int) -> float:
    """The share of a padded epoch that is padding."""
    found = lengths[order]
    width = [found[first : first + batch] for first in range(0, len(found), batch)]
    return 1 - lengths.sum() / sum(len(each) * each.max() for each in width)


some_lengths = st.lists(st.sampled_from([0, 1, 2, 3, 5, 40, 300, 70_000]), min_size=1, max_size=120)


@given(
    some_lengths,
    st.integers(1, 9),
    st.integers(1, 20),
    st.integers(1, 5),
    st.sampled_from([None, 1, 4]),
)
def test_each_row_comes_once_at_a_position_of_its_shard(
    lengths: list[int], num_shards: int, bucket_size: int, num_buckets: int, block: int | None
) -> None:
    sampler: Sampler = made(lengths, num_shards, bucket_size, num_buckets=num_buckets)
    if block is not None:
        # There the shards are those of the store: its rows lie together.
        sampler = sampler.in_blocks(block)
        assert sampler.pool == pool_of(len(lengths), num_shards)
    homes = [{*sampler.pool.shard_dataset_rows(shard).tolist()} for shard in range(num_shards)]
    for epoch in (0, 3):
        order = order_of(sampler, epoch)
        assert sorted(order.tolist()) == list(range(len(lengths)))
        for shard, home in enumerate(homes):
            assert {*order[shard::num_shards].tolist()} == home


@given(some_lengths, st.integers(1, 20), st.integers(1, 5))
def test_buckets_of_one_shard_are_the_sorted_window_cut_into_pieces(
    lengths: list[int], bucket_size: int, num_buckets: int
) -> None:
    sampler = made(lengths, 1, bucket_size, num_buckets=num_buckets)
    found = np.array(lengths)[order_of(sampler)]
    size = bucket_size * num_buckets
    for first in range(0, len(found), size):
        window = found[first : first + size]
        buckets = [window[at : at + bucket_size] for at in range(0, len(window), bucket_size)]
        assert all((np.diff(bucket) >= 0).all() for bucket in buckets)
        buckets.sort(key=lambda bucket: (bucket[0], bucket[-1]))
        assert np.concatenate(buckets).tolist() == sorted(window.tolist())


@pytest.mark.parametrize(
    ("num_rows", "batch"),
    [*((6_000, batch) for batch in (32, 60, 256)), *((30_000, n) for n in (32, 50, 100, 256))],
)
@pytest.mark.parametrize("num_shards", [24, 192])
def test_shards_leave_hardly_more_padding_than_none(
    num_rows: int, batch: int, num_shards: int
) -> None:
    for lengths in (
        np.random.default_rng(0).integers(128, 513, num_rows),
        np.exp(np.random.default_rng(0).normal(5, 0.7, num_rows)).astype(np.int64),
    ):
        alone, divided = (
            np.mean([padding(lengths, order_of(sampler, epoch), batch) for epoch in range(3)])
            for sampler in (made(lengths, count, batch) for count in (1, num_shards))
        )
        assert divided < 1.3 * alone


def test_the_steps_of_a_bucket_are_of_similar_length() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 20_000)
    sampler = made(lengths, 24, 400, num_buckets=24)
    assert padding(lengths, order_of(sampler), 100) < 0.1
    # Nor do blocks leave much.
    assert padding(lengths, order_of(sampler.in_blocks(50)), 100) < 0.15


def test_rows_meet_others_in_other_epochs() -> None:
    lengths = np.random.default_rng(0).integers(128, 513, 30_000)
    sampler = made(lengths, 192, 32)
    steps = [order_of(sampler, epoch)[:29_984].reshape(-1, 32) for epoch in range(12)]
    met = {int(row) for found in steps for row in found[(found == 17).any(axis=1)].ravel()}
    # In half of the steps one of a pair of neighbours each, and others where pairs differ.
    assert len(met) > 60


def test_windows_have_other_rows_and_buckets_another_order_in_each_epoch() -> None:
    lengths = np.arange(960)
    sampler = made(lengths, 4, 16, num_buckets=30)
    orders = [order_of(sampler, epoch) for epoch in range(4)]
    windows = [set(order[:480].tolist()) for order in orders]
    assert all(150 < len(one & windows[0]) < 330 for one in windows[1:])
    means = np.array([order.reshape(-1, 16).mean(axis=1) for order in orders])
    # Neither ascending nor the same: ranks of buckets are unrelated to their places and epochs.
    related = np.corrcoef(np.vstack([means[:, :30], np.arange(30)]))
    assert (np.abs(related - np.eye(5)) < 0.5).all()


def test_each_place_of_a_window_has_buckets_of_all_lengths_equally_often() -> None:
    lengths = np.arange(60)
    sampler = made(lengths, 1, 10, num_buckets=6)
    counts = np.zeros((6, 6))
    epochs = 1200
    for epoch in range(epochs):
        ranks = order_of(sampler, epoch)[::10] // 10
        counts[np.arange(6), ranks] += 1
    chi_square = ((counts - epochs / 6) ** 2 / (epochs / 6)).sum()
    # The 99.9 % quantile for 25 degrees of freedom.
    assert chi_square < 52.62


def test_lengths_are_those_of_the_chosen_rows() -> None:
    lengths = np.arange(300)[::-1].copy()
    pool = Pool.of(StridedRows(1, 2).among(pool_of(300, 6).rows), 6)
    for given_lengths in (lengths, lengths.tolist(), torch.from_numpy(lengths), "sound"):
        sampler = Bucketed(given_lengths, 12).make(pool, 0, Table(300, sound=lengths))
        order = order_of(sampler)
        assert sorted(order.tolist()) == list(range(1, 300, 2))
        spread = lengths[order[:144].reshape(-1, 12)]
        assert (spread.max(axis=1) - spread.min(axis=1)).max() < 80


def test_identity_is_that_of_the_lengths_and_the_numbers() -> None:
    one, same, other = made([1, 2, 3]), made(torch.tensor([1, 2, 3])), made([1, 2, 4])
    assert one == same
    assert one.identity == same.identity != other.identity
    assert made([1, 2, 3], bucket_size=9).identity != one.identity
    assert made([1, 2, 3], num_buckets=9).identity != one.identity
    assert (
        repr(Bucketed("sound", 64)) == "Bucketed(lengths='sound', bucket_size=64, num_buckets=100)"
    )


def test_known_lengths_and_seed_give_known_rows() -> None:
    # Checkpoints stand for this order: it must never change.
    sampler = made(np.arange(24) * 7 % 11, 3, 4, seed=42, num_buckets=3)
    assert order_of(sampler, 5).tolist() == GOLDEN_SMALL
    large = made(np.arange(100_003) * 31 % 1009, 24, 96, seed=7)
    assert large.dataset_rows(2, range(50_000, 50_005)).tolist() == GOLDEN_LARGE


GOLDEN_SMALL = [5, 19, 16, 10, 2, 13, 7, 21, 6, 17, 14, 3]
GOLDEN_SMALL += [0, 22, 11, 8, 1, 23, 9, 20, 18, 12, 15, 4]
GOLDEN_LARGE = [7553, 67735, 19303, 83879, 18652]


@pytest.mark.parametrize(
    ("lengths", "options", "words"),
    [
        ([1, -1], {}, "row 1 has the length -1"),
        ([[1], [1]], {}, r"lengths of shape \(2, 1\), and the dataset has 2 rows"),
        ([1.0, 2.0], {}, "lengths of float64"),
        ([1], {"bucket_size": 0}, "bucket_size=0"),
        ([1], {"bucket_size": 1.5}, r"bucket_size=1\.5"),
        ([1], {"num_buckets": 0}, "num_buckets=0"),
    ],
)
def test_lengths_that_cannot_be_are_refused(
    lengths: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        made(lengths, **options)
