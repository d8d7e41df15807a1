"""The parity check of a comparison under the strategies of several processes."""

from pathlib import Path

import pytest

from tests.compare.runs import STEPS, OfItsDevice, check_run, check_runs_parity, result_of
from tests.support.distributed.harness import launch
from tests.support.distributed.scenarios.comparing import STRATEGIES, TRANSFORMS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("quick_runs"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
]


def test_strategies_of_several_processes_are_found_to_agree(tmp_path: Path) -> None:
    auto = {}
    for name, transform in (*TRANSFORMS.items(), ("fault", OfItsDevice())):
        (tmp_path / name).mkdir()
        auto[name] = check_run(
            tmp_path / name, "auto", transform=transform, store_dir=tmp_path / "stores"
        )
    launch("comparing.check_all", tmp_path, processes=2)
    for name in TRANSFORMS:
        checks = {
            strategy: result_of(tmp_path / name / f"{strategy}-check") for strategy in STRATEGIES
        }
        for strategy, parity in check_runs_parity(tmp_path, {"auto": auto[name], **checks}).items():
            assert (strategy, parity.problems, parity.notes) == (strategy, [], [])
            assert parity.holds is True
            assert parity.rows == [STEPS, STEPS]
        assert [len(check.ranks) for check in checks.values()] == [2] * len(checks)
        # By default a pipeline of two processes has four micro-batches.
        parts = {strategy: check.ranks[0].num_parts for strategy, check in checks.items()}
        assert parts == {**dict.fromkeys(STRATEGIES, 1), "memmap_pipeline": 4}
    fault = result_of(tmp_path / "fault" / "ddp-check")
    parity = check_runs_parity(tmp_path, {"auto": auto["fault"], "ddp": fault})["ddp"]
    assert parity.holds is False
    # The rows are right. What is made of them is not.
    assert parity.rows == [STEPS, STEPS]
    assert any("losses differ" in problem for problem in parity.problems)
