"""Check runs of a comparison under each strategy of several processes, one after the other."""

import gc
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.compare.runs import Double, OfItsDevice, check_run
from tests.support.models import Regression

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
