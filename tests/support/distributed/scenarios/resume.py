"""Checkpoints of every step of one variant, and runs of several that go on from some of them."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_memmap import MemmapDataModule
from tests.support.distributed.scenarios.training import make_strategy
from tests.support.models import Points, Regression, make_trainer, weights

EPOCHS = 2


class InterruptError(Exception):
    pass


class Recorder(Regression):
    """Notes the rows of each epoch.

    Args:
        interrupt: The step that fails, counted from 0.
    """

    def __init__(self, interrupt: int | None = None) -> None:
        super().__init__()
        self.interrupt = interrupt
        self.rows: dict[int, list[list[int]]] = {epoch: [] for epoch in range(EPOCHS)}

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.global_step == self.interrupt:
            raise InterruptError
        self.rows[self.current_epoch].append(batch["row"].tolist())
        return self.step(batch, "train")


class SaveOnError(L.Callback):
    def on_exception(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir, "saved", "interrupted.ckpt"))


def fit(
    out: Path,
    rows: int,
    strategy: str,
    devices: int,
    batch_size: int,
    strategy_options: dict[str, Any] | None = None,
    accumulate: int = 1,
    checkpoint: str | None = None,
    save: bool = False,
    interrupt: int | None = None,
) -> dict[str, Any]:
    """Train, from the start or from a checkpoint, and tell which rows each epoch had."""
    data = MemmapDataModule(Points(rows), store_dir=out / "stores", batch_size=batch_size)
    saver = ModelCheckpoint(out / "saved", "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(
        out,
        strategy=make_strategy(strategy, strategy_options),
        devices=devices,
        max_epochs=EPOCHS,
        limit_val_batches=0,
        accumulate_grad_batches=accumulate,
        enable_checkpointing=save,
        callbacks=[saver] if save else [SaveOnError()],
    )
    module = Recorder(interrupt)
    trainer.fit(module, data, ckpt_path=checkpoint and out / "saved" / checkpoint)
    return {"rows": module.rows, "weights": weights(module)}


def save_and_resume(
    out: Path, rows: int, variant: dict[str, Any], steps: list[int], others: list[dict[str, Any]]
) -> dict[str, Any]:
    """Train one variant with a checkpoint of every step; go on from some, on it and on others.

    Returns:
        ``whole``, the run of the variant; by step, ``resumed``: the runs of the variant and of the
        others from there; and ``interrupted``: a run of the variant that goes on after an error
        inside of the step after the first one of them.
    """
    whole = fit(out, rows, **variant, save=True)
    with suppress(InterruptError):
        fit(out, rows, **variant, interrupt=steps[0])
    interrupted = fit(out, rows, **variant, checkpoint="interrupted.ckpt")
    resumed = {
        step: [fit(out, rows, **run, checkpoint=f"step={step}.ckpt") for run in (variant, *others)]
        for step in steps
    }
    return {"whole": whole, "resumed": resumed, "interrupted": interrupted}
