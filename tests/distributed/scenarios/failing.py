"""A training in which a rank dies, and one in one process after one in two."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_memmap import MemmapDataModule
from tests.models import Points, Regression, make_trainer


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
