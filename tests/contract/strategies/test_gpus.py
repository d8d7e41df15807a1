"""What two processes do on two GPUs, real or simulated, that they do not do on a CPU.

The strategies of this pack run the contract of `test_contract_in_processes` on them, too.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compare.runs import STEPS, check_runs_parity, result_of
from tests.contract.strategies import test_tensor_parallel as tensor_parallel
from tests.contract.strategies.cases import DEVICES
from tests.support.distributed.harness import launch
from tests.support.distributed.scenarios import comparing
from tests.support.distributed.scenarios.tensor_parallel import fit_and_resume
from tests.support.models import IS_SIMULATED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < DEVICES, reason="needs two CUDA devices"),
    # The resumed runs save nothing.
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("one")
    return out, fit_and_resume(out)


#: Lightning wraps the module in a stream of its own, for which the first forward and backward pass
#: do not wait: they read weights that DDP's broadcast may still be writing there.
RACE_OF_LIGHTNING_DDP = re.compile(
    r"race: aten::(?P<reads>\w+)\.out reads on (?P<device>cuda:\d)/stream 0 without waiting"
    r" what copy_ on (?P=device)/stream [1-9]\d* writes"
)
#: By strategy, the operators that race. There is no other report, and none on real GPUs.
RACING = {"ddp": {"addmm", "mm"} if IS_SIMULATED else set(), "fsdp": set()}


@pytest.mark.parametrize("name", RACING)
def test_strategy_of_lightning_trains_as_one_process(
    tmp_path: Path, one: tuple[Path, dict[str, Any]], name: str
) -> None:
    ranks = tensor_parallel.check(tmp_path, one, name, 2, 1, accelerator="gpu")
    for rank in ranks:
        known = [RACE_OF_LIGHTNING_DDP.match(report) for report in rank["reports"]]
        assert all(known), rank["reports"]
        assert {match["reads"] for match in known if match} == RACING[name]


def test_strategies_on_gpus_are_found_to_agree(tmp_path: Path) -> None:
    path = tmp_path / "runs"
    path.mkdir()
    launch("comparing.check_each", path, processes=2, accelerator="gpu")
    checks = {name: result_of(path / f"{name}-check") for name in comparing.STRATEGIES}
    for name, parity in check_runs_parity(path, checks).items():
        assert (name, parity.problems) == (name, [])
        assert parity.rows == [STEPS, STEPS]


def test_tensor_parallel_of_lightning_trains_as_one_process(
    tmp_path: Path, one: tuple[Path, dict[str, Any]]
) -> None:
    tensor_parallel.check(tmp_path, one, "model_parallel", 1, 2, accelerator="gpu")


def test_offloading_keeps_the_state_of_optimizers_in_host_memory(tmp_path: Path) -> None:
    ranks = launch("on_gpus.offload", tmp_path, processes=2, accelerator="gpu")
    whole, resumed = (torch.load(tmp_path / f"{name}.ckpt") for name in ("whole", "resumed"))
    for key, value in whole["state_dict"].items():
        assert torch.equal(value, resumed["state_dict"][key])
    for rank in ranks:
        assert rank["backend"] == "cpu:gloo,cuda:nccl"
        # The optimizer's state stays in the host's memory.
        assert rank["resumed"] == 0


def test_tensors_of_16_bits_are_sent(tmp_path: Path) -> None:
    for rank in launch("on_gpus.short", tmp_path, processes=2, accelerator="gpu"):
        for name in ("ddp", "fsdp2", "pipelines", "stages"):
            table, dtypes = rank[name]
            assert table is None or table.tolist() == list(range(7))
            assert set(dtypes) == {torch.int16}
