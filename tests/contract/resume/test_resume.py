"""A checkpoint from inside an epoch goes on with the next unseen row, on any device count."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_memmap import MemmapDataModule
from tests.support.models import Points, Regression, make_trainer, weights
from tests.support.versions import weights_only


class Validated(Regression):
    """Notes what it does in order: rows that it trains on, rows that it validates, the loss over
    all rows of a validation. Saves checkpoints inside validation steps, where it is told to."""

    def __init__(self, saved: Path | None = None) -> None:
        super().__init__()
        self.saved = saved
        self.events: list[tuple[str, Any]] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.events.append(("train", batch["row"].tolist()))
        return self.step(batch, "train")

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.events.append(("val", batch["row"].tolist()))
        if self.saved is not None:
            done = len(self.events)
            self.trainer.save_checkpoint(self.saved / f"inside {done:03} {batch_idx}.ckpt")
        self.step(batch, "val")

    def on_validation_epoch_end(self) -> None:
        self.events.append(("loss", self.trainer.callback_metrics["val_loss"].item()))


class SaveBetween(L.Callback):
    """Saves a checkpoint after each step of a validation."""

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        module: Any = trainer.lightning_module
        trainer.save_checkpoint(module.saved / f"between {len(module.events):03}.ckpt")


def fit_with_validations(
    path: Path, module: Validated, checkpoint: Path | None = None, **options: Any
) -> Validated:
    data = MemmapDataModule(Points(96), Points(40, 1000), store_dir=path / "stores", batch_size=8)
    trainer = make_trainer(path, strategy="memmap_superbatch", devices=2, max_epochs=2, **options)
    trainer.fit(module, data, ckpt_path=checkpoint, **weights_only(checkpoint is not None))
    return module


@pytest.mark.parametrize("interval", [2, 1.0], ids=["within the epoch", "at its end"])
def test_resume_from_inside_a_validation_validates_anew_and_continues_row_stream(
    tmp_path: Path, interval: float
) -> None:
    (tmp_path / "saved").mkdir()
    options = {"val_check_interval": interval}
    whole = fit_with_validations(
        tmp_path,
        Validated(tmp_path / "saved"),
        callbacks=[SaveBetween()],
        num_sanity_val_steps=0,
        **options,
    )
    checkpoints = sorted((tmp_path / "saved").iterdir())
    assert len(checkpoints) == 2 * 3 * (6 if interval == 2 else 2)
    for checkpoint in checkpoints:
        done = int(checkpoint.stem.split()[1])
        before, after = whole.events[:done], whole.events[done:]
        # Again from the first row, so that the metrics are of all of them.
        while before[-1][0] == "val":
            after.insert(0, before.pop())
        resumed = fit_with_validations(tmp_path, Validated(), checkpoint, **options)
        assert resumed.events == after, checkpoint.name
        assert torch.equal(weights(resumed), weights(whole))
