"""A checkpoint replaces an older one as a whole, whatever happens while it is written."""

import subprocess
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.support.distributed.harness import ROOT, TIMEOUT_S, launch, launch_any
from tests.support.preloaded import python


def values_in(path: Path) -> set[float]:
    """All values of the weights in a checkpoint."""
    if path.is_dir():
        assert torch.load(path / "meta.pt", weights_only=False)["global_step"] == 2
        whole = path.with_suffix(".whole")
        dcp_to_torch_save(path, whole)
        weights = torch.load(whole, weights_only=True)["state_dict"]
        whole.unlink()
    else:
        weights = torch.load(path, weights_only=True)["state_dict"]
    assert len(weights) == 4
    return set(torch.cat([value.flatten() for value in weights.values()]).tolist())


@pytest.mark.parametrize("how", ["kill", "error"])
def test_folder_is_the_old_one_where_a_rank_did_not_write_the_new_one(
    tmp_path: Path, how: str
) -> None:
    if how == "kill":
        outcome = launch_any("saving.go_wrong", tmp_path, processes=2, how=how)
        assert outcome.codes != [0]
    else:
        for rank in launch("saving.go_wrong", tmp_path, processes=2, how=how):
            assert rank["error"]
        assert not [*tmp_path.glob(".*")]
    assert values_in(tmp_path / "last.ckpt") == {1.0}


def test_folders_and_files_replace_each_other_and_no_other_folder(tmp_path: Path) -> None:
    for rank in launch("saving.replace", tmp_path, processes=2):
        assert rank["foreign"] == str(tmp_path / "foreign")
    assert values_in(tmp_path / "folder") == {2.0}
    assert values_in(tmp_path / "empty") == {3.0}
    assert (tmp_path / "to file").is_file()
    assert values_in(tmp_path / "to file") == {5.0}
    assert (tmp_path / "to folder").is_dir()
    assert values_in(tmp_path / "to folder") == {6.0}
    assert (tmp_path / "foreign" / "notes").read_text() == "mine"
    assert not (tmp_path / "removed").exists()
    assert not [*tmp_path.glob(".*")]


def test_checkpoints_of_processes_that_are_killed_are_of_one_step() -> None:
    command = [python(), "-m", "tests.programs.reliability.checkpoints", "--kills", "8"]
    ended = subprocess.run(command, cwd=ROOT, timeout=TIMEOUT_S, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
