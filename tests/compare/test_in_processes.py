"""The parity check of a comparison under the strategies of several processes."""

import gc
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.compare.runs import STEPS, Double, OfItsDevice, check_run, check_runs_parity, result_of
from tests.support.models import Regression
from tests.support.processes import launch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("quick_runs"),
]


STRATEGIES = ("ddp", "memmap_superbatch_ddp", "memmap_fsdp2", "memmap_pipeline", "model_parallel")
TRANSFORMS: dict[str, nn.Module | None] = {"plain": None, "transform": Double()}


class Sharded(Regression):
    """A module that shards itself, as Lightning's ModelParallelStrategy wants it."""

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


MODULES: dict[str, type[Regression]] = {"model_parallel": Sharded}


def check_all(out: Path) -> dict[str, Any]:
    """One run for each strategy, with and without a transform, and one with a transform that does
    something else in each process; `tests.compare.runs` reads what they leave in ``out``."""
    for name, transform in TRANSFORMS.items():
        check_each(out / name, transform=transform, store_dir=out / "stores")
    check_run(out / "fault", "ddp", transform=OfItsDevice(), store_dir=out / "stores")
    return {}


def check_each(out: Path, **options: Any) -> dict[str, Any]:
    """One run for each strategy."""
    # Runs look for the parameters among all objects of a process.
    gc.freeze()
    for strategy in STRATEGIES:
        trainer = {"strategy": _make(strategy)}
        check_run(out, strategy, MODULES.get(strategy, Regression), trainer=trainer, **options)
    return {}


def _make(name: str) -> Any:
    """A strategy as two processes; a config would name the class of some."""
    if name == "model_parallel":
        return ModelParallelStrategy(2, 1, save_distributed_checkpoint=False)
    return name


def test_strategies_of_several_processes_are_found_to_agree(tmp_path: Path) -> None:
    auto = {}
    for name, transform in (*TRANSFORMS.items(), ("fault", OfItsDevice())):
        (tmp_path / name).mkdir()
        auto[name] = check_run(
            tmp_path / name, "auto", transform=transform, store_dir=tmp_path / "stores"
        )
    launch(check_all, tmp_path, processes=2)
    for name in TRANSFORMS:
        checks = {
            strategy: result_of(tmp_path / name / f"{strategy}-check") for strategy in STRATEGIES
        }
        for strategy, parity in check_runs_parity(tmp_path, {"auto": auto[name], **checks}).items():
            assert (strategy, parity.problems, parity.notes) == (strategy, [], [])
            assert parity.holds is True
            assert parity.steps_with_equal_rows == [STEPS, STEPS]
        assert [len(check.ranks) for check in checks.values()] == [2] * len(checks)
        # By default a pipeline of two processes has four micro-batches.
        parts = {
            strategy: check.ranks[0].num_separate_batches for strategy, check in checks.items()
        }
        assert parts == {**dict.fromkeys(STRATEGIES, 1), "memmap_pipeline": 4}
    fault = result_of(tmp_path / "fault" / "ddp-check")
    parity = check_runs_parity(tmp_path, {"auto": auto["fault"], "ddp": fault})["ddp"]
    assert parity.holds is False
    # The rows are right. What is made of them is not.
    assert parity.steps_with_equal_rows == [STEPS, STEPS]
    assert any("losses differ" in problem for problem in parity.problems)
