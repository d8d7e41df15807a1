"""A checkpoint replaces an older one as a whole, whatever happens while it is written."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor

from lightning_memmap import MemmapDataModule
from lightning_memmap.strategies import FSDP2Strategy
from tests.support.models import Points, Regression, make_trainer
from tests.support.preloaded import python
from tests.support.processes import ROOT, TIMEOUT_S, launch, launch_any


def trained(out: Path, sharded: bool = True) -> tuple[Trainer, Regression]:
    """A Trainer that has trained, and its module."""
    strategy = FSDP2Strategy(save_distributed_checkpoint=sharded)
    trainer = make_trainer(out, strategy=strategy, devices=2, limit_train_batches=2)
    module = Regression()
    data = MemmapDataModule(Points(24), store_dir=out / "stores", batch_size=6)
    trainer.fit(module, data)
    return trainer, module


def fill(module: Regression, value: float) -> None:
    """Set all parameters to one value."""
    with torch.no_grad():
        for parameter in module.parameters():
            assert isinstance(parameter, DTensor)
            parameter.to_local().fill_(value)


def go_wrong(out: Path, how: str) -> dict[str, Any]:
    """Save once, and again to the same path, when rank 1 is killed or fails in the middle."""
    trainer, module = trained(out)
    path = out / "last.ckpt"
    fill(module, 1.0)
    trainer.save_checkpoint(path)
    fill(module, 2.0)
    write = FileSystemWriter.write_data

    def write_and_go_wrong(*args: Any, **kwargs: Any) -> Any:
        done = write(*args, **kwargs)
        if how == "kill":
            done.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(28, "no space left on device")

    if dist.get_rank() == 1:
        FileSystemWriter.write_data = write_and_go_wrong  # type: ignore[method-assign]
    try:
        trainer.save_checkpoint(path)
    except CheckpointException as error:
        return {"error": type(error).__name__}
    return {"error": ""}


def replace(out: Path) -> dict[str, Any]:
    """Save over a folder, a file, an empty folder, and a folder that is no checkpoint."""
    trainer, module = trained(out)
    (out / "empty").mkdir(exist_ok=True)
    (out / "foreign").mkdir(exist_ok=True)
    (out / "foreign" / "notes").write_text("mine")
    dist.barrier()
    for value, name in ((1.0, "folder"), (2.0, "folder"), (3.0, "empty"), (4.0, "to file")):
        fill(module, value)
        trainer.save_checkpoint(out / name)
    found = {"foreign": ""}
    try:
        trainer.save_checkpoint(out / "foreign")
    except IsADirectoryError as error:
        found["foreign"] = str(error.filename)
    trainer, module = trained(out, sharded=False)
    fill(module, 5.0)
    trainer.save_checkpoint(out / "to file")
    trainer.save_checkpoint(out / "to folder")
    trainer, module = trained(out)
    fill(module, 6.0)
    trainer.save_checkpoint(out / "to folder")
    trainer.save_checkpoint(out / "removed")
    trainer.strategy.remove_checkpoint(out / "removed")
    return found


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
def test_checkpoint_folder_is_the_old_one_where_a_rank_is_killed_or_fails(
    tmp_path: Path, how: str
) -> None:
    if how == "kill":
        outcome = launch_any(go_wrong, tmp_path, processes=2, how=how)
        assert outcome.codes != [0]
    else:
        for rank in launch(go_wrong, tmp_path, processes=2, how=how):
            assert rank["error"]
        assert not [*tmp_path.glob(".*")]
    assert values_in(tmp_path / "last.ckpt") == {1.0}


def test_folders_and_files_replace_each_other_and_no_other_folder(tmp_path: Path) -> None:
    for rank in launch(replace, tmp_path, processes=2):
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
