"""An existing data module is converted on every rank, and its data prepared on one."""

from pathlib import Path

import pytest
import torch

from tests.support.distributed.harness import launch

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("strategy", ["ddp", "memmap_superbatch_ddp"])
def test_converted_data_module_trains_as_one_written_by_hand(tmp_path: Path, strategy: str) -> None:
    ranks = launch("converting.fit", tmp_path, processes=2, strategy=strategy)
    for rank, result in enumerate(ranks):
        assert result["calls"] == ["prepare_data"] * (rank == 0) + ["setup fit"]
        assert result["made"]["seen"] == result["by_hand"]["seen"]
        assert torch.equal(result["made"]["weights"], result["by_hand"]["weights"])
        assert torch.equal(result["made"]["weights"], ranks[0]["made"]["weights"])
    rows = [row for rank in ranks for step in rank["made"]["seen"]["train"][:4] for row in step]
    assert sorted(rows) == list(range(64))


def test_set_up_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    ranks = launch("converting.fail", tmp_path, processes=2, fails_on=1)
    assert all("no such dataset" in rank["error"] for rank in ranks)
