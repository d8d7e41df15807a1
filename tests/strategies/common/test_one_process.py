"""Strategies of one process, in a program that was started in several."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import Strategy
from torch import nn

from lightning_memmap import MemmapDataModule
from lightning_memmap.strategies import (
    DataParallelStrategy,
    LocalModelParallelStrategy,
    SuperBatchStrategy,
)
from tests.contract.strategies.cases import CONTRACTS, contracts_in
from tests.support.models import Points, Regression, make_trainer

pytestmark = pytest.mark.slow

TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
SRUN = {"SLURM_JOB_NAME": "train", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}


@pytest.fixture(params=contracts_in("one"))
def strategy(request: pytest.FixtureRequest) -> str | Strategy:
    return CONTRACTS[request.param].make_strategy()


@pytest.mark.parametrize(
    ("variables", "is_alone"),
    [
        ({}, True),
        ({**TORCHRUN, "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, True),
        ({**TORCHRUN, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, False),
        ({**SRUN, "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1"}, True),
        ({**SRUN, "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}, False),
        ({**SRUN, "SLURM_NTASKS": "2", "SLURM_JOB_NAME": "bash"}, True),
        ({**SRUN, "SLURM_NTASKS": "2", "SLURM_JOB_NAME": "interactive"}, True),
        # Lightning's own launchers, and those of users.
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "2"}, False),
        ({"LOCAL_RANK": "1"}, False),
    ],
    ids=str,
)
def test_program_in_several_processes_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    is_alone: bool,
    strategy: str | Strategy,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    refused = pytest.raises(ValueError, match=r"strategy=.*'memmap_superbatch_ddp'")
    with nullcontext() if is_alone else refused:
        assert make_trainer(tmp_path, strategy=strategy).world_size == 1


@pytest.mark.parametrize("strategy", contracts_in("one"), indirect=True)
def test_what_an_ended_launcher_leaves_is_no_second_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    LightningEnvironment().teardown()
    make_trainer(tmp_path, strategy=strategy)


@pytest.mark.parametrize("strategy", contracts_in("one"), indirect=True)
def test_two_nodes_are_refused(tmp_path: Path, strategy: Any) -> None:
    with pytest.raises(ValueError, match=r"num_nodes=2: memmap_\w+ .*ddp"):
        make_trainer(tmp_path, strategy=strategy, num_nodes=2)


class Normed(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


@pytest.mark.parametrize(
    ("make", "is_whole"),
    [(SuperBatchStrategy, True), (LocalModelParallelStrategy, True), (DataParallelStrategy, False)],
    ids=["super-batch", "stages", "replicas"],
)
def test_sync_batchnorm_is_refused_where_a_step_is_computed_in_parts(
    tmp_path: Path, make: Any, is_whole: bool
) -> None:
    trainer = make_trainer(tmp_path, strategy=make(), devices=2, sync_batchnorm=True)
    data = MemmapDataModule(
        Points(48), Points(16, 100), store_dir=tmp_path / "stores", batch_size=8
    )
    refused = pytest.raises(ValueError, match=r"sync_batchnorm=True with 2 replicas")
    with nullcontext() if is_whole else refused:
        trainer.fit(Normed(), data)
