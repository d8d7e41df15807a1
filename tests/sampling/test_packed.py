"""Packed sequences: each token once, in any division, in packs that hold what they may."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st

from lightning_memmap.sampling import Curriculum, Packed, Pool
from lightning_memmap.sampling.packed_sampler import PackedSampler
from lightning_memmap.sampling.rows import JoinedRows, Shards, StoreRows
from tests.sampling.test_bucketed import Table
from tests.support.rows import StridedRows, pool_of

#: A pack of an epoch: the row, the first token and the length of each document.
Pack = list[tuple[int, int, int]]


def made(
    lengths: Any, length: Any = 100, num_shards: int = 4, seed: int = 0, **options: Any
) -> PackedSampler:
    fields = lengths if isinstance(lengths, dict) else {"tokens": lengths}
    num_rows = len(fields["tokens"])
    factory = Packed("tokens", length, **options)
    return factory.make(pool_of(num_rows, num_shards), seed, Table(num_rows, **fields))


def packs_at(sampler: PackedSampler, epoch: int, positions: Any) -> list[Pack]:
    """The packs at some positions."""
    packed = sampler.documents_at(epoch, np.asarray(positions, np.int64))
    rows = sampler.pool.dataset_rows(packed.pool_index)
    starts = np.zeros_like(rows) if packed.starts is None else packed.starts
    columns = zip(rows.tolist(), starts.tolist(), packed.lengths[:, 0].tolist(), strict=True)
    documents = [*columns]
    stops = np.cumsum(packed.documents_per_pack).tolist()
    return [documents[a:b] for a, b in zip([0, *stops], stops, strict=False)]


def all_packs(sampler: PackedSampler, epoch: int = 0) -> list[Pack]:
    return packs_at(sampler, epoch, range(sampler.num_positions))


def tokens_of(packs: list[Pack]) -> list[tuple[int, int]]:
    """Row and place of each token of an epoch, ascending."""
    return sorted((row, start + t) for pack in packs for row, start, n in pack for t in range(n))


def random_lengths(num_rows: int, seed: int = 0, median: float = 30, limit: int = 100) -> Any:
    lengths = np.random.default_rng(seed).lognormal(np.log(median), 0.8, num_rows)
    return np.clip(lengths, 1, limit).astype(np.int64)


some_lengths = st.lists(st.sampled_from([0, 1, 2, 3, 5, 40, 99, 100, 101, 250]), min_size=1)
some_options = st.sampled_from([{"overflow": "split"}, {"overflow": "truncate"}, {"split": True}])


def check_packs(
    make: Callable[[], PackedSampler], lengths: list[int], options: dict[str, Any], epoch: int
) -> tuple[PackedSampler, list[Pack]]:
    """Check that each token comes once, in packs of at most 100. Return the order and its packs."""
    try:
        sampler = make()
    except ValueError as error:
        # A few rows that differ much don't make equally many packs in each shard.
        if "num_shards" in str(error) or not any(lengths):
            reject()
        raise
    packs = all_packs(sampler, epoch)
    assert all(packs)
    assert all(sum(n for *_, n in pack) <= 100 for pack in packs)
    assert max(map(len, packs)) <= sampler.max_documents
    cut = 100 if options == {"overflow": "truncate"} else 10**9
    assert tokens_of(packs) == [
        (row, token) for row, n in enumerate(lengths) for token in range(min(n, cut))
    ]
    if "split" not in options:
        assert {row for pack in packs for row, *_ in pack} == {*range(len(lengths))}
    return sampler, packs


@given(
    some_lengths, st.integers(1, 9), some_options, st.sampled_from([None, 1, 3]), st.integers(0, 3)
)
@example([5] * 40, 1, {"overflow": "split"}, 3, 0)
@settings(deadline=None)
def test_each_token_comes_once_at_a_position_of_its_shard(
    lengths: list[int], num_shards: int, options: Any, max_documents: int | None, epoch: int
) -> None:
    if "split" in options:
        max_documents = None
    sampler, packs = check_packs(
        lambda: made(lengths, 100, num_shards, max_documents=max_documents, **options),
        lengths,
        options,
        epoch,
    )
    for shard in range(num_shards):
        home = {*sampler.pool.shard_dataset_rows(shard).tolist()}
        assert {row for pack in packs[shard::num_shards] for row, *_ in pack} <= home


@pytest.mark.parametrize("options", [{}, {"split": True}])
def test_packs_are_the_same_in_any_division(options: Any) -> None:
    sampler = made(random_lengths(3000), num_shards=96, **options)
    whole = all_packs(sampler, 1)
    again = pickle.loads(pickle.dumps(sampler))
    for count in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96):
        for device in {0, count - 1}:
            positions = range(device, sampler.num_positions, count)
            assert packs_at(again, 1, positions) == whole[device::count]
    assert again.identity == sampler.identity


@pytest.mark.parametrize("options", [{}, {"split": True}, {"overflow": "split"}])
@pytest.mark.parametrize("num_rows", [1200, 6000])
def test_each_epoch_has_other_packs(options: Any, num_rows: int) -> None:
    sampler = made(random_lengths(num_rows), num_shards=24, **options)
    first, second = ({frozenset(pack) for pack in all_packs(sampler, e)} for e in (0, 1))
    assert len(first & second) < 0.3 * len(first)
    other = {frozenset(pack) for pack in all_packs(made(random_lengths(num_rows), seed=1))}
    assert first != other


@pytest.mark.parametrize(
    ("num_rows", "num_shards", "most"), [(6000, 24, 0.02), (20000, 24, 0.015), (20000, 192, 0.03)]
)
def test_packing_leaves_little_unused(num_rows: int, num_shards: int, most: float) -> None:
    lengths = random_lengths(num_rows, median=300, limit=2048)
    sampler = made(lengths, 2048, num_shards)
    assert 1 - lengths.sum() / (2048 * sampler.num_positions) < most
    cut = made(lengths, 2048, num_shards, split=True)
    # The shards have different numbers of tokens, and the last packs of some are not full.
    assert cut.num_positions - num_shards <= lengths.sum() / 2048 <= cut.num_positions


@pytest.mark.parametrize("block", [None, 400])
def test_neighbouring_packs_cost_about_the_same(block: int | None) -> None:
    lengths = random_lengths(20_000, median=300, limit=2048)
    sampler = made(lengths, 2048, 24)
    if block is not None:
        factory = Packed("tokens", 2048)
        pool = pool_of(20_000, 24)
        sampler = factory.make_in_blocks(pool, 0, Table(20_000, tokens=lengths), block)
    costs = np.array([sum(n * n for *_, n in pack) for pack in all_packs(sampler, 2)], float)
    for devices in (2, 3, 4, 6, 8, 12):
        steps = costs[: len(costs) // devices * devices].reshape(-1, devices)
        aligned = (steps.max(axis=1) / steps.mean(axis=1) - 1).mean()
        shuffled = np.random.default_rng(0).permutation(costs)[: steps.size].reshape(steps.shape)
        assert aligned < 0.3 * (shuffled.max(axis=1) / shuffled.mean(axis=1) - 1).mean()


def test_packs_with_several_fields_hold_what_each_may() -> None:
    rng = np.random.default_rng(1)
    fields = {"tokens": random_lengths(500), "patches": rng.integers(0, 60, 500)}
    sampler = made(fields, {"patches": 70, "tokens": 100})
    assert sampler.options.field == "tokens"
    packs = all_packs(sampler)
    assert sorted(row for pack in packs for row, *_ in pack) == [*range(500)]
    for name, limit in (("tokens", 100), ("patches", 70)):
        assert max(sum(fields[name][row] for row, *_ in pack) for pack in packs) <= limit


def test_dropped_rows_come_never_and_others_once() -> None:
    lengths = random_lengths(300, limit=250)
    packs = all_packs(made(lengths, 100, overflow="drop"))
    assert (
        sorted(row for pack in packs for row, *_ in pack) == np.flatnonzero(lengths <= 100).tolist()
    )


def test_subset_is_packed_alone() -> None:
    lengths = random_lengths(400)
    rows = StridedRows(1, 3).among(StoreRows(Shards(400, 4)))
    sampler = Packed("tokens", 100).make(Pool.of(rows, 4), 0, Table(400, tokens=lengths))
    packs = all_packs(sampler)
    assert sorted(row for pack in packs for row, *_ in pack) == [*range(1, 400, 3)]


def test_fixed_packs_are_those_of_epoch_0() -> None:
    sampler = made(random_lengths(300))
    fixed = replace(sampler, is_fixed=True)
    assert all_packs(fixed, 5) == all_packs(sampler, 0) != all_packs(sampler, 5)


def test_rows_at_positions_are_those_of_their_packs() -> None:
    sampler = made(random_lengths(300))
    counts = sampler.num_rows_at(0, np.arange(sampler.num_positions)).tolist()
    assert counts == [*map(len, all_packs(sampler))]
    rows = sampler.dataset_rows(0, range(3, 9, 2)).tolist()
    assert rows == [row for pack in packs_at(sampler, 0, [3, 5, 7]) for row, *_ in pack]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"overflow": "cut"}, "overflow='cut'"),
        ({"length": 0}, r"length=0"),
        ({"length": {"patches": 3}}, "'tokens'"),
        ({"max_documents": 0}, "max_documents=0"),
        ({"split": True, "overflow": "drop"}, "overflow"),
        ({"length": {"tokens": 9, "patches": 3}, "overflow": "truncate"}, "truncate"),
    ],
)
def test_option_is_checked(options: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Packed(**{"field": "tokens", "length": 100, **options})


def mixed(shares: dict[str, float], **options: Any) -> tuple[PackedSampler, Any]:
    """600 short documents of set a and 200 of set b, which are about twice as long."""
    lengths = np.append(random_lengths(600, median=20), random_lengths(200, 1, median=45))
    members = StoreRows(Shards(600, 4)), StoreRows(Shards(200, 4))
    pool = Pool.of(JoinedRows(("a", "b"), members), 4)
    factory = Packed("tokens", 100, shares=shares, **options)
    assert factory.training_sets == tuple(shares)
    return factory.make(pool, 0, Table(800, tokens=lengths)), lengths


@pytest.mark.parametrize("shares", [{"a": 0.5, "b": 0.5}, {"b": 9, "a": 1}, {"a": 1, "b": 0}])
@pytest.mark.parametrize("shares_of", ["tokens", "documents"])
def test_mixture_has_its_shares_in_every_epoch(shares: Any, shares_of: str) -> None:
    sampler, lengths = mixed(shares, shares_of=shares_of)
    drawn = np.zeros(800, np.int64)
    for epoch in range(6):
        packs = all_packs(sampler, epoch)
        assert all(packs)
        assert all(sum(n for *_, n in pack) <= 100 for pack in packs)
        rows = np.array([row for pack in packs for row, *_ in pack])
        drawn += np.bincount(rows, minlength=800)
        amounts = lengths[rows] if shares_of == "tokens" else np.ones(len(rows))
        share = amounts[rows < 600].sum() / amounts.sum()
        expected = shares["a"] / sum(shares.values())
        # Of documents, exact; of tokens, as the documents that were drawn happen to be long.
        assert share == pytest.approx(expected, abs=0.03 if shares_of == "tokens" else 0.001)
    for part in (drawn[:600], drawn[600:]):
        # A shard of one more or one less row reads its rows a little faster or slower.
        assert part.max() - part.min() <= 2
    assert 0 <= sampler.padding_fraction < 0.15
    for shard in range(4):
        home = {*sampler.pool.shard_dataset_rows(shard).tolist()}
        assert {row for pack in packs[shard::4] for row, *_ in pack} <= home


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"split": True}, "split=True"),
        ({"overflow": "split"}, "overflow='split'"),
        ({"shares_of": "rows"}, "shares_of='rows'"),
        ({"shares": None, "shares_of": "documents"}, "shares_of='documents'"),
        ({"shares": {"a": -1}}, "'a'"),
        ({"shares": {"a": 1, "c": 1}}, "'b'"),
    ],
)
def test_options_of_a_mixture_are_checked(options: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        mixed(**{"shares": {"a": 1, "b": 1}, **options})


def curriculum_of(stages: dict[int, Any], limit: int = 100) -> Any:
    table = Table(300, tokens=random_lengths(300, median=limit / 3, limit=limit))
    return Curriculum(stages).make(pool_of(300, 4), 0, table)


def test_stages_of_a_curriculum_have_their_packs() -> None:
    stages = {0: Packed("tokens", 100), 3: Packed("tokens", 100, max_documents=2)}
    order = curriculum_of({**stages, 5: Packed("tokens", 100, split=True)})
    lengths = random_lengths(300, median=100 / 3)
    assert isinstance(order, PackedSampler)
    for epoch in range(7):
        packs = all_packs(order, epoch)
        assert len(packs) == order.num_positions
        assert tokens_of(packs) == [
            (row, token) for row, n in enumerate(lengths) for token in range(n)
        ]
        assert (max(map(len, packs)) <= 2) == (epoch in (3, 4))
        for shard in range(4):
            home = {*order.pool.shard_dataset_rows(shard).tolist()}
            assert {row for pack in packs[shard::4] for row, *_ in pack} <= home
    # Its first stage is divided further, for the packs of the second.
    alone = Packed("tokens", 100).make(pool_of(300, 4), 0, Table(300, tokens=lengths))
    assert alone.num_positions < order.num_positions
    assert order.cuts_rows
    assert pickle.loads(pickle.dumps(order)).identity == order.identity


def test_shares_of_a_curriculum_change_at_its_epochs() -> None:
    lengths = np.append(random_lengths(600, median=20), random_lengths(200, 1, median=45))
    members = StoreRows(Shards(600, 4)), StoreRows(Shards(200, 4))
    pool = Pool.of(JoinedRows(("a", "b"), members), 4)
    stages: Any = {
        epoch: Packed("tokens", 100, shares={"a": a, "b": 1 - a}, shares_of="documents")
        for epoch, a in ((0, 0.75), (2, 0.25))
    }
    curriculum = Curriculum(stages)
    assert curriculum.training_sets == ("a", "b")
    order = curriculum.make(pool, 0, Table(800, tokens=lengths))
    for epoch in range(4):
        rows = order.dataset_rows(epoch, range(order.num_positions))
        assert (rows < 600).mean() == pytest.approx(0.75 if epoch < 2 else 0.25, abs=0.002)


@pytest.mark.parametrize(
    ("stages", "match"),
    [
        ({0: None, 3: Packed("tokens", 100)}, r"stages\[3\]"),
        ({0: Packed("tokens", 100), 3: Packed("tokens", 200)}, "200"),
        (
            {0: Packed("tokens", 100, overflow="drop"), 1: Packed("tokens", 100, split=True)},
            "num_shards",
        ),
    ],
)
def test_stages_that_do_not_fit_together_are_an_error(stages: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        curriculum_of(stages, 3000 if match == "num_shards" else 100)


def test_cut_packs_of_all_epochs_have_at_most_max_documents() -> None:
    lengths = np.random.default_rng(0).choice([1, 2, 60], 400)
    largest = max(map(len, all_packs(made(lengths, split=True))))
    sampler = made(lengths, split=True, max_documents=largest)
    for epoch in range(30):
        assert max(map(len, all_packs(sampler, epoch))) <= largest
    assert all_packs(sampler, 1) != all_packs(sampler, 2)


def test_long_row_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"row 1 .*overflow"):
        made([5, 101, 7])
    with pytest.raises(ValueError, match=r"max_documents=2"):
        made([5] * 100, split=True, max_documents=2)
