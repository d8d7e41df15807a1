"""Parity: which differences are found, and which are not a variant's fault."""

import errno
import shutil
from collections.abc import Mapping
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_memmap.compare.parity import check_parity, global_losses
from lightning_memmap.compare.run_files import RankRecord
from lightning_memmap.compare.weights import digest_weights, save_weights, squared_distance
from tests.compare.reports import GLOBAL_BATCH, check_rank

EXPECTED = [11, 22, 33]
BEFORE = {"weight": torch.zeros(4), "steps": torch.tensor(0)}
AFTER = {"weight": torch.tensor([3.0, 0.0, 4.0, 0.0]), "steps": torch.tensor(3)}


class Checks:
    """Makes the records of check runs, the first of which is the reference."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(
        self,
        initial: Mapping[str, Tensor] = BEFORE,
        final: Mapping[str, Tensor] = AFTER,
        parameters: tuple[str, ...] = ("weight",),
        **values: Any,
    ) -> list[RankRecord]:
        is_reference = not self.path.exists()
        if is_reference:
            save_weights(initial, self.path)
        distance = squared_distance(final, list(parameters), self.path)
        if is_reference:
            save_weights(final, self.path)
        return [
            RankRecord(
                0, 1, 0, GLOBAL_BATCH,
                **{
                    "hashes": EXPECTED,
                    "losses": [2.0, 1.0, 0.5],
                    "parameters": parameters,
                    "initial": digest_weights(initial),
                    "final": digest_weights(final),
                    "squared_distance": distance,
                    **values,
                },
            )
        ]  # fmt: skip


@pytest.fixture
def checks(tmp_path: Path) -> Checks:
    return Checks(tmp_path / "weights.pt")


def find(check: list[RankRecord], reference: list[RankRecord], tolerance: float = 1e-3) -> Any:
    return check_parity(check, reference, EXPECTED, tolerance)


def test_reference_and_an_equal_run_have_no_difference(checks: Checks) -> None:
    reference = checks()
    for check in (reference, checks()):
        parity = find(check, reference)
        assert parity.holds is True
        assert parity.problems == []
        assert (parity.loss_difference, parity.weight_difference) == (0, 0)
        assert parity.steps_with_equal_rows == [3, 3]


def test_differences_are_relative_to_loss_and_to_the_way_of_the_weights(checks: Checks) -> None:
    reference = checks()
    final = {**AFTER, "weight": AFTER["weight"] + torch.tensor([0.0, 0.0, 0.0, 0.01])}
    parity = find(checks(losses=[2.0, 1.0, 0.502], final=final), reference, 0.1)
    assert parity.loss_difference == pytest.approx(0.001)
    # The weights moved by 5, and are 0.01 apart.
    assert parity.weight_difference == pytest.approx(0.002)
    assert parity.holds is True


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hashes": [11, 22, 34]}, "from step 2"),
        ({"hashes": [11, 22]}, "from step 2"),
        ({"losses": [2.0, 1.0, 0.6]}, "losses differ by 5.0e-02"),
        ({"losses": [2.0, 1.0]}, "a loss is missing"),
        ({"losses": [2.0, nan, 0.5]}, "not finite"),
        ({"initial": {"weight": torch.full((4,), 1e-9)}}, "before the first step"),
        ({"final": {**AFTER, "weight": AFTER["weight"] + 0.1}}, "weights differ"),
        ({"final": {**AFTER, "weight": AFTER["weight"] * nan}}, "weights differ"),
        ({"final": {"module.weight": AFTER["weight"]}}, "names"),
        ({"final": {**AFTER, "weight": AFTER["weight"][:3]}}, "shapes"),
    ],
)
def test_what_differs_is_named(checks: Checks, change: dict[str, Any], words: str) -> None:
    reference = checks()
    parity = find(checks(**change), reference)
    assert parity.holds is False
    assert any(words in problem for problem in parity.problems)


def test_reference_with_nan_in_its_weights_does_not_hold(checks: Checks) -> None:
    reference = checks(final={**AFTER, "weight": AFTER["weight"] * nan})
    assert find(reference, reference).holds is False


@pytest.mark.parametrize("frozen", ["reference", "variant"])
def test_frozen_parameter_is_found_however_small_it_is(checks: Checks, frozen: str) -> None:
    before = {**BEFORE, "bias": torch.zeros(1)}
    after = {**AFTER, "bias": torch.tensor([1e-4])}
    finals = {"reference": after, "variant": after}
    finals[frozen] = {**after, "bias": torch.zeros(1)}
    reference, variant = (
        checks(initial=before, final=final, parameters=("weight", "bias"))
        for final in finals.values()
    )
    parity = find(variant, reference)
    assert parity.weight_difference < 1e-3
    assert parity.holds is False
    assert parity.problems[0].endswith("in the reference: bias")
    assert find(reference, reference).holds is True


def test_weights_that_do_not_fit_on_the_disk_raise_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights.pt"
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=399))
    with pytest.raises(OSError, match=r"\b400\b.*\b399\b") as raised:
        save_weights({"weight": torch.ones(100)}, path)
    assert raised.value.errno == errno.ENOSPC
    assert raised.value.filename == str(path)
    assert not path.exists()
    # The content that is replaced makes room.
    save_weights({"weight": torch.zeros(90)}, path)
    save_weights({"weight": torch.ones(100)}, path)
    assert torch.load(path)["weight"].sum() == 100


def test_views_are_saved_without_the_rest_of_their_memory(tmp_path: Path) -> None:
    flat = torch.randn(10_000_000)
    save_weights({"a": flat[:10], "b": flat[20:30].t()}, tmp_path / "weights.pt")
    assert (tmp_path / "weights.pt").stat().st_size < 10_000
    weights = {"a": flat[:10], "b": flat[20:30]}
    assert squared_distance(weights, ["a", "b"], tmp_path / "weights.pt") == 0
    moved = {**weights, "b": weights["b"] + 2}
    assert squared_distance(moved, ["a"], tmp_path / "weights.pt") == 0
    assert squared_distance(moved, ["a", "b"], tmp_path / "weights.pt") == pytest.approx(40)


@pytest.mark.parametrize(
    "weight",
    [
        torch.empty(0),
        torch.tensor(True),
        torch.tensor(5),
        torch.ones(2, 3, dtype=torch.bfloat16).t(),
        torch.ones(3, dtype=torch.complex64),
        torch.full((3,), 1j).conj(),
    ],
    ids=str,
)
def test_weights_of_any_dtype_are_compared(tmp_path: Path, weight: Tensor) -> None:
    save_weights({"weight": weight}, tmp_path / "weights.pt")
    assert squared_distance({"weight": weight}, ["weight"], tmp_path / "weights.pt") == 0
    digests = digest_weights({"weight": weight})
    assert digest_weights({"weight": weight.clone()}) == digests
    if weight.numel():
        other = weight ^ True if weight.dtype == torch.bool else weight + 1
        assert digest_weights({"weight": other}) != digests
        distance = squared_distance({"weight": other}, ["weight"], tmp_path / "weights.pt")
        assert distance == pytest.approx(weight.numel())


def test_model_without_a_loss_is_compared_by_its_weights(checks: Checks) -> None:
    silent = checks(losses=[nan, nan, nan])
    parity = find(silent, silent)
    assert parity.holds is True
    assert "no loss" in parity.notes[0]
    other = checks(losses=[nan, nan, nan], final={**AFTER, "weight": AFTER["weight"] + 1})
    assert find(other, silent).holds is False


def test_steps_without_a_loss_are_the_same_ones(checks: Checks) -> None:
    skipping = checks(losses=[2.0, nan, 0.5])
    parity = find(skipping, skipping)
    assert (parity.holds, parity.loss_difference) == (True, 0)
    assert "in 1 of 3 steps" in parity.notes[0]
    (record,) = skipping
    other = [replace(record, losses=[2.0, nan, 0.6])]
    assert find(other, skipping).loss_difference == pytest.approx(0.05)


def test_loss_of_a_global_batch_is_the_mean_of_its_parts() -> None:
    ranks = [
        # The first stage of a pipeline knows no loss.
        check_rank(0, losses=(nan, nan)),
        check_rank(0, losses=(1.0, 2.0)),
        check_rank(1, losses=(3.0, 6.0)),
    ]
    assert global_losses(ranks) == [2.0, 4.0]
