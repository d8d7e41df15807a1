"""What every strategy of several processes must do for Lightning: the same checks on each name.

The right values are those of Lightning's own single-device strategy with the same global batches.
Weights are compared as a user would load them: from a checkpoint into the plain module. See
`tests.distributed.scenarios.contract` for how a new name joins.
"""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memmap import open_store
from tests.datasets import in_dataset_order
from tests.distributed.harness import launch
from tests.distributed.scenarios.contract import (
    CASES,
    PROCESSES,
    RESUMED,
    TEST,
    Case,
    Runs,
    run,
)
from tests.models import Regression, Scheduled, weights
from tests.strategies.names import names_of_several_processes

# The resumed runs save nothing.
pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")


@dataclass(frozen=True)
class Done:
    """What the processes of one arm told, and where their files are."""

    name: str
    out: Path
    ranks: list[dict[str, Any]]

    def part(self, case: str) -> list[dict[str, Any]]:
        """What was told of a case, by data-parallel rank. Processes that share a rank agree."""
        by_rank: dict[int, dict[str, Any]] = {}
        for rank in self.ranks:
            of = rank[case]["sharding"]["rank"]
            assert by_rank.setdefault(of, rank[case])["seen"] == rank[case]["seen"]
        return [by_rank[rank] for rank in range(self.ranks[0][case]["sharding"]["num_replicas"])]

    def batches(self, case: str) -> dict[str, list[list[int]]]:
        """By stage, the rows of each step over all data-parallel ranks, sorted."""
        parts = [part["seen"] for part in self.part(case)]
        return {
            stage: [
                sorted(chain(*step)) for step in zip(*(part[stage] for part in parts), strict=True)
            ]
            for stage in parts[0]
        }

    def weights(self, case: str) -> torch.Tensor:
        """The weights that a case ended with, loaded in this process."""
        path = self.out / f"{case}.ckpt"
        return weights(Regression.load_from_checkpoint(path, map_location="cpu", weights_only=True))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Done:
    out = tmp_path_factory.mktemp("reference")
    return Done("auto", out, [run(out, "auto")])


@pytest.fixture(scope="module", params=names_of_several_processes())
def arm(
    request: pytest.FixtureRequest, reference: Done, tmp_path_factory: pytest.TempPathFactory
) -> Done:
    out = tmp_path_factory.mktemp(request.param)
    ranks = launch(
        "contract.run", out, processes=PROCESSES, name=request.param, others=str(reference.out)
    )
    return Done(request.param, out, ranks)


@pytest.mark.parametrize("case", CASES)
def test_fit_is_as_on_one_process(arm: Done, reference: Done, case: str) -> None:
    assert arm.batches(case) == reference.batches(case)
    (expected,) = reference.part(case)
    for found in (rank[case] for rank in arm.ranks):
        for key in ("steps", "epoch", "best"):
            assert found[key] == expected[key], key
        assert found["val_loss"] == pytest.approx(expected["val_loss"], abs=10 * CASES[case].atol)
    # By the processes that have the first layer.
    assert set().union(*(rank[case]["dtypes"] for rank in arm.ranks)) == expected["dtypes"]
    start = weights(CASES[case].make())
    end = reference.weights(case)
    assert not torch.allclose(end.float(), start, rtol=0, atol=10 * CASES[case].atol)
    torch.testing.assert_close(arm.weights(case), end, rtol=0, atol=CASES[case].atol)


def test_evaluation_is_over_all_rows_once(arm: Done, reference: Done) -> None:
    assert arm.batches("evaluation") == reference.batches("evaluation")
    (expected,) = reference.part("evaluation")
    assert set(expected["metrics"]) == {"val_loss", "test_loss"}
    for rank in arm.ranks:
        assert rank["evaluation"]["metrics"] == pytest.approx(expected["metrics"], abs=5e-5)


def test_predictions_are_of_each_row_once(arm: Done, reference: Done) -> None:
    parts = [part["predicted"] for part in arm.part("evaluation")]
    rows = torch.cat([part["row"] for part in parts])
    assert rows.sort().values.tolist() == TEST.row.tolist()
    (expected,) = reference.part("evaluation")
    values = torch.cat([part["y"] for part in parts])[rows.argsort()]
    torch.testing.assert_close(values, expected["predicted"]["y"])
    table = in_dataset_order(open_store(arm.out / "table"))
    assert table["row"].tolist() == TEST.row.tolist()
    torch.testing.assert_close(table["y"], expected["predicted"]["y"])


@pytest.mark.parametrize("step", RESUMED)
def test_resume_is_bitwise(arm: Done, step: int) -> None:
    rest = {**arm.batches("whole"), "train": arm.batches("whole")["train"][step:]}
    found = arm.batches(f"resumed {step}")
    assert found["train"] == rest["train"]
    assert torch.equal(arm.weights(f"resumed {step}"), arm.weights("whole"))


def test_checkpoint_of_one_process_is_taken_over(arm: Done, reference: Done) -> None:
    assert arm.batches("taken over")["train"] == reference.batches("whole")["train"][3:]
    end = reference.weights("whole")
    torch.testing.assert_close(arm.weights("taken over"), end, rtol=0, atol=5e-6)


def test_checkpoint_is_taken_over_by_one_process(
    arm: Done, reference: Done, tmp_path: Path
) -> None:
    checkpoint = arm.out / "saved" / "step=3.ckpt"
    case = Case(Scheduled, {"max_epochs": 2})
    found = Done("auto", tmp_path, [{"back": Runs(tmp_path, "auto").fit(case, "back", checkpoint)}])
    assert found.batches("back")["train"] == reference.batches("whole")["train"][3:]
    torch.testing.assert_close(found.weights("back"), reference.weights("whole"), rtol=0, atol=5e-6)
