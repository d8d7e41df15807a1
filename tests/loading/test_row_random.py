"""Random numbers of each row: the generator, its statistics, and what they depend on."""

import math
from collections.abc import Callable
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from lightning_memmap.loading.philox import philox
from lightning_memmap.loading.row_random import RowRandom

#: Counter, key and words of philox4x32_10 in the file kat_vectors of Random123.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip
ROWS = [0, 1, 2, 7, 2**31, 2**40 + 3]


def words_of(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def scalar_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as in the paper, on Python integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


class TestPhilox:
    @pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
    def test_known_answer(self, counter: str, key: str, words: str) -> None:
        low, high = words_of(key)
        column = torch.tensor(words_of(counter))[:, None]
        assert philox(column, low | high << 32).flatten().tolist() == words_of(words)
        assert scalar_philox(words_of(counter), [low, high]) == words_of(words)

    def test_numpy_and_torch_and_the_definition_agree(self, monkeypatch: Any) -> None:
        random = np.random.default_rng(0)
        # More than one of the parts that numpy computes at once.
        counter = torch.from_numpy(random.integers(2**32, size=(4, 10_000)))
        key = 2**64 - 12345
        on_numpy = philox(counter, key)
        on_torch = philox_of_a_device(counter, key, monkeypatch)
        assert torch.equal(on_numpy, on_torch)
        for column in (0, 5, 8191, 8192, 9999):
            expected = scalar_philox(counter[:, column].tolist(), [key % 2**32, key >> 32])
            assert on_numpy[:, column].tolist() == expected


def philox_of_a_device(counter: Tensor, key: int, monkeypatch: Any) -> Tensor:
    """What a device computes, with its operators on the CPU."""
    with monkeypatch.context() as patch:
        patch.setattr("lightning_memmap.loading.philox._is_on_cpu", lambda tensor: False)
        return philox(counter, key)


def everything(random: RowRandom) -> list[Tensor]:
    """A draw of each kind, and some of them again."""
    return [
        random.uniform(),
        random.normal(3),
        random.uniform(2, 3, low=-2.0, high=5.0),
        random.randint(high=10),
        random.randint(2, low=-3, high=4),
        random.bernoulli(),
        random.bernoulli(5, p=0.2),
        random.permutation(6),
        random.uniform(),
        random.normal(),
        random.uniform(7),
        random.uniform(),
    ]


class TestDependence:
    def test_numbers_of_a_row_do_not_depend_on_the_others(self) -> None:
        whole = everything(RowRandom(ROWS, seed=3, epoch=5))
        for index, row in enumerate(ROWS):
            (alone) = everything(RowRandom([row], seed=3, epoch=5))
            assert all(torch.equal(a[index], b[0]) for a, b in zip(whole, alone, strict=True))
        backwards = everything(RowRandom(ROWS[::-1], seed=3, epoch=5))
        assert all(torch.equal(a, b.flip(0)) for a, b in zip(whole, backwards, strict=True))

    @pytest.mark.parametrize(
        "changed",
        [{"seed": 4}, {"epoch": 6}, {"rows": [row + 100 for row in ROWS]}, {"positions": [9] * 6}],
    )
    def test_numbers_depend_on_seed_epoch_row_and_position(self, changed: Any) -> None:
        same = {"rows": ROWS, "seed": 3, "epoch": 5, "positions": [8] * 6}
        first, second = (RowRandom(**kwargs).uniform(50) for kwargs in (same, {**same, **changed}))
        assert not (first == second).any()

    def test_calls_differ_and_do_not_depend_on_earlier_shapes(self) -> None:
        one, other = RowRandom(ROWS), RowRandom(ROWS)
        first = [one.uniform(*shape) for shape in ((), (3,), (2, 2), (5,))]
        second = [other.uniform(*shape) for shape in ((7,), (3,), (9,), (5,))]
        assert torch.equal(first[1], second[1])
        assert torch.equal(first[3], second[3])
        numbers = torch.cat([draw.flatten() for draw in [*first, second[0]]])
        assert len(numbers.unique()) == len(numbers)

    @pytest.mark.parametrize(
        "draw", ["uniform", "normal", "bernoulli", lambda random, num: random.randint(num, high=9)]
    )
    def test_more_numbers_begin_with_those_of_fewer(self, draw: Any) -> None:
        draws = []
        for num in range(10):
            random = RowRandom(ROWS)
            random.uniform()
            draws.append(getattr(random, draw)(num) if isinstance(draw, str) else draw(random, num))
        assert all(torch.equal(draws[9][:, :num], drawn) for num, drawn in enumerate(draws))

    def test_restarted_numbers_begin_with_the_first_call(self) -> None:
        random = RowRandom(ROWS, seed=1, epoch=2, positions=range(6))
        first = everything(random)
        again = everything(random.restarted(torch.device("cpu")))
        assert all(map(torch.equal, first, again))

    def test_generators_of_numpy_are_those_of_the_row(self) -> None:
        def draws(random: RowRandom) -> list[list[float]]:
            return [generator.random(4).tolist() for generator in random.generators()]

        random = RowRandom([5, 9, 9], seed=1, positions=[0, 1, 2])
        first, second = draws(random), draws(random)
        assert first[1:2] == draws(RowRandom([9], seed=1, positions=[1]))
        numbers = {number for row in first + second for number in row}
        assert len(numbers) == 24
        # Those of all rows count as one call.
        other = RowRandom([9], seed=1, positions=[1])
        other.normal(), other.normal()
        assert torch.equal(random.uniform()[1:2], other.uniform())


class TestArguments:
    def test_shapes_dtypes_and_bounds(self) -> None:
        random = RowRandom(range(500))
        for shape in ((), (1,), (3,), (2, 5), (0,), (4, 0)):
            drawn = random.uniform(*shape, low=1000.0, high=1000.001)
            assert (drawn.shape, drawn.dtype) == ((500, *shape), torch.float32)
            assert ((drawn >= 1000) & (drawn < 1000.001)).all()
            assert random.normal(*shape).shape == (500, *shape)
            assert random.normal(*shape).dtype == torch.float32
            whole = random.randint(*shape, low=-2, high=3)
            assert (whole.shape, whole.dtype) == ((500, *shape), torch.int64)
            assert random.bernoulli(*shape).shape == (500, *shape)
            assert random.bernoulli(*shape).dtype == torch.bool
        assert random.randint(high=2**31).max() > 2**30
        assert random.randint(low=7, high=8).unique().tolist() == [7]
        assert random.permutation(0).shape == (500, 0)
        assert not random.bernoulli(100, p=0.0).any()
        assert random.bernoulli(100, p=1.0).all()
        assert len(random) == 500

    def test_bounds_may_be_tensors_of_rows(self) -> None:
        random = RowRandom(range(300))
        high = torch.arange(1, 301)
        whole = random.randint(high=high)
        assert ((whole >= 0) & (whole < high)).all()
        low = -high.float()
        real = random.uniform(5, low=low[:, None], high=low[:, None] + 1)
        assert ((real >= low[:, None]) & (real < low[:, None] + 1)).all()
        chance = random.bernoulli(p=(high % 2).float())
        assert torch.equal(chance, high % 2 == 1)
        normal = random.normal(100, mean=low[:, None], std=0.1)
        assert torch.allclose(normal.mean(1), low, atol=0.1)

    @pytest.mark.parametrize(
        ("call", "words"),
        [
            (lambda random: random.uniform(-1), r"shape=\(-1,\)"),
            (lambda random: random.normal((2, 3)), r"shape=\(\(2, 3\),\)"),
            (lambda random: random.uniform(low=1.0, high=0.0), "low=1.0, high=0.0"),
            (lambda random: random.randint(low=3, high=3), "low=3, high=3"),
            (lambda random: random.randint(high=2**31 + 1), "high=2147483649"),
            (lambda random: random.bernoulli(p=1.5), "p=1.5"),
            (lambda random: random.permutation(-1), "shape"),
            (lambda random: RowRandom([[1]]), "rows"),
            (lambda random: RowRandom([1], positions=[1, 2]), "positions"),
            (lambda random: RowRandom([3, -1]), "rows: -1"),
            (lambda random: RowRandom(np.array([2**63], np.uint64)), "rows: 9223372036854775808"),
            (lambda random: RowRandom([1], positions=[-2]), "positions: -2"),
            (lambda random: RowRandom([1], seed=-1), "seed=-1"),
            (lambda random: RowRandom([1], epoch=-1), "epoch=-1"),
        ],
    )
    def test_invalid_argument_raises(self, call: Callable[[RowRandom], Any], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            call(RowRandom([1, 2]))

    @pytest.mark.parametrize("rows", [[0.5], ["a"], [True]])
    def test_rows_that_are_no_integers_raise(self, rows: Any) -> None:
        with pytest.raises(TypeError, match="rows"):
            RowRandom(rows)

    def test_zero_rows_have_no_numbers(self) -> None:
        random = RowRandom([])
        shapes = [
            random.uniform(),
            random.uniform(3),
            random.normal(3, 2),
            random.randint(2, high=5),
            random.bernoulli(1),
            random.permutation(4),
        ]
        assert [tuple(numbers.shape) for numbers in shapes] == [
            (0,), (0, 3), (0, 3, 2), (0, 2), (0, 1), (0, 4)
        ]  # fmt: skip
        assert [*random.generators()] == []


#: Rows, epochs and so on over which numbers must be independent, as sequences of (B, N) numbers.
SEQUENCES: dict[str, Callable[[], Tensor]] = {
    "rows": lambda: RowRandom(range(2**16)).uniform()[None],
    "rows of large numbers": lambda: RowRandom(range(2**40, 2**40 + 2**16)).uniform()[None],
    "every 192nd row": lambda: RowRandom(range(0, 192 * 2**14, 192), seed=9).uniform()[None],
    "elements": lambda: RowRandom(range(16)).uniform(2**12),
    "calls": lambda: over(range(2**11), calls(RowRandom(range(32)))),
    "calls of vectors": lambda: over(range(2**11), calls(RowRandom(range(16)), 2)),
    "epochs": lambda: over(range(2**11), lambda epoch: RowRandom(range(32), epoch=epoch)),
    "seeds": lambda: over(range(2**11), lambda seed: RowRandom(range(32), seed=seed)),
    "positions": lambda: RowRandom([7] * 2**16, positions=range(2**16)).uniform()[None],
    "numpy": lambda: torch.tensor([g.random() for g in RowRandom(range(2**13)).generators()])[None],
}


def calls(random: RowRandom, *shape: int) -> Callable[[int], Tensor]:
    return lambda call: random.uniform(*shape)


def over(numbers: range, draw: Callable[[int], Any]) -> Tensor:
    drawn = [draw(number) for number in numbers]
    columns = [each.uniform() if isinstance(each, RowRandom) else each for each in drawn]
    return torch.stack([column.flatten() for column in columns], dim=1)


def p_values(sequence: NDArray[np.float64]) -> dict[str, float]:
    """The probability of a result at least as far off, in each test of numbers in [0, 1).

    Args:
        sequence: Numbers of shape (B, N); those of a row follow each other.
    """
    flat, (before, after) = sequence.ravel(), (sequence[:, :-1].ravel(), sequence[:, 1:].ravel())
    found = {
        "uniform in 256 bins": stats.chisquare(np.histogram(flat, 256, (0, 1))[0]).pvalue,
        "Kolmogorov-Smirnov": stats.kstest(flat, "uniform").pvalue,
        "pairs in 16 x 16 bins": stats.chisquare(
            np.histogram2d(before, after, 16, [(0, 1), (0, 1)])[0].ravel()
        ).pvalue,
    }
    for lag in (1, 2, 4):
        pair = sequence[:, :-lag].ravel(), sequence[:, lag:].ravel()
        found[f"correlation at lag {lag}"] = stats.pearsonr(*pair).pvalue
    runs = np.signbit(np.diff(sequence, axis=1)).sum()
    # Of N independent numbers, (N - 1) / 2 are followed by a smaller one, with variance (N+1)/12.
    count = sequence.shape[0] * (sequence.shape[1] + 1) / 12
    expected = sequence.shape[0] * (sequence.shape[1] - 1) / 2
    found["ups and downs"] = 2 * stats.norm.sf(abs(runs - expected) / math.sqrt(count))
    bits = (flat * 2**24).astype(np.int64)
    for bit in range(24):
        ones = int((bits >> bit & 1).sum())
        found[f"ones in bit {bit}"] = stats.binomtest(ones, len(bits)).pvalue
    return found


class TestStatistics:
    @pytest.mark.parametrize("name", SEQUENCES)
    def test_numbers_are_uniform_and_independent(self, name: str) -> None:
        found = p_values(SEQUENCES[name]().double().numpy())
        # 310 tests, of which one may be below 1 / 310 by chance.
        assert min(found.values()) > 1e-5, min(found, key=lambda test: found[test])

    @pytest.mark.parametrize(
        "poor",
        [
            lambda index: index * 0.6180339887 % 1,  # Too even.
            lambda index: np.floor(np.random.default_rng(0).random(2**16) * 2**23) / 2**23,
            lambda index: np.repeat(np.random.default_rng(0).random(2**15), 2),
            lambda index: np.random.default_rng(0).random(2**16) ** 1.05,
        ],
    )
    def test_the_battery_notices_poor_numbers(self, poor: Any) -> None:
        assert min(p_values(poor(np.arange(2**16, dtype=np.float64))[None]).values()) < 1e-5

    @pytest.mark.parametrize("bit", [0, 5, 31, 32, 40])
    def test_one_bit_of_the_row_changes_half_of_the_bits(self, bit: int) -> None:
        rows = np.arange(2**12, dtype=np.int64)
        pair = [RowRandom(each).randint(high=2**31) for each in (rows, rows ^ (1 << bit))]
        changed = np.unpackbits((pair[0] ^ pair[1]).numpy().view(np.uint8)).sum()
        assert stats.binomtest(int(changed), 31 * 2**12).pvalue > 1e-4

    def test_distributions(self) -> None:
        random = RowRandom(range(2**13), seed=2)
        normal = random.normal(5).numpy()
        assert stats.kstest(normal.ravel(), "norm").pvalue > 1e-3
        assert stats.normaltest(normal[:, 0]).pvalue > 0.01
        assert abs(stats.pearsonr(normal[:, 0], normal[:, 1])[0]) < 0.05
        for span in (2, 7, 256):
            counts = np.bincount(random.randint(3, low=-5, high=span - 5).ravel().numpy() + 5)
            assert len(counts) == span
            assert stats.chisquare(counts).pvalue > 1e-3
        for p in (0.01, 0.3, 0.5):
            ones = int(random.bernoulli(4, p=p).sum())
            assert stats.binomtest(ones, 2**15, p).pvalue > 1e-3
        found = random.permutation(4).numpy() @ [64, 16, 4, 1]
        every = [np.dot(order, [64, 16, 4, 1]) for order in permutations(range(4))]
        counts = np.array([(found == each).sum() for each in every])
        assert counts.sum() == 2**13
        assert stats.chisquare(counts).pvalue > 1e-3
