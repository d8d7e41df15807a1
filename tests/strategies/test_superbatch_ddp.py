"""How the devices of `SuperBatchDDPStrategy` are divided into groups."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memmap.strategies import SuperBatchDDPStrategy
from tests.support.models import make_trainer


def test_every_device_trains_by_default(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, strategy="memmap_superbatch_ddp", devices=8, num_nodes=2)
    strategy: Any = trainer.strategy
    assert (strategy.num_processes, trainer.world_size) == (8, 16)
    assert len(strategy.data_devices) == 1


def test_devices_are_divided_into_groups(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, strategy=SuperBatchDDPStrategy(2), devices=6, num_nodes=3)
    strategy: Any = trainer.strategy
    assert (strategy.num_processes, trainer.world_size) == (3, 9)
    assert strategy.data_devices == (torch.device("cpu"),) * 2
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 9, "rank": 0}


def test_groups_of_gpus_belong_to_local_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = SuperBatchDDPStrategy(3, root_holds_data=False)
    strategy.parallel_devices = [torch.device("cuda", index) for index in range(6)]
    groups = []
    for local_rank in range(2):
        monkeypatch.setattr(SuperBatchDDPStrategy, "local_rank", local_rank)
        groups.append([str(strategy.root_device), *map(str, strategy.data_devices)])
    assert groups == [["cuda:0", "cuda:1", "cuda:2"], ["cuda:3", "cuda:4", "cuda:5"]]


@pytest.mark.parametrize(
    ("options", "devices", "words"),
    [
        ({"data_devices_per_process": 0}, 2, "data_devices_per_process=0"),
        ({"data_devices_per_process": 3}, 4, "Trainer(devices=4)"),
        ({"data_devices_per_process": 1, "root_holds_data": False}, 2, "root_holds_data=False"),
    ],
)
def test_groups_that_cannot_be_are_refused(
    tmp_path: Path, options: dict[str, Any], devices: int, words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        make_trainer(tmp_path, strategy=SuperBatchDDPStrategy(**options), devices=devices)
