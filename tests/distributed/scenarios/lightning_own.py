"""Lightning's own strategies of several processes, with nothing of this pack but the data."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn

from lightning_memmap import MemmapDataModule
from tests.models import Points, Regression, make_trainer

#: They divide evenly: Lightning weighs processes, not rows.
ROWS, GLOBAL_BATCH = 160, 16
#: Inside the second epoch of ten steps.
RESUMED = 13


def fit_and_resume(out: Path, name: str, num_processes: int) -> dict[str, Any]:
    """Train for two epochs, and once more from a step inside the second.

    Args:
        out: Where the weights go, as ``whole.ckpt`` and ``resumed.ckpt``.
        name: Of the strategy.
        num_processes: Its processes.
    """

    def make(**options: Any) -> tuple[L.Trainer, MemmapDataModule]:
        strategy: Any = name
        if name == "fsdp":
            strategy = FSDPStrategy(auto_wrap_policy={nn.Linear}, state_dict_type="full")
        data = MemmapDataModule(
            Points(ROWS), store_dir=out / "stores", batch_size=GLOBAL_BATCH // num_processes
        )
        options |= {"devices": num_processes, "max_epochs": 2, "limit_val_batches": 0}
        return make_trainer(out, strategy=strategy, **options), data

    saver = ModelCheckpoint(out / "saved", "{step}", every_n_train_steps=RESUMED)
    trainer, data = make(callbacks=[saver], enable_checkpointing=True)
    module = Regression()
    trainer.fit(module, data)
    trainer.save_checkpoint(out / "whole.ckpt")
    trainer, data = make()
    resumed = Regression()
    checkpoint = out / "saved" / f"step={RESUMED}.ckpt"
    trainer.fit(resumed, data, ckpt_path=checkpoint, weights_only=False)
    trainer.save_checkpoint(out / "resumed.ckpt")
    return {"seen": module.seen, "resumed": resumed.seen}
