"""A checkpoint from inside an epoch resumes with the next unseen row.

On its own variant it does so bit for bit, and on other variants and other numbers of processes with
the same rows.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_memmap import MemmapDataModule
from tests.contract.resume import runs
from tests.contract.resume.runs import make_data
from tests.support.models import Points, Regression, make_trainer, weights
from tests.support.processes import expected_batches, launch, sorted_steps
from tests.support.training import make_strategy


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
    data = make_data(path, 12, val_dataset=Points(40, 1000), batch_size=8)
    return runs.fit(module, data, checkpoint, max_epochs=2, **options)


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
        resumed = fit_with_validations(
            tmp_path, Validated(), checkpoint, num_sanity_val_steps=2, **options
        )
        assert resumed.events == after, checkpoint.name
        assert torch.equal(weights(resumed), weights(whole))


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


ROWS = 151
GLOBAL_BATCH = 16
#: In the middle of the first epoch, at its end, and in the middle of the second: of 10 steps each.
STEPS = [3, 10, 13]

DDP = {"strategy": "ddp", "devices": 2, "batch_size": 8}
SUPERBATCH_DDP = {
    "strategy": "memmap_superbatch_ddp",
    "strategy_options": {"data_devices_per_process": 2},
    "devices": 4,
    "batch_size": 4,
}
SUPERBATCH = {"strategy": "memmap_superbatch", "devices": 2, "batch_size": 8}


def rest(num_done: int) -> list[list[list[int]]]:
    """The steps of each epoch that are left after so many."""
    left = []
    for epoch in range(EPOCHS):
        steps = sorted_steps([expected_batches(ROWS, GLOBAL_BATCH, epoch)])
        left.append(steps[num_done:])
        num_done = max(0, num_done - len(steps))
    return left


def assert_goes_on(runs: list[dict[str, Any]], num_done: int) -> None:
    found = [sorted_steps([run["rows"][epoch] for run in runs]) for epoch in range(EPOCHS)]
    assert found == rest(num_done)


@pytest.mark.parametrize(("variant", "other"), [(DDP, SUPERBATCH_DDP), (SUPERBATCH_DDP, DDP)])
def test_resume_is_bitwise_on_one_variant_and_goes_on_with_the_rows_on_others(
    tmp_path: Path, variant: dict[str, Any], other: dict[str, Any]
) -> None:
    options = {"rows": ROWS, "variant": variant, "steps": STEPS, "others": [other]}
    ranks = launch(save_and_resume, tmp_path, processes=2, **options)
    assert_goes_on([rank["whole"] for rank in ranks], 0)
    # An error inside of a step, which is done again.
    assert_goes_on([rank["interrupted"] for rank in ranks], STEPS[0])
    for rank in ranks:
        assert torch.equal(rank["interrupted"]["weights"], rank["whole"]["weights"])
    for step in STEPS:
        for index in range(2):
            assert_goes_on([rank["resumed"][step][index] for rank in ranks], step)
        for rank in ranks:
            assert torch.equal(rank["resumed"][step][0]["weights"], rank["whole"]["weights"])
        # On one process, in this one.
        alone = fit(tmp_path, ROWS, **SUPERBATCH, checkpoint=f"step={step}.ckpt")
        assert_goes_on([alone], step)
        if variant is SUPERBATCH_DDP:
            # Stock ddp weighs processes, not rows, in the two short steps of an epoch.
            whole = ranks[0]["whole"]["weights"]
            torch.testing.assert_close(alone["weights"], whole, rtol=0, atol=2e-6)


def test_resume_between_accumulated_steps_is_bitwise(tmp_path: Path) -> None:
    variant = {**SUPERBATCH_DDP, "accumulate": 3}
    options = {"rows": ROWS, "variant": variant, "steps": [2, 5], "others": []}
    ranks = launch(save_and_resume, tmp_path, processes=2, **options)
    # Of the ten steps of an epoch, the last one makes a group of its own.
    for step, num_done in ((2, 6), (5, 13)):
        assert_goes_on([rank["resumed"][step][0] for rank in ranks], num_done)
        for rank in ranks:
            assert torch.equal(rank["resumed"][step][0]["weights"], rank["whole"]["weights"])
