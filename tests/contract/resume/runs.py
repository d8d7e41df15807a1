"""Runs that are ended and resumed, and what a resumed run must have in common with a whole one."""

from pathlib import Path
from typing import Any, TypeVar

import torch

from lightning_memmap import MemmapDataModule
from tests.support.models import Points, Regression, make_trainer, weights
from tests.support.versions import weights_only

Module = TypeVar("Module", bound=Regression)


def make_data(path: Path, num_steps: int, **options: Any) -> MemmapDataModule:
    """Epochs of steps of eight rows on two devices."""
    defaults: dict[str, Any] = {"batch_size": 4, "num_shards": 4}
    return MemmapDataModule(
        Points(8 * num_steps), store_dir=path / "stores", **{**defaults, **options}
    )


def fit(
    module: Module, data: MemmapDataModule, checkpoint: Path | None = None, **options: Any
) -> Module:
    """Train, from the start or from a checkpoint. Checkpoints are saved where callbacks do so."""
    defaults: dict[str, Any] = {
        "strategy": "memmap_superbatch",
        "devices": 2,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": bool(options.get("callbacks")),
    }
    trainer = make_trainer(data.store_dir.parent, **{**defaults, **options})
    trainer.fit(module, data, ckpt_path=checkpoint, **weights_only(checkpoint is not None))
    return module


def assert_continues(whole: Regression, resumed: Regression, num_done: int) -> None:
    """A resumed run has the last steps of the whole one, and ends as it does."""
    assert resumed.seen.get("train", []) == whole.seen["train"][num_done:]
    assert_ends_alike(whole, resumed)


def assert_ends_alike(whole: Regression, resumed: Regression) -> None:
    assert torch.equal(weights(resumed), weights(whole))
    assert resumed.trainer.global_step == whole.trainer.global_step
