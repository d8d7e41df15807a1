"""Packs in blocks: each token once, from rows that are read together, in any division."""

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_memmap.sampling import Packed, Pool
from lightning_memmap.sampling.packed_sampler import PackedSampler
from lightning_memmap.sampling.rows import JoinedRows, Shards, StoreRows
from tests.sampling.test_bucketed import Table
from tests.sampling.test_packed import (
    all_packs,
    check_packs,
    packs_at,
    random_lengths,
    some_lengths,
    some_options,
)
from tests.support.rows import StridedRows, pool_of


def made(
    lengths: Any, block: int = 60, length: Any = 100, num_shards: int = 4, **options: Any
) -> PackedSampler:
    fields = lengths if isinstance(lengths, dict) else {"tokens": lengths}
    num_rows = len(fields["tokens"])
    factory = Packed("tokens", length, **options)
    table = Table(num_rows, **fields)
    return factory.make_in_blocks(pool_of(num_rows, num_shards), 3, table, block)


def check_blocks(sampler: PackedSampler, epoch: int) -> list[set[int]]:
    """Return the rows of each block of an epoch, which are those that are read for it."""
    packs = all_packs(sampler, epoch)
    num_shards = sampler.num_shards
    assert sampler.shuffle_block is not None
    size = sampler.shuffle_block
    rounds = -(-sampler.num_positions // num_shards)
    blocks = []
    for start in range(0, rounds, size):
        stop = min(rounds, start + size)
        rows = set[int]()
        for shard in range(num_shards):
            index = sampler.rows_at(epoch, start, stop, np.array([shard]))
            home = index - sampler.pool.starts[shard]
            assert ((home >= 0) & (home < sampler.pool.sizes[shard])).all()
            read = {*sampler.pool.dataset_rows(index).tolist()}
            used = {
                row
                for pack in packs[start * num_shards + shard : stop * num_shards : num_shards]
                for row, *_ in pack
            }
            assert read == used
            ones = np.ones(sampler.pool.sizes[shard], np.int64)
            most = sampler.most_in_block(shard, ones)
            assert most is not None
            assert len(read) <= most
            rows |= read
        blocks.append(rows)
    return blocks


@given(some_lengths, st.integers(1, 5), st.integers(1, 30), some_options, st.integers(0, 3))
@example([100] * 13, 2, 3, {"overflow": "truncate"}, 1)
@settings(deadline=None)
def test_each_token_comes_once_from_the_rows_of_its_block(
    lengths: list[int], num_shards: int, block: int, options: Any, epoch: int
) -> None:
    sampler, _ = check_packs(
        lambda: made(lengths, block, 100, num_shards, **options), lengths, options, epoch
    )
    check_blocks(sampler, epoch)


@pytest.mark.parametrize("options", [{}, {"split": True}, {"overflow": "drop"}])
def test_blocks_have_consecutive_rows_and_packs_are_alike_in_any_division(options: Any) -> None:
    lengths = random_lengths(4000, limit=120 if options else 100)
    sampler = made(lengths, 100, num_shards=8, **options)
    orders = []
    for epoch in (0, 1, 2):
        blocks = check_blocks(sampler, epoch)
        assert len(blocks) >= 5
        for rows in blocks:
            # One run of the files for each shard. Dropped rows leave gaps.
            file_rows = np.sort(Shards(4000, 8).file_rows(np.array([*rows])))
            assert np.count_nonzero(np.diff(file_rows) > 20) < 8
        orders.append([min(rows) for rows in blocks])
    assert len({*map(tuple, orders)}) == 3
    whole = all_packs(sampler, 1)
    again = pickle.loads(pickle.dumps(sampler))
    assert again.identity == sampler.identity
    for count in (1, 2, 4, 8):
        for device in range(count):
            positions = range(device, sampler.num_positions, count)
            assert packs_at(again, 1, positions) == whole[device::count]


@pytest.mark.parametrize("options", [{}, {"split": True}, {"overflow": "split"}])
def test_each_epoch_has_other_packs(options: Any) -> None:
    sampler = made(random_lengths(3000), 100, **options)
    first, second = ({frozenset(pack) for pack in all_packs(sampler, e)} for e in (0, 1))
    assert len(first & second) < 0.3 * len(first)


@pytest.mark.parametrize("sigma", [0.8, 1.1])
def test_long_blocks_leave_little_unused(sigma: float) -> None:
    lengths = np.random.default_rng(0).lognormal(np.log(300), sigma, 60_000)
    lengths = np.clip(lengths, 1, 2048).astype(np.int64)
    sampler = made(lengths, 1000, 2048, 24)
    packs = sampler.shuffle_block
    assert packs is not None
    # In each block of a shard, at most a pack or two.
    assert sampler.padding_fraction < 2.5 / packs
    assert made(lengths, 1000, 2048, 24, split=True).padding_fraction < 0.005


def test_packs_in_blocks_with_several_fields_hold_what_each_may() -> None:
    rng = np.random.default_rng(1)
    fields = {"tokens": random_lengths(1500), "patches": rng.integers(0, 60, 1500)}
    sampler = made(fields, 100, {"patches": 70, "tokens": 100}, max_documents=4)
    packs = all_packs(sampler)
    assert sorted(row for pack in packs for row, *_ in pack) == [*range(1500)]
    assert max(map(len, packs)) <= 4
    for name, limit in (("tokens", 100), ("patches", 70)):
        assert max(sum(fields[name][row] for row, *_ in pack) for pack in packs) <= limit


def test_subset_is_packed_alone_in_blocks() -> None:
    lengths = random_lengths(900)
    rows = StridedRows(1, 3).among(StoreRows(Shards(900, 4)))
    sampler = Packed("tokens", 100).make_in_blocks(
        Pool.of(rows, 4), 0, Table(900, tokens=lengths), 30
    )
    assert sorted(row for pack in all_packs(sampler) for row, *_ in pack) == [*range(1, 900, 3)]
    check_blocks(sampler, 1)


@pytest.mark.parametrize("shares", [{"a": 0.5, "b": 0.5}, {"b": 9, "a": 1}, {"a": 1, "b": 0}])
@pytest.mark.parametrize("shares_of", ["tokens", "documents"])
def test_each_block_of_a_mixture_has_its_shares(shares: Any, shares_of: str) -> None:
    lengths = np.append(random_lengths(6000, median=20), random_lengths(2000, 1, median=45))
    members = StoreRows(Shards(6000, 4)), StoreRows(Shards(2000, 4))
    pool = Pool.of(JoinedRows(("a", "b"), members), 4)
    factory = Packed("tokens", 100, shares=shares, shares_of=shares_of)
    sampler = factory.make_in_blocks(pool, 0, Table(8000, tokens=lengths), 250)
    assert sampler.shuffle_block is not None
    expected = shares["a"] / sum(shares.values())
    drawn = np.zeros(8000, np.int64)
    block_positions = 4 * sampler.shuffle_block
    for epoch in range(5):
        check_blocks(sampler, epoch)
        packs = all_packs(sampler, epoch)
        assert all(packs)
        assert all(sum(n for *_, n in pack) <= 100 for pack in packs)
        for start in range(0, len(packs), block_positions):
            here = packs[start : start + block_positions]
            rows = np.array([row for pack in here for row, *_ in pack])
            amounts = lengths[rows] if shares_of == "tokens" else np.ones(len(rows))
            share = amounts[rows < 6000].sum() / amounts.sum()
            assert share == pytest.approx(expected, abs=0.05)
        drawn += np.bincount(np.array([row for pack in packs for row, *_ in pack]), minlength=8000)
    for part in (drawn[:6000], drawn[6000:]):
        # A group whose documents don't fit in its packs repeats those of epoch 0.
        assert part.max() - part.min() <= 2
    assert 0 <= sampler.padding_fraction < 0.1


@pytest.mark.parametrize(
    ("options", "match"),
    [({"length": 100}, "row 1 "), ({"shares": {"a": 1}}, "training sets")],
)
def test_wrong_rows_are_an_error(options: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        made([5, 101, 7], 2, **{"length": 200, **options})


def test_blocks_of_fewer_documents_than_packs_are_an_error() -> None:
    lengths = [100, 1] * 20 + [60] * 60
    with pytest.raises(ValueError, match="shuffle_block=4"):
        made(lengths, 4, 100, 2)


def test_much_padding_of_small_blocks_is_noticed() -> None:
    lengths = random_lengths(6000, median=20)
    orders = [made(lengths, 12), made(lengths, 700), made(lengths, 12, split=True)]
    assert [order.wastes_packs for order in orders] == [True, False, False]
    assert orders[0].padding_fraction > 2 * orders[1].padding_fraction
