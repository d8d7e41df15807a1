"""Runs of items: each is found in memory, however the runs lie."""

import numpy as np
import pytest

from lightning_memmap.integers import Runs


@pytest.mark.parametrize(
    "begins",
    [[7], [0, 1, 2, 3], [0, 10**6, 10**9], [5, 6, 7, 8, 9, 10, 11, 12, 10**9], [*range(0, 999, 7)]],
    ids=["one", "dense", "wide", "crowded", "even"],
)
def test_items_are_where_their_run_is(begins: list[int]) -> None:
    first, last = np.array(begins), np.array([*begins[1:], begins[-1] + 9])
    places = np.random.default_rng(0).permutation(len(begins)) * 10**6
    items = np.concatenate([first, last - 1, (first + last) // 2])
    expected = [
        item - begin + place
        for item in items
        for begin, end, place in zip(begins, last, places, strict=True)
        if begin <= item < end
    ]
    assert Runs(first, places - first).at(items).tolist() == expected
