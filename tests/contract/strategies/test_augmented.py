"""A row is augmented identically on 1, 2 and 4 devices, so training is that of one device."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.distributed.harness import launch
from tests.support.distributed.scenarios.augmented import ROWS, SAVE_AT, TWO, Noting, fit
from tests.support.models import weights

#: float32 sums in another order, over 12 steps of Adam.
ATOL = 2e-6

# The resumed runs save nothing.
pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A training on one device, and where it saved its middle."""
    out = tmp_path_factory.mktemp("one")
    found = fit(out, "memmap_superbatch", 1, save_at=SAVE_AT)
    assert len(found["augmented"]) == 2 * ROWS
    first, second = ([found["augmented"][epoch, row] for row in range(ROWS)] for epoch in range(2))
    assert not any(x == y for x, y in zip(first, second, strict=True))
    assert (found["weights"] - weights(Noting())).abs().max() > 0.1
    return out, found


@pytest.fixture(scope="module")
def two(
    tmp_path_factory: pytest.TempPathFactory, one: tuple[Path, dict[str, Any]]
) -> tuple[Path, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("two")
    middle = str(one[0] / "middle.ckpt")
    return out, launch("augmented.fit_two", out, processes=2, middle=middle)


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("on_super_batch", [False, True])
def test_weights_on_many_devices_are_bitwise_those_of_one(
    tmp_path: Path, one: tuple[Path, dict[str, Any]], devices: int, on_super_batch: bool
) -> None:
    found = fit(tmp_path, "memmap_superbatch", devices, on_super_batch=on_super_batch)
    assert found["augmented"] == one[1]["augmented"]
    assert torch.equal(found["weights"], one[1]["weights"])


@pytest.mark.parametrize("devices", [2, 4])
def test_weights_of_replicas_are_those_of_one_device(
    tmp_path: Path, one: tuple[Path, dict[str, Any]], devices: int
) -> None:
    found = fit(tmp_path, "memmap_dp", devices)
    assert found["augmented"] == one[1]["augmented"]
    torch.testing.assert_close(found["weights"], one[1]["weights"], rtol=0, atol=ATOL)


def assert_as_one(ranks: list[dict[str, Any]], expected: dict[str, Any], after: int = 0) -> None:
    joined = dict[Any, Any]()
    for rank in ranks:
        assert not joined.keys() & rank["augmented"].keys()
        joined |= rank["augmented"]
        torch.testing.assert_close(rank["weights"], expected["weights"], rtol=0, atol=ATOL)
    assert joined.items() <= expected["augmented"].items()
    assert len(joined) == 2 * ROWS - after


@pytest.mark.parametrize("name", TWO)
def test_weights_of_two_processes_are_those_of_one_device(
    one: tuple[Path, dict[str, Any]], two: tuple[Path, list[dict[str, Any]]], name: str
) -> None:
    assert_as_one([rank[name] for rank in two[1]], one[1])


def test_run_resumed_inside_an_epoch_on_another_number_of_devices_goes_on(
    tmp_path: Path, one: tuple[Path, dict[str, Any]], two: tuple[Path, list[dict[str, Any]]]
) -> None:
    out, expected = one
    seen = SAVE_AT * 12
    assert_as_one([rank["resumed"] for rank in two[1]], expected, seen)
    for middle, strategy, devices in (
        (out / "middle.ckpt", "memmap_superbatch", 4),
        (two[0] / "middle.ckpt", "memmap_superbatch", 2),
        (two[0] / "middle.ckpt", "memmap_dp", 2),
    ):
        found = fit(tmp_path, strategy, devices, checkpoint=middle)
        assert_as_one([found], expected, seen)
