"""Parity: what is found to differ, and what is no fault of a variant."""

from dataclasses import replace
from math import nan
from typing import Any

import pytest
import torch

from lightning_memmap.compare.parity import CheckedRun, check_parity, global_losses
from tests.unit.compare.reports import check_rank

EXPECTED = [11, 22, 33]
BEFORE = {"weight": torch.zeros(4), "steps": torch.tensor(0)}
AFTER = {"weight": torch.tensor([3.0, 0.0, 4.0, 0.0]), "steps": torch.tensor(3)}
CHECK = CheckedRun(
    hashes=EXPECTED,
    losses=[2.0, 1.0, 0.5],
    initial=BEFORE,
    final=AFTER,
    parameters=["weight"],
    num_parts=1,
)


def find(check: CheckedRun, tolerance: float = 1e-3) -> Any:
    return check_parity(check, CHECK, EXPECTED, tolerance)


def test_same_check_holds_with_no_difference() -> None:
    parity = find(CHECK)
    assert parity.holds is True
    assert parity.problems == []
    assert (parity.loss_difference, parity.weight_difference) == (0, 0)
    assert parity.rows == [3, 3]


def test_differences_are_relative_to_loss_and_to_the_way_of_the_weights() -> None:
    final = {**AFTER, "weight": AFTER["weight"] + torch.tensor([0.0, 0.0, 0.0, 0.01])}
    parity = find(replace(CHECK, losses=[2.0, 1.0, 0.502], final=final), 0.1)
    assert parity.loss_difference == pytest.approx(0.001)
    # The weights moved by 5, and are 0.01 apart.
    assert parity.weight_difference == pytest.approx(0.002)
    assert parity.holds is True


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hashes": [11, 22, 34]}, "rows than the global batch's from step 2"),
        ({"hashes": [11, 22]}, "rows than the global batch's from step 2"),
        ({"losses": [2.0, 1.0, 0.6]}, "losses differ by 5.0e-02; 1e-03 is allowed"),
        ({"losses": [2.0, 1.0]}, "a loss is missing"),
        ({"losses": [2.0, nan, 0.5]}, "not finite"),
        ({"initial": {"weight": torch.full((4,), 1e-9)}}, "differ before the first step"),
        ({"final": {**AFTER, "weight": AFTER["weight"] + 0.1}}, "weights differ"),
        ({"final": {**AFTER, "weight": AFTER["weight"] * nan}}, "weights differ"),
        ({"final": {"module.weight": AFTER["weight"]}}, "other names"),
    ],
)
def test_what_differs_is_named(change: dict[str, Any], words: str) -> None:
    parity = find(replace(CHECK, **change))
    assert parity.holds is False
    assert any(words in problem for problem in parity.problems)


def test_frozen_parameter_is_found_however_small_it_is() -> None:
    names = ["weight", "bias"]
    before = {**BEFORE, "bias": torch.zeros(1)}
    after = {**AFTER, "bias": torch.tensor([1e-4])}
    right = replace(CHECK, initial=before, final=after, parameters=names)
    frozen = replace(right, final={**after, "bias": torch.zeros(1)})
    for check, reference in ((frozen, right), (right, frozen)):
        parity = check_parity(check, reference, EXPECTED, 1e-3)
        assert parity.weight_difference < 1e-3
        assert parity.holds is False
        assert parity.problems[0].endswith("in the reference: bias")
    assert check_parity(right, right, EXPECTED, 1e-3).holds is True


def test_model_that_tells_no_loss_is_judged_by_its_weights() -> None:
    silent = replace(CHECK, losses=[nan, nan, nan])
    parity = check_parity(silent, silent, EXPECTED, 1e-3)
    assert parity.holds is True
    assert "no loss" in parity.notes[0]
    other = replace(silent, final={**AFTER, "weight": AFTER["weight"] + 1})
    assert check_parity(other, silent, EXPECTED, 1e-3).holds is False


def test_steps_without_a_loss_are_the_same_ones() -> None:
    skipping = replace(CHECK, losses=[2.0, nan, 0.5])
    parity = check_parity(skipping, skipping, EXPECTED, 1e-3)
    assert (parity.holds, parity.loss_difference) == (True, 0)
    assert "in 1 of 3 steps" in parity.notes[0]
    other = replace(skipping, losses=[2.0, nan, 0.6])
    assert check_parity(other, skipping, EXPECTED, 1e-3).loss_difference == pytest.approx(0.05)


def test_loss_of_a_global_batch_is_the_mean_of_its_parts() -> None:
    ranks = [
        # The first stage of a pipeline knows no loss.
        check_rank(0, losses=(nan, nan)),
        check_rank(0, losses=(1.0, 2.0)),
        check_rank(1, losses=(3.0, 6.0)),
    ]
    assert global_losses(ranks) == [2.0, 4.0]
