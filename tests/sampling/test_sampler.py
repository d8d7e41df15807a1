import math
import tracemalloc
from collections import Counter
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from lightning_memmap.sampling import Sampler
from lightning_memmap.sampling import permutations as constructions
from lightning_memmap.sampling.rows import Shards, round_up_shards, shard_rows
from lightning_memmap.sampling.sampler import derive_seed
from lightning_memmap.sampling.schedule import BatchSchedule
from tests.support.rows import at, make_sampler

SEEDS = st.integers(0, 2**63 - 1)
EPOCHS = st.integers(0, 2**32)


@st.composite
def samplers(draw: st.DrawFn, shuffle: bool | None = None) -> Sampler:
    shuffle = draw(st.booleans()) if shuffle is None else shuffle
    return make_sampler(
        num_rows=draw(st.integers(1, 400)),
        num_shards=draw(st.integers(1, 30)),
        seed=draw(SEEDS),
        shuffle=shuffle,
        shuffle_block=draw(st.none() | st.integers(1, 50)) if shuffle else None,
    )


def rows_at(sampler: Sampler, epoch: int, positions: range) -> list[int]:
    shards, offsets = at(sampler, epoch, positions)
    assert shards.dtype == offsets.dtype == np.int64
    assert shards.shape == offsets.shape == (len(positions),)
    return (offsets * sampler.num_shards + shards).tolist()


def whole_epoch(sampler: Sampler, epoch: int) -> list[int]:
    return rows_at(sampler, epoch, range(sampler.num_positions))


# Shards


@given(st.integers(1, 500), st.integers(1, 60))
def test_rows_at_places_are_those_that_were_located(num_rows: int, num_shards: int) -> None:
    shards, rows = Shards(num_rows, num_shards), np.arange(num_rows)
    assert shards.rows(shards.file_rows(rows)).tolist() == rows.tolist()


@given(st.integers(1, 500), st.integers(1, 60))
def test_shard_rows_any_counts_match_dealing_row_by_row(num_rows: int, num_shards: int) -> None:
    dealt = Counter(row % num_shards for row in range(num_rows))
    rows = shard_rows(num_rows, num_shards).tolist()
    assert rows == [dealt[shard] for shard in range(num_shards)]
    starts = Shards(num_rows, num_shards).starts.tolist()
    assert starts == [sum(rows[:shard]) for shard in range(num_shards)]


@pytest.mark.parametrize(
    ("num_shards", "num_data_devices", "expected"),
    [(24, 1, 24), (24, 8, 24), (24, 24, 24), (24, 5, 25), (24, 7, 28), (24, 48, 48), (1, 3, 3)],
)
def test_striping_consumers_gives_next_multiple(
    num_shards: int, num_data_devices: int, expected: int
) -> None:
    assert round_up_shards(num_shards, num_data_devices) == expected


# Samplers


@given(st.data(), samplers(), EPOCHS)
def test_sampler_any_range_is_a_slice_of_an_epoch_that_has_each_row_once(
    data: st.DataObject, sampler: Sampler, epoch: int
) -> None:
    num_shards, num_rows = sampler.num_shards, sampler.num_positions
    whole = whole_epoch(sampler, epoch)
    assert sorted(whole) == list(range(num_rows))
    if sampler.is_sequential:
        assert whole == list(range(num_rows))
    # Rows stay in their shards, and so with their devices.
    assert [row % num_shards for row in whole] == [p % num_shards for p in range(num_rows)]
    step = data.draw(st.sampled_from([n for n in range(1, num_shards + 1) if not num_shards % n]))
    start = data.draw(st.integers(0, num_rows))
    stop = data.draw(st.integers(start, num_rows))
    for positions in (range(start, stop), range(start, stop, step)):
        assert rows_at(sampler, epoch, positions) == [whole[p] for p in positions]
        shards, offsets = at(sampler, epoch, positions)
        starts = 1000 * np.arange(num_shards)
        found = sampler.locate(epoch, positions, starts)
        assert (found == starts[shards] + offsets).all()


@given(SEEDS, SEEDS, EPOCHS, EPOCHS, st.integers(1, 8))
def test_sampler_other_seed_or_epoch_gives_other_order(
    seed: int, other_seed: int, epoch: int, other_epoch: int, num_shards: int
) -> None:
    assume(seed != other_seed and epoch != other_epoch)
    one = make_sampler(200, num_shards, seed, shuffle=True)
    other = make_sampler(200, num_shards, other_seed, shuffle=True)
    found = [whole_epoch(each, number) for each in (one, other) for number in (epoch, other_epoch)]
    assert len({*map(tuple, found)}) == 4


def test_sampler_known_seed_gives_known_rows() -> None:
    # Checkpoints hold seed, epoch and position: the order they stand for must never change.
    assert whole_epoch(make_sampler(13, 3, seed=42, shuffle=True), 5) == GOLDEN_SMALL
    middle = make_sampler(100_003, 24, seed=7, shuffle=True)
    assert rows_at(middle, 2, range(50_000, 50_005)) == GOLDEN_MIDDLE
    large = make_sampler(10**9, 24, seed=7, shuffle=True)
    assert rows_at(large, 2, range(123_456_789, 123_456_794)) == GOLDEN_LARGE


GOLDEN_SMALL = [6, 7, 8, 9, 10, 2, 0, 4, 11, 3, 1, 5, 12]
GOLDEN_MIDDLE = [1784, 44553, 94114, 32267, 87732]
GOLDEN_LARGE = [116894805, 711083038, 843468647, 905776992, 401672041]


@pytest.mark.parametrize(
    ("num_rows", "num_shards"),
    [(10**9, 24), (10**9 + 17, 1), (24 * 2**32 + 12_345, 24), (2**42, 8)],
)
def test_sampler_of_huge_dataset_is_exact_and_small_in_memory(
    num_rows: int, num_shards: int
) -> None:
    tracemalloc.start()
    try:
        sampler = make_sampler(num_rows, num_shards, seed=11, shuffle=True)
        count = 20_000
        first = rows_at(sampler, 3, range(count))
        middle = rows_at(sampler, 3, range(num_rows // 2, num_rows // 2 + count))
        last = rows_at(sampler, 3, range(num_rows - count, num_rows))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    rows = first + middle + last
    assert len(set(rows)) == 3 * count
    assert min(rows) >= 0
    assert max(rows) < num_rows
    assert [row % num_shards for row in first] == [p % num_shards for p in range(count)]
    # Spread over the whole dataset: the mean of so many rows lies near the middle, and its
    # standard error is N / sqrt(12 * 60,000) = 0.0012 N.
    assert abs(np.mean(rows) / num_rows - 0.5) < 0.005
    # One byte a row would be at least 1 GB.
    assert peak_bytes < 2**29


# Mixing. The seeds are fixed, so each outcome is fixed; the critical values are the 99.9 %
# quantiles of the chi-square distribution (a fair shuffle passes with 999 of 1000 seed lists).

CHI_SQUARE_999 = {19: 43.82, 23: 49.73, 49: 85.35, 379: 469.81, 399: 492.02}


def chi_square(counts: np.ndarray, expected: float | np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.slow
def test_shuffle_four_rows_gives_all_24_orders_equally_often() -> None:
    found = Counter(tuple(whole_epoch(make_sampler(4, 1, seed, True), 0)) for seed in range(2400))
    assert set(found) == set(permutations(range(4)))
    assert chi_square(np.array(list(found.values())), 100) < CHI_SQUARE_999[23]


@pytest.mark.slow
def test_shuffle_each_row_is_equally_often_at_a_position() -> None:
    counts = np.zeros((50, 50))
    for seed in range(5000):
        counts[np.arange(50), whole_epoch(make_sampler(50, 1, seed, True), 0)] += 1
    for position in (0, 25, 49):
        assert chi_square(counts[position], 100) < CHI_SQUARE_999[49]


@pytest.mark.parametrize("num_rows", [24, 100, 1000])
@pytest.mark.slow
def test_shuffle_rows_that_were_neighbours_stay_so_only_by_chance(num_rows: int) -> None:
    # Row i + 1 follows row i (N - 1) / N times in a fair shuffle, very nearly as a Poisson
    # variable: the bound is 4 standard errors, 5.7 %.
    kept = 0
    for seed in range(5000):
        order = np.array(whole_epoch(make_sampler(num_rows, 1, seed, True), 0))
        kept += int((np.diff(order) == 1).sum())
    expected = 5000 * (num_rows - 1) / num_rows
    assert abs(kept - expected) < 4 * math.sqrt(expected)


@pytest.mark.slow
def test_shuffle_consecutive_seeds_and_epochs_are_independent() -> None:
    by_seed, by_epoch = np.zeros((20, 20)), np.zeros((20, 20))
    seeds = [rows_at(make_sampler(20, 1, seed, True), 0, range(1))[0] for seed in range(6_001)]
    epochs = [rows_at(make_sampler(20, 1, 1, True), epoch, range(1))[0] for epoch in range(6_001)]
    for one, other in pairwise(seeds):
        by_seed[one, other] += 1
    for one, other in pairwise(epochs):
        by_epoch[one, other] += 1
    assert chi_square(by_seed, 15) < CHI_SQUARE_999[399]
    assert chi_square(by_epoch, 15) < CHI_SQUARE_999[399]


@pytest.mark.slow
def test_shuffle_shards_are_independent_of_each_other() -> None:
    counts = np.zeros((20, 20))
    for seed in range(6_000):
        _, offsets = at(make_sampler(40, 2, seed, True), 0, range(2))
        counts[tuple(offsets)] += 1
    assert chi_square(counts, 15) < CHI_SQUARE_999[399]


# Shards of 1,024 rows and more are permuted by two tables that they share, those of 65,536 and more
# by a cipher whose first rounds they share, and others by sorting: what holds for one must hold for
# the others. The cipher is tested with shorter shards, where its faults show most.

LONG = [1024, 1025, 1500, 4099]


@pytest.fixture(params=["tables", "cipher"])
def construction(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How shards of 1,024 rows and more are permuted."""
    if request.param == "cipher":
        monkeypatch.setattr(constructions, "_VERY_LONG_SHARD", 0)
    name: str = request.param
    return name


@pytest.mark.parametrize("size", [1022, 1023, *LONG, 2**16 - 1, 2**16, 2**16 + 1])
@pytest.mark.parametrize("more", [0, 1, 2])
@pytest.mark.usefixtures("construction")
def test_sampler_shards_about_the_length_of_another_construction_hold_each_row_once(
    size: int, more: int
) -> None:
    num_rows = 3 * size + more
    shards, offsets = at(make_sampler(num_rows, 3, seed=8, shuffle=True), 4, range(num_rows))
    rows = offsets * 3 + shards
    assert (np.bincount(rows, minlength=num_rows) == 1).all()


@given(st.data(), st.integers(5_000, 40_000), st.integers(1, 5), SEEDS, EPOCHS)
# What the fixture changes is the same for all examples.
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("construction")
@pytest.mark.slow
def test_sampler_long_shards_any_range_equals_slice_of_whole(
    data: st.DataObject, num_rows: int, num_shards: int, seed: int, epoch: int
) -> None:
    # Windows of a few rows, of so many that a cipher permutes them, and of all.
    window = data.draw(st.sampled_from([None, 7, 1024, 1500, 50_000]))
    sampler = make_sampler(num_rows, num_shards, seed, shuffle=True, shuffle_block=window)
    step = data.draw(st.sampled_from([1, num_shards]))
    start = data.draw(st.integers(0, num_rows))
    stop = data.draw(st.integers(start, num_rows))
    whole = whole_epoch(sampler, epoch)
    assert sorted(whole) == list(range(num_rows))
    assert rows_at(sampler, epoch, range(start, stop, step)) == whole[start:stop:step]


@pytest.mark.parametrize("size", [40, 1500, 2**16])
def test_sampler_any_shards_give_the_orders_of_each(size: int) -> None:
    sampler = make_sampler(6 * size, 6, 3, shuffle=True)
    _, whole = at(sampler, 2, range(20 * 6))
    for shards in ([0, 1], [4], [0, 1, 5], [2, 3, 4, 5], [0, 2, 4], [5, 0]):
        columns = np.array(shards)
        found = sampler.grid(2, 0, 20, columns, 10 * columns)
        assert (found.reshape(20, -1) == whole.reshape(20, 6)[:, shards] + 10 * columns).all()


def orders(size: int, num_shards: int, seed: int, epoch: int = 0) -> np.ndarray:
    """The offsets of each shard in its order, of shape (size, num_shards)."""
    sampler = make_sampler(size * num_shards, num_shards, seed, shuffle=True)
    return at(sampler, epoch, range(sampler.num_positions))[1].reshape(size, num_shards)


def tenths(values: np.ndarray, size: int) -> np.ndarray:
    return values % size * 10 // size


@pytest.mark.parametrize(
    ("construction", "size"),
    [*(("tables", size) for size in LONG), ("cipher", 1500), ("cipher", 4099), ("cipher", 16_411)],
    indirect=["construction"],
)
@pytest.mark.usefixtures("construction")
@pytest.mark.slow
def test_shuffle_long_shard_tenths_of_one_thing_say_nothing_of_another(size: int) -> None:
    # Ten by ten tables of where a row was and where it went, and so on, over 40 seeds. In a fair
    # shuffle, a table's statistic has 81 degrees of freedom at most, and a variance of twice as
    # many; the mean of 40 lies within four standard errors of 81, or below. What is compared has
    # two parts that the digits of the construction are known to leave related if the rounds are
    # too few: rows at the distance of a whole low digit, and shards with common rounds.
    distance = 2 ** (((size - 1).bit_length() + 1) // 2)
    place = np.arange(size)
    statistics: dict[str, list[float]] = {}
    for seed in range(40):
        order, other, third = orders(size, 3, seed).T
        next_epoch, next_seed = orders(size, 3, seed, 1)[:, 0], orders(size, 3, seed + 1000)[:, 0]
        pairs = {
            "place, row": (place, order),
            "neighbours": (order[1:], order[:-1]),
            "a low digit apart": (order[distance:], order[:-distance]),
            "shards": (order, other),
            "places of the same row in two shards": (np.argsort(order), np.argsort(other)),
            "differences of three shards": (other - order, third - other),
            "epochs": (order, next_epoch),
            "seeds": (order, next_seed),
            "steps of two shards": (np.diff(order), np.diff(other)),
            "steps a low digit apart of two shards": (
                order[distance:] - order[:-distance],
                other[distance:] - other[:-distance],
            ),
            "low digits": (
                order % distance * size // distance,
                other % distance * size // distance,
            ),
        }
        for name, (one, two) in pairs.items():
            cells = 10 * tenths(one, size) + tenths(two, size)
            table = np.bincount(cells, minlength=100).reshape(10, 10)
            expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
            statistics.setdefault(name, []).append(chi_square(table, expected))
    bound = 81 + 4 * math.sqrt(2 * 81 / 40)
    means = {name: float(np.mean(values)) for name, values in statistics.items()}
    assert {name: mean for name, mean in means.items() if mean > bound} == {}


@pytest.mark.usefixtures("construction")
@pytest.mark.slow
def test_shuffle_long_shard_rows_keep_their_distance_only_by_chance() -> None:
    # As for short shards, for rows that lie a whole digit apart too. The expected number is
    # (N - d)^2 / (N (N - 1)) in each order, and the bound 4 standard errors of a Poisson variable.
    kept: Counter[int] = Counter()
    for seed in range(1000):
        order = orders(1024, 4, seed)
        for apart in (1, 2, 32, 33):
            kept[apart] += int((order[apart:] - order[:-apart] == apart).sum())
    for apart, found in kept.items():
        expected = 4000 * (1024 - apart) ** 2 / (1024 * 1023)
        assert abs(found - expected) < 4 * math.sqrt(expected), apart


@pytest.mark.slow
def test_shuffle_rows_of_two_shards_come_together_only_by_chance(construction: str) -> None:
    # Four standard errors of a Poisson variable: one coincidence for each pair of shards, and a
    # little fewer for rows that are some offsets apart.
    pairs = [(one, two) for one in range(4) for two in range(one)]
    same: Counter[int] = Counter()
    for seed in range(1000):
        order = orders(1024, 4, seed)
        steps = np.stack([order[:, one] - order[:, two] for one, two in pairs])
        for apart in (0, 1, 32):
            same[apart] += int((steps == apart).sum())
    for apart, found in same.items():
        if construction == "tables" and not apart:
            assert found == 0  # No two rotations are the same.
            continue
        expected = 6000 * (1024 - apart) / 1024
        assert abs(found - expected) < 4 * math.sqrt(expected), apart


# Arguments


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"num_rows": 0, "num_shards": 1}, "num_rows=0"),
        ({"num_rows": 1, "num_shards": 0}, "num_shards=0"),
        ({"num_rows": 1, "num_shards": 1, "shuffle": True, "seed": -1}, "seed=-1"),
        (
            {"num_rows": 1, "num_shards": 1, "shuffle": True, "seed": 2**63},
            "seed=9223372036854775808",
        ),
        ({"num_rows": 1, "num_shards": 1, "shuffle": True, "shuffle_block": 0}, "block=0"),
    ],
)
def test_sampler_bad_argument_is_named(arguments: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make_sampler(**arguments)


def test_sampler_step_that_does_not_divide_shards_is_refused() -> None:
    with pytest.raises(ValueError, match=r"range\(0, 100, 5\)"):
        make_sampler(100, 24).locate(0, range(0, 100, 5))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4, unique=True))
def test_derive_seed_depends_on_each_word_and_their_order(words: list[int]) -> None:
    found = {derive_seed(*words), derive_seed(*words, 1), derive_seed(*words[:-1], 2**33)}
    found.add(derive_seed(*words[::-1]))
    assert len(found) == 3 + (len(words) > 1)
    assert all(0 <= seed < 2**63 for seed in found)


# Steps


def sizes_of(plan: BatchSchedule) -> list[int]:
    return [stop - start for start, stop in map(plan.bounds, range(len(plan)))]


@pytest.mark.parametrize(
    ("num_rows", "global_batch", "num_shards", "drop_last", "start", "expected"),
    [
        # Nothing is left over.
        (12, 4, 4, False, 0, [4, 4, 4]),
        (12, 4, 4, True, 0, [4, 4, 4]),
        (5, 1, 24, False, 0, [1, 1, 1, 1, 1]),
        # C rows or more are left over: a step of their own.
        (10, 4, 2, False, 0, [4, 4, 2]),
        (73, 48, 24, False, 0, [48, 25]),
        # Fewer than C: shared evenly with the step before, the odd row to the first.
        (9, 4, 2, False, 0, [4, 3, 2]),
        (100, 48, 24, False, 0, [48, 26, 26]),
        (71, 48, 24, False, 0, [36, 35]),
        (10, 8, 12, False, 0, [5, 5]),
        # Too few for two steps of gcd(G, C) data devices: one step.
        (9, 4, 4, False, 0, [4, 5]),
        (11, 4, 4, False, 0, [4, 7]),
        (7, 3, 24, False, 0, [3, 4]),
        (10, 6, 24, False, 0, [10]),
        (25, 24, 24, False, 0, [25]),
        (47, 24, 24, False, 0, [47]),
        # An epoch shorter than one step.
        (3, 4, 24, False, 0, [3]),
        (1, 1, 1, False, 0, [1]),
        (0, 4, 2, False, 0, []),
        # The incomplete last step is dropped.
        (10, 4, 2, True, 0, [4, 4]),
        (9, 4, 4, True, 0, [4, 4]),
        (3, 4, 24, True, 0, []),
        # From the middle of an epoch.
        (10, 4, 2, False, 4, [4, 2]),
        (10, 4, 2, False, 3, [4, 3]),
        (10, 4, 4, False, 3, [7]),
        (10, 4, 2, True, 3, [4]),
        (10, 4, 2, False, 10, []),
    ],
)
def test_step_plan_tail_matches_hand_computed_sizes(
    num_rows: int,
    global_batch: int,
    num_shards: int,
    drop_last: bool,
    start: int,
    expected: list[int],
) -> None:
    plan = BatchSchedule(num_rows, global_batch, num_shards, drop_last, start)
    assert sizes_of(plan) == expected
    assert len(plan) == len(expected)


@st.composite
def plans(draw: st.DrawFn) -> BatchSchedule:
    num_rows = draw(st.integers(0, 300))
    global_batch = draw(st.integers(1, 60))
    # Often related to G: the rule's edges lie where they share a divisor.
    num_shards = draw(
        st.one_of(
            st.integers(1, 48),
            st.sampled_from([k for k in range(1, 61) if global_batch % k == 0]),
            st.integers(1, 4).map(lambda k: k * global_batch),
        )
    )
    start = draw(st.one_of(st.just(0), st.integers(0, num_rows)))
    return BatchSchedule(num_rows, global_batch, num_shards, draw(st.booleans()), start)


@given(plans())
def test_step_plan_any_counts_covers_the_epoch_with_a_row_for_every_consumer(
    plan: BatchSchedule,
) -> None:
    bounds = [plan.bounds(step) for step in range(len(plan))]
    left = plan.num_positions - plan.start
    dropped = left % plan.global_batch if plan.drop_last else 0
    edges = [plan.start, *(last for _, last in bounds)]
    assert [first for first, _ in bounds] == edges[:-1]
    assert edges[-1] == plan.num_positions - dropped
    sizes = sizes_of(plan)
    full = sizes if plan.drop_last else sizes[:-2]
    assert all(size == plan.global_batch for size in full)
    assert all(0 < size < 2 * plan.global_batch for size in sizes)
    common = math.gcd(plan.global_batch, plan.num_shards)
    assert all(size >= min(common, left) for size in sizes)


@pytest.mark.parametrize("step", [-1, 3, 100])
def test_step_plan_step_outside_raises_index_error(step: int) -> None:
    with pytest.raises(IndexError, match=f"step={step}: the schedule has 3 steps"):
        BatchSchedule(12, 4, 4).bounds(step)
