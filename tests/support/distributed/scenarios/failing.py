"""A training in which a rank dies, and one in one process after one in two."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_memmap import MemmapDataModule
from tests.support.models import Points, Regression, make_trainer


class Dying(Regression):
    """One rank kills itself in the middle of an epoch, and leaves a mark."""

    def __init__(self, rank: int, mark: Path) -> None:
        super().__init__()
        self.rank = rank
        self.mark = mark

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if batch_idx == 3 and self.global_rank == self.rank:
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def die(out: Path, rank: int, strategy: str) -> dict[str, Any]:
    """Train until a rank dies, which is before the end of the first epoch."""
    data = MemmapDataModule(Points(160), store_dir=out / "stores", batch_size=8)
    trainer = make_trainer(out, strategy=strategy, devices=2, max_epochs=1000)
    trainer.fit(Dying(rank, out / "died"), data)
    return {}


class Spoilt:
    """A transform that fails on one rank, in the middle of an epoch."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls = 0

    def __call__(self, batch: Any) -> Any:
        self.calls += 1
        if self.calls == 4 and int(os.environ.get("LOCAL_RANK", "0")) == self.rank:
            raise KeyError("row 77")
        return batch


def fail(out: Path, rank: int, strategy: str) -> dict[str, Any]:
    """Train until a rank fails, and note the error of each."""
    data = MemmapDataModule(
        Points(160), store_dir=out / "stores", batch_size=8, transform=Spoilt(rank)
    )
    trainer = make_trainer(out, strategy=strategy, devices=2, max_epochs=1000)
    try:
        trainer.fit(Regression(), data)
    except Exception as error:
        (out / f"error{trainer.global_rank}").write_text(f"{type(error).__name__}: {error}")
    # Without waiting for the others.
    os._exit(1)


def go_on_alone(out: Path, strategy: str) -> dict[str, Any]:
    """Train in two processes, and then in the first of them, once their group is left."""
    data = MemmapDataModule(Points(40), store_dir=out / "stores", batch_size=4)
    make_trainer(out, strategy="memmap_superbatch_ddp", devices=2).fit(Regression(), data)
    rank = dist.get_rank()
    for name, devices in ((strategy, 2), ("memmap_superbatch_ddp", 1)):
        try:
            make_trainer(out, strategy=name, devices=devices)
        except ValueError as error:
            (out / f"refused {name} {rank}").write_text(str(error))
    dist.destroy_process_group()
    if rank:
        sys.exit(0)
    make_trainer(out, strategy=strategy, devices=2).fit(Regression(), data.with_options())
    return {}
