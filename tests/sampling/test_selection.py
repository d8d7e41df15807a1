"""Selections: subsets, random splits and folds are index views, disjoint and complete."""

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_memmap.sampling import Holdout, KFold, Parts, RandomSplit, Selection, Subset
from lightning_memmap.sampling.rows import Shards, StoreRows
from tests.sampling.test_weighted import Table


def rows_of(selection: Selection, table: Table, split: str = "train", member: int = 0) -> list[int]:
    return list(selection.subset(split, member, table).tolist())


LABELS = st.lists(st.integers(0, 4), min_size=4, max_size=120)


@given(LABELS, st.integers(2, 4), st.booleans(), st.booleans(), st.integers(0, 2**63 - 1))
def test_folds_hold_each_row_out_once_and_their_shares_of_each_value(
    labels: list[int], num_folds: int, shuffle: bool, stratify: bool, seed: int
) -> None:
    table = Table(len(labels), label=labels)
    folds = KFold(num_folds, shuffle=shuffle, stratify="label" if stratify else None, seed=seed)
    held_out = [rows_of(folds, table, "val", fold) for fold in range(num_folds)]
    for fold, rows in enumerate(held_out):
        trained = rows_of(folds, table, "train", fold)
        assert sorted(trained + rows) == list(range(len(labels)))
        # In dataset order, so that validation lines up with it.
        assert rows == sorted(rows)
    sizes = [len(rows) for rows in held_out]
    assert max(sizes) - min(sizes) <= 1
    assert sorted(row for rows in held_out for row in rows) == list(range(len(labels)))
    if stratify:
        counts = [Counter(labels[row] for row in rows) for rows in held_out]
        for label in set(labels):
            of_label = [count[label] for count in counts]
            assert max(of_label) - min(of_label) <= 1


@given(LABELS, st.floats(0.01, 0.7) | st.integers(1, 3), st.booleans(), st.integers(0, 99))
def test_random_split_is_disjoint_complete_and_stratified(
    labels: list[int], validation: float, stratify: bool, seed: int
) -> None:
    table = Table(len(labels), label=labels)
    split = RandomSplit(validation, stratify="label" if stratify else None, seed=seed)
    trained, held_out = rows_of(split, table, "train"), rows_of(split, table, "val")
    assert sorted(trained + held_out) == list(range(len(labels)))
    is_share = isinstance(validation, float)
    count = max(1, round(validation * len(labels))) if is_share else validation
    assert len(held_out) == count
    if stratify:
        found = Counter(labels[row] for row in held_out)
        for label, size in Counter(labels).items():
            assert abs(found[label] - size * count / len(labels)) < 1
    assert rows_of(split, table, "val") == held_out


def test_rows_that_are_held_out_depend_on_the_seed_alone() -> None:
    table = Table(500)
    found = [rows_of(split, table, "val") for split in (RandomSplit(50), RandomSplit(0.1, seed=1))]
    assert [len(rows) for rows in found] == [50, 50]
    assert len(set(found[0]) & set(found[1])) < 25
    # Checkpoints stand for these rows: they must never change.
    assert rows_of(RandomSplit(3, seed=5), Table(1000), "val") == GOLDEN_SPLIT
    assert rows_of(KFold(200, seed=5), Table(1000), "val", 7) == GOLDEN_FOLD


GOLDEN_SPLIT, GOLDEN_FOLD = [158, 234, 330], [200, 265, 551, 730, 930]


@example([0, 1], 0.75, 0)
@given(
    st.lists(st.integers(0, 9), min_size=2, max_size=60).filter(lambda found: len({*found}) > 1),
    st.floats(0.05, 0.9),
    st.integers(0, 9),
)
def test_groups_stay_whole(patients: list[int], share: float, seed: int) -> None:
    table = Table(len(patients), patient=patients)
    split = RandomSplit(share, group="patient", seed=seed)
    trained, held_out = rows_of(split, table, "train"), rows_of(split, table, "val")
    assert sorted(trained + held_out) == list(range(len(patients)))
    assert not {patients[row] for row in trained} & {patients[row] for row in held_out}
    # As near to the share as one group allows.
    largest = max(patients.count(patient) for patient in patients)
    assert abs(len(held_out) - max(1, round(share * len(patients)))) <= largest


@given(
    st.lists(st.integers(0, 9), min_size=4, max_size=90).filter(lambda found: len({*found}) > 3),
    st.integers(2, 4),
    st.booleans(),
    st.integers(0, 9),
)
def test_folds_hold_each_group_out_once(
    patients: list[int], num_folds: int, shuffle: bool, seed: int
) -> None:
    table = Table(len(patients), patient=patients)
    folds = KFold(num_folds, shuffle=shuffle, group="patient", seed=seed)
    held_out = [rows_of(folds, table, "val", fold) for fold in range(num_folds)]
    found = [{patients[row] for row in rows} for rows in held_out]
    assert sum(map(len, found)) == len({*patients})
    assert sorted(row for rows in held_out for row in rows) == list(range(len(patients)))
    for fold, rows in enumerate(held_out):
        assert sorted(rows_of(folds, table, "train", fold) + rows) == list(range(len(patients)))
    # As even as the largest group allows.
    sizes = [len(rows) for rows in held_out]
    assert max(sizes) - min(sizes) <= max(Counter(patients).values())


def test_folds_of_groups_depend_on_the_seed() -> None:
    table = Table(60, patient=np.arange(60) % 20)
    found = {tuple(rows_of(KFold(4, group="patient", seed=s), table, "val")) for s in range(9)}
    assert len(found) == 9


def test_groups_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ValueError, match="group='patient'"):
        rows_of(RandomSplit(0.5, group="patient"), Table(3, patient=[1, 1, 1]))
    with pytest.raises(ValueError, match="group='patient'"):
        rows_of(KFold(3, group="patient"), Table(4, patient=[1, 2, 1, 2]), "val", 2)
    for make in (RandomSplit, partial(KFold, 3)):
        with pytest.raises(ValueError, match="stratify='a' and group='b'"):
            make(stratify="a", group="b")


@pytest.mark.parametrize(
    "holdout",
    [
        Holdout([7, 2]),
        Holdout(np.arange(10) % 5 == 2),
        Holdout(field="label", values=[2]),
        Holdout(field="label", where=lambda label: label == 2),
    ],
    ids=["numbers", "mask", "values", "where"],
)
def test_rows_that_are_named_are_validated_on_and_no_others(holdout: Holdout) -> None:
    table = Table(10, label=np.arange(10) % 5)
    assert rows_of(holdout, table, "val") == [2, 7]
    assert rows_of(holdout, table, "train") == [0, 1, 3, 4, 5, 6, 8, 9]
    assert holdout.stored_split("val") == "train"


def test_folds_in_order_are_every_so_manieth_row() -> None:
    table = Table(20)
    assert rows_of(KFold(3, shuffle=False), table, "val", 1) == [1, 4, 7, 10, 13, 16, 19]
    assert rows_of(Parts(4), table, member=3) == [3, 7, 11, 15, 19]


@pytest.mark.parametrize(
    ("subset", "expected"),
    [
        (Subset([5, 2, 9]), [5, 2, 9]),
        (Subset(range(3)), [0, 1, 2]),
        (Subset(torch.tensor([7, 1])), [7, 1]),
        (Subset(np.arange(10) > 7), [8, 9]),
        (Subset(torch.arange(10) < 2), [0, 1]),
        (Subset(field="label", values=[2]), [2, 5, 8]),
        (Subset(field="label", where=lambda label: label == 0), [0, 3, 6, 9]),
    ],
)
def test_subset_has_the_rows_that_it_names(subset: Subset, expected: list[int]) -> None:
    assert rows_of(subset, Table(10, label=np.arange(10) % 3)) == expected


@pytest.mark.parametrize(
    "where",
    [
        lambda label: np.flatnonzero(label == 0),
        lambda label: (label == 0).astype(int),
        lambda label: label[:3] == 0,
        lambda label: True,
    ],
    ids=["numbers", "0 and 1", "shape", "scalar"],
)
@pytest.mark.parametrize("kind", [Subset, Holdout])
def test_function_that_returns_no_mask_is_refused(kind: Any, where: Any) -> None:
    with pytest.raises(TypeError, match="where="):
        rows_of(kind(field="label", where=where), Table(10, label=np.arange(10) % 3))


def test_subset_of_other_rows_has_another_identity() -> None:
    table = Table(10)
    found = [Subset(r).subset("train", 0, table) for r in ([1, 2], (1, 2), [2, 1])]
    one, same, other = (StoreRows.of(Shards(10, 2), rows) for rows in found)
    assert one == same != other
    assert one.identity == same.identity != other.identity


@pytest.mark.parametrize(
    ("given_rows", "words"),
    [
        ([1, 10], "subset of train: row 10 .*9"),
        ([-1], "subset of train: row -1 "),
        ([3, 4, 3], "subset of train: row 3 "),
        ([], "subset of train: "),
        ([True] * 9, "a mask of 9 entries for 10 rows"),
        ([False] * 10, "subset of train: "),
        ([[1]], r"an array of shape \(1, 1\)"),
        ([0.5], "an array of float64"),
    ],
)
def test_rows_that_cannot_be_are_refused(given_rows: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        Subset(given_rows).subset("train", 0, Table(10))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Subset(), r"Subset\(\)"),
        (lambda: Subset([1], field="label"), r"Subset\(rows=\[1\], field='label'\)"),
        (lambda: Subset(field="label"), r"Subset\(field='label'\)"),
        (lambda: Subset(field="a", values=[1], where=bool), r"field='a', values=\[1\], where="),
        (lambda: Subset([1], values=[1]), r"Subset\(rows=\[1\], values=\[1\]\)"),
        (lambda: KFold(1), "num_folds=1:"),
        (lambda: KFold(2.0), "num_folds=2.0"),
        (lambda: Parts(0), "num_parts=0:"),
        (lambda: RandomSplit(0), "validation=0:"),
        (lambda: RandomSplit(1.5), r"validation=1\.5:"),
        (lambda: RandomSplit("a"), "validation='a'"),
        (lambda: RandomSplit(seed=-1), "seed=-1"),
    ],
)
def test_selection_that_cannot_be_is_refused(make: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        make()


def test_split_that_leaves_nothing_to_train_on_is_refused() -> None:
    with pytest.raises(ValueError, match="validation=10:"):
        RandomSplit(10).subset("train", 0, Table(10))
    for member in (0, 4):
        with pytest.raises(ValueError, match="num_folds=5:"):
            KFold(5).subset("val", member, Table(3))
