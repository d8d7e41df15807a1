"""Checkpoints in folders, the writing of which is killed or fails on one rank."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor

from lightning_memmap import MemmapDataModule
from lightning_memmap.strategies import FSDP2Strategy
from tests.support.models import Points, Regression, make_trainer


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
