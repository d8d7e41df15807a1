"""Strategies of several processes on simulated GPUs, one GPU for each process.

Values go between them as `tests.programs.simulated_gpu.nccl` sends them. The strategies of this
pack run the contract of `tests.contract.strategies.test_contract_in_processes`, with the cases
that differ most from each other on devices.
"""

from pathlib import Path

import pytest
import torch

from tests.contract.strategies import test_contract_in_processes as contract
from tests.contract.strategies.cases import DEVICES, REFERENCE, contracts_in
from tests.contract.strategies.test_contract_in_processes import run
from tests.contract.strategies.test_gpus import pipelines
from tests.support.models import Regression
from tests.support.processes import launch
from tests.support.reports import Reports

#: The others differ in what Lightning does in Python, or are of one process.
CASES = ("plain", "accumulation", "clip_norm", "bfloat16", "two_optimizers")

#: Inside an epoch. After which others is no matter of devices.
RESUMED = (3,)

pytestmark = [
    pytest.mark.gpu,
    # The reference runs on the CPU.
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    out = tmp_path_factory.mktemp("reference")
    return Reports(out, [run(out, REFERENCE, cases=CASES, resumed=())], Regression)


@pytest.fixture(scope="module", params=contracts_in("several"))
def strategy(
    request: pytest.FixtureRequest, reference: Reports, tmp_path_factory: pytest.TempPathFactory
) -> Reports:
    out = tmp_path_factory.mktemp(request.param)
    options = {"cases": CASES, "resumed": RESUMED}
    options |= {"name": request.param, "others": str(reference.out)}
    ranks = launch(contract.run, out, processes=DEVICES, accelerator="gpu", **options)
    return Reports(out, ranks, Regression)


# With the fixtures of this file.
test_fits_are_as_on_one_device = contract.test_fits_are_as_on_one_device
test_evaluation_is_over_all_rows_once = contract.test_evaluation_is_over_all_rows_once
test_predictions_are_of_each_row_once = contract.test_predictions_are_of_each_row_once
test_checkpoint_of_one_process_resumes_in_several = (
    contract.test_checkpoint_of_one_process_resumes_in_several
)
test_checkpoint_of_several_processes_resumes_in_one = (
    contract.test_checkpoint_of_several_processes_resumes_in_one
)


@pytest.mark.parametrize("step", RESUMED)
def test_resume_is_bitwise(strategy: Reports, step: int) -> None:
    contract.test_resume_is_bitwise(strategy, step)


def test_nothing_is_used_too_early(strategy: Reports) -> None:
    assert [rank["reports"] for rank in strategy.ranks] == [[]] * DEVICES


def test_pipelines_wait_for_nothing_and_gather_tensor_by_tensor(tmp_path: Path) -> None:
    ranks = launch(pipelines, tmp_path, processes=2, accelerator="gpu")
    checkpoint = torch.load(tmp_path / "staged.ckpt", map_location="cpu")
    # Of both stages.
    saved = checkpoint["optimizer_states"][0]["state"]
    assert set(saved) == set(range(6))
    assert all(state["exp_avg"].any() for state in saved.values())
    for rank in ranks:
        assert rank["reports"] == []
        assert rank["waits"]
        assert not any(rank["waits"])
        # A layer has 4 MiB.
        assert rank["pickled"]
        assert max(rank["pickled"]) < 2**14
