"""A checkpoint from inside an epoch goes on with the next unseen row, on any device count."""

from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_memmap import MemmapDataModule
from tests.models import Points, Regression, make_trainer, weights

NUM_ROWS = 331
EPOCHS = 3


class Recorder(Regression):
    """Notes the rows of each epoch, and the epochs after which it was validated."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, list[list[int]]] = {epoch: [] for epoch in range(EPOCHS)}
        self.validated: list[int] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.rows[self.current_epoch].append(batch["row"].tolist())
        return self.step(batch, "train")

    def on_validation_start(self) -> None:
        self.validated.append(self.current_epoch)


def fit(
    path: Path,
    devices: int,
    batch_size: int,
    checkpoint: Path | None = None,
    save: bool = False,
    strategy: str = "memmap_superbatch",
) -> Recorder:
    data = MemmapDataModule(
        Points(NUM_ROWS), Points(50, 1000), store_dir=path / "stores", batch_size=batch_size
    )
    saver = ModelCheckpoint(path / "saved", "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(
        path,
        strategy=strategy,
        devices=devices,
        max_epochs=EPOCHS,
        num_sanity_val_steps=0,
        enable_checkpointing=save,
        callbacks=[saver] if save else [],
    )
    module = Recorder()
    trainer.fit(module, data, ckpt_path=checkpoint)
    return module


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Recorder]:
    """A run of 4 x 16 rows a step with a checkpoint after each: 6 steps an epoch."""
    path = tmp_path_factory.mktemp("whole")
    return path, fit(path, 4, 16, save=True)


# The resumed run saves nothing.
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("step", [1, 3, 5, 6, 8, 17])
@pytest.mark.parametrize(
    ("strategy", "devices", "batch_size"),
    [
        ("auto", 1, 64),
        *(("memmap_superbatch", *each) for each in ((1, 16), (2, 16), (8, 16), (8, 8))),
    ],
)
def test_resume_on_other_device_count_continues_row_stream(
    whole_run: tuple[Path, Recorder], step: int, strategy: str, devices: int, batch_size: int
) -> None:
    path, whole = whole_run
    checkpoint = path / "saved" / f"step={step}.ckpt"
    resumed = fit(path, devices, batch_size, checkpoint, strategy=strategy)
    steps_before = step
    for epoch in range(EPOCHS):
        batches = whole.rows[epoch]
        done, steps_before = min(steps_before, len(batches)), max(0, steps_before - len(batches))
        expected = list(chain(*batches[done:]))
        assert list(chain(*resumed.rows[epoch])) == expected
        # An epoch with nothing left to train may still have its validation to do.
        assert (epoch in resumed.validated) or not expected
    assert max(len(rows) for rows in chain(*resumed.rows.values())) < 2 * devices * batch_size
    if devices * batch_size == 64:
        assert torch.equal(weights(resumed), weights(whole))


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
    trainer.fit(module, data, ckpt_path=checkpoint, weights_only=checkpoint is not None)
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
        kind, done = checkpoint.stem.split()[:2]
        before, after = whole.events[: int(done)], whole.events[int(done) :]
        if kind == "inside":
            # Again from the first row, so that the metrics are of all of them.
            while before[-1][0] == "val":
                after.insert(0, before.pop())
        else:
            # Between two steps Lightning takes the validation for done, and goes on training.
            while after and after[0][0] != "train":
                del after[0]
        resumed = fit_with_validations(tmp_path, Validated(), checkpoint, **options)
        assert resumed.events == after, checkpoint.name
        assert torch.equal(weights(resumed), weights(whole))
