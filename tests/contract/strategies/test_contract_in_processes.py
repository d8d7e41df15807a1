"""What every strategy of several processes must do for Lightning: the same checks on each name.

The right values are those of Lightning's own strategy on one device with the same global batches.
Weights are compared as a user would load them: from a checkpoint into the plain module. The names
and the cases are in `tests.contract.strategies.cases`.
"""

from pathlib import Path

import pytest
import torch

from lightning_memmap import open_store
from tests.contract.strategies.cases import CASES, DEVICES, REFERENCE, TEST, Case, contracts_in
from tests.support.datasets import in_dataset_order
from tests.support.distributed.harness import launch
from tests.support.distributed.reports import Reports
from tests.support.distributed.scenarios.contract import RESUMED, Runs, run
from tests.support.models import Regression, Scheduled, weights

# The resumed runs save nothing.
pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    out = tmp_path_factory.mktemp("reference")
    return Reports(out, [run(out, REFERENCE, resumed=())], Regression)


@pytest.fixture(scope="module", params=contracts_in("several"))
def strategy(
    request: pytest.FixtureRequest, reference: Reports, tmp_path_factory: pytest.TempPathFactory
) -> Reports:
    out = tmp_path_factory.mktemp(request.param)
    ranks = launch(
        "contract.run", out, processes=DEVICES, name=request.param, others=str(reference.out)
    )
    return Reports(out, ranks, Regression)


def test_fits_are_as_on_one_device(strategy: Reports, reference: Reports) -> None:
    cases = [name for name in CASES if name in strategy.ranks[0]]
    assert len(cases) >= 5
    for case in cases:
        check_fit(strategy, reference, case)


def check_fit(strategy: Reports, reference: Reports, case: str) -> None:
    assert strategy.batches(case) == reference.batches(case), case
    (expected,) = reference.of(case)
    for found in (rank[case] for rank in strategy.ranks):
        for key in ("steps", "epoch", "best"):
            assert found[key] == expected[key], (case, key)
        assert found["val_loss"] == pytest.approx(expected["val_loss"], abs=10 * CASES[case].atol)
    # By the processes that have the first layer.
    assert set().union(*(rank[case]["dtypes"] for rank in strategy.ranks)) == expected["dtypes"]
    start = weights(CASES[case].make())
    end = reference.weights(case)
    assert not torch.allclose(end.float(), start, rtol=0, atol=10 * CASES[case].atol)
    torch.testing.assert_close(strategy.weights(case), end, rtol=0, atol=CASES[case].atol)


def test_evaluation_is_over_all_rows_once(strategy: Reports, reference: Reports) -> None:
    assert strategy.batches("evaluation") == reference.batches("evaluation")
    (expected,) = reference.of("evaluation")
    assert set(expected["metrics"]) == {"val_loss", "test_loss"}
    for rank in strategy.ranks:
        assert rank["evaluation"]["metrics"] == pytest.approx(expected["metrics"], abs=5e-5)


def test_predictions_are_of_each_row_once(strategy: Reports, reference: Reports) -> None:
    predicted = [report["predicted"] for report in strategy.of("evaluation")]
    rows = torch.cat([own["row"] for own in predicted])
    assert rows.sort().values.tolist() == TEST.row.tolist()
    (expected,) = reference.of("evaluation")
    values = torch.cat([own["y"] for own in predicted])[rows.argsort()]
    torch.testing.assert_close(values, expected["predicted"]["y"])
    table = in_dataset_order(open_store(strategy.out / "table"))
    assert table["row"].tolist() == TEST.row.tolist()
    torch.testing.assert_close(table["y"], expected["predicted"]["y"])


@pytest.mark.parametrize("step", RESUMED)
def test_resume_is_bitwise(strategy: Reports, step: int) -> None:
    rest = {**strategy.batches("whole"), "train": strategy.batches("whole")["train"][step:]}
    found = strategy.batches(f"resumed {step}")
    assert found["train"] == rest["train"]
    assert torch.equal(strategy.weights(f"resumed {step}"), strategy.weights("whole"))


def test_checkpoint_of_one_process_resumes_in_several(
    strategy: Reports, reference: Reports
) -> None:
    assert strategy.batches("taken over")["train"] == reference.batches("whole")["train"][3:]
    end = reference.weights("whole")
    torch.testing.assert_close(strategy.weights("taken over"), end, rtol=0, atol=5e-6)


def test_checkpoint_of_several_processes_resumes_in_one(
    strategy: Reports, reference: Reports, tmp_path: Path
) -> None:
    checkpoint = strategy.out / "saved" / "step=3.ckpt"
    case = Case(Scheduled, {"max_epochs": 2})
    found = Reports(
        tmp_path, [{"back": Runs(tmp_path, REFERENCE).fit(case, "back", checkpoint)}], Regression
    )
    assert found.batches("back")["train"] == reference.batches("whole")["train"][3:]
    torch.testing.assert_close(found.weights("back"), reference.weights("whole"), rtol=0, atol=5e-6)
