"""``memmap_fsdp2`` reduces accumulated gradients once a step, and trains as one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.distributed.harness import launch

ATOL = 2e-6
#: Three blocks, and what is around them.
UNITS = 4


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (found,) = launch("accumulating.run", tmp_path_factory.mktemp("one"), processes=1, devices=1)
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch("accumulating.run", tmp_path_factory.mktemp("two"), processes=2, devices=2)


@pytest.mark.parametrize(
    ("case", "atol"),
    [
        ("plain", ATOL),
        ("each", ATOL),
        ("clipped", ATOL),
        ("by hand", ATOL),
        ("stopped", ATOL),
        ("validated", ATOL),
        ("interrupted", ATOL),
        # 8 bits of gradients, of weights that move by about 0.1.
        ("bf16", 5e-3),
        ("narrow", 5e-3),
    ],
)
def test_accumulated_steps_are_those_of_one_process(
    one: dict[str, Any], two: list[dict[str, Any]], case: str, atol: float
) -> None:
    assert len({number for rank in two for number in rank["plain"]["rows"]}) > 2
    for rank in two:
        torch.testing.assert_close(rank[case]["weights"], one[case]["weights"], rtol=0, atol=atol)
        for key in ("gradients", "steps"):
            assert rank[case].get(key) == one[case].get(key)
    if case in ("clipped", "by hand", "stopped"):
        assert not torch.allclose(one[case]["weights"], one["plain"]["weights"], rtol=0, atol=1e-3)


def test_gradients_are_reduced_once_a_step(two: list[dict[str, Any]]) -> None:
    for rank in two:
        for case in ("plain", "clipped", "by hand", "stopped", "validated", "bf16"):
            assert rank[case]["reductions"] == rank[case]["steps"] * UNITS, case
        # Sums of bfloat16 would lose digits.
        for case in ("each", "narrow"):
            assert rank[case]["reductions"] == rank[case]["micro-batches"] * UNITS


def test_copies_of_shards_accumulate_as_one_process(tmp_path: Path, one: dict[str, Any]) -> None:
    for rank in launch("accumulating.run", tmp_path, processes=4, devices=4):
        found = rank["hybrid"]
        torch.testing.assert_close(found["weights"], one["clipped"]["weights"], rtol=0, atol=ATOL)
        assert found["reductions"] == found["steps"] * UNITS
