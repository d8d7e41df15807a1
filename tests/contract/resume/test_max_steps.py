"""A fit that ``max_steps`` ends, at any batch of an epoch, is resumed as if it had not ended."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_memmap import MemmapDataModule
from tests.contract.resume import runs
from tests.contract.resume.runs import assert_continues, assert_ends_alike, make_data
from tests.support.models import Points, Regression

# The resumed runs save elsewhere.
pytestmark = pytest.mark.filterwarnings("ignore:.*The dirpath has changed")

EPOCHS, EPOCH_STEPS = 3, 9
ALL_STEPS = EPOCHS * EPOCH_STEPS


class Logged(DummyLogger):
    """Notes at which steps of its own something was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int | None] = []

    def log_metrics(self, metrics: Any, step: int | None = None, **kwargs: Any) -> None:
        if "train_loss" in metrics:
            self.steps.append(step)


class Eventful(Regression):
    """Notes what it does in order."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[Any, ...]] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        rows = batch["row"].tolist()
        self.events.append(("train", self.trainer.current_epoch, batch_idx, rows))
        return super().training_step(batch, batch_idx)

    def on_validation_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.events.append(("val",))

    def on_train_epoch_end(self) -> None:
        self.events.append(("end", self.trainer.current_epoch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.08)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, g) for g in (0.9, 0.7)]
        intervals = zip(schedulers, ("step", "epoch"), strict=True)
        return [optimizer], [{"scheduler": each, "interval": name} for each, name in intervals]


class Estimating(Eventful):
    """Asks for the number of steps before the Trainer has restored its counters."""

    def configure_optimizers(self) -> Any:
        self.estimated = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def fit(
    path: Path,
    checkpoint: Path | None = None,
    validates: bool = False,
    module: Eventful | None = None,
    data: MemmapDataModule | None = None,
    **options: Any,
) -> Any:
    """The module of a fit that was ended, or resumed, with its Trainer."""
    if data is None:
        val_dataset = Points(10, 1000) if validates else None
        data = make_data(path / str(validates), EPOCH_STEPS, val_dataset=val_dataset)
    options = {"logger": Logged(), "log_every_n_steps": 1, **options}
    return runs.fit(module or Eventful(), data, checkpoint, **options)


def only_steps(events: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [event for event in events if event[0] == "train"]


def check(whole: Any, resumed: Any, num_done: int) -> None:
    """A resumed run has the last events of the whole one, and ends as it does."""
    steps = only_steps(whole.events)
    begin = whole.events.index(steps[num_done]) if num_done < len(steps) else len(whole.events)
    # An epoch that was over may end again, or with a checkpoint of `on_validation_end` ends now.
    again = list(takewhile(lambda event: event[0] != "train", resumed.events))
    assert {event[0] for event in again} <= {"end"}
    assert resumed.events[len(again) :] == whole.events[begin:]
    assert_ends_alike(whole, resumed)
    assert resumed.trainer.current_epoch == whole.trainer.current_epoch
    assert resumed.trainer.logger.steps == whole.trainer.logger.steps[num_done:]
    rates = [
        [config.scheduler.last_epoch for config in each.trainer.lr_scheduler_configs]
        for each in (whole, resumed)
    ]
    assert rates[0] == rates[1]


SAVERS: dict[str, Callable[[Path], ModelCheckpoint]] = {
    "default": ModelCheckpoint,
    "last": partial(ModelCheckpoint, filename="x", save_last=True),
    "steps": partial(ModelCheckpoint, every_n_train_steps=1),
    "time": partial(ModelCheckpoint, train_time_interval=timedelta(0)),
    "validation": partial(ModelCheckpoint, save_on_train_epoch_end=False),
}
ENDS: list[dict[str, Any]] = [
    {"max_epochs": -1, "max_steps": ALL_STEPS},
    {"max_epochs": EPOCHS},
    {"max_epochs": EPOCHS, "max_steps": ALL_STEPS},
]
#: No validation, one at the end of each epoch, three in an epoch.
VALIDATIONS: list[dict[str, Any]] = [
    {},
    {"validates": True},
    {"validates": True, "val_check_interval": 3},
]
#: For savers other than the default, every second one.
STOPS = (1, 3, 8, 9, 18, 10, 22, 4)
CASES = [
    pytest.param(saver, interval, id=f"{saver} {interval}")
    for saver in SAVERS
    for interval in range(3)
    if (saver, interval) != ("validation", 0)
]


@pytest.mark.parametrize(("saver", "interval"), CASES)
def test_fit_that_max_steps_ended_is_resumed_as_if_it_had_not(
    tmp_path: Path, saver: str, interval: int
) -> None:
    options = VALIDATIONS[interval]
    whole = fit(tmp_path, max_epochs=EPOCHS, **options)
    by_steps = fit(tmp_path, **ENDS[0], **options)
    check(whole, by_steps, 0)
    checked = set()
    for stop in STOPS if saver == "default" else STOPS[1::2]:
        saved = tmp_path / str(stop)
        callbacks = [SAVERS[saver](saved)]
        fit(tmp_path, max_epochs=-1, max_steps=stop, callbacks=callbacks, **options)
        for checkpoint in saved.glob("*.ckpt"):
            num_done = torch.load(checkpoint, weights_only=True)["global_step"]
            checked.add(num_done)
            # What saves a checkpoint and how the resumed run ends do not depend on each other.
            for end in ENDS if saver == "default" else ENDS[stop % 3 :][:1]:
                check(whole, fit(tmp_path, checkpoint, **end, **options), num_done)
    assert checked


@pytest.mark.parametrize("stop", [4, 9])
def test_fit_that_asks_for_its_number_of_steps_early_is_resumed(tmp_path: Path, stop: int) -> None:
    whole = fit(tmp_path, module=Estimating(), max_epochs=EPOCHS)
    saved = ModelCheckpoint(tmp_path / "saved")
    fit(tmp_path, module=Estimating(), max_epochs=-1, max_steps=stop, callbacks=[saved])
    checkpoint = Path(saved.best_model_path)
    resumed = fit(tmp_path, checkpoint, module=Estimating(), max_epochs=EPOCHS)
    assert resumed.estimated == ALL_STEPS
    check(whole, resumed, stop)


def test_fit_that_a_callback_stopped_inside_an_epoch_is_resumed_there(tmp_path: Path) -> None:
    class Stop(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            trainer.should_stop = trainer.global_step == 13

    whole = fit(tmp_path, max_epochs=EPOCHS)
    saved = ModelCheckpoint(tmp_path / "saved")
    fit(tmp_path, max_epochs=EPOCHS, callbacks=[Stop(), saved])
    check(whole, fit(tmp_path, Path(saved.best_model_path), max_epochs=EPOCHS), 13)


# The first batch that is resumed is skipped.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_epoch_that_its_batches_or_a_hook_end_early_is_over(tmp_path: Path) -> None:
    class Skipping(Eventful):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 5 else None

    for module, options in ((Skipping, {}), (Eventful, {"limit_train_batches": 5})):
        path = tmp_path / module.__name__
        whole = fit(path, module=module(), max_epochs=EPOCHS, **options)
        assert len(only_steps(whole.events)) == 15
        for stop in (3, 5, 12):
            saved = ModelCheckpoint(path / str(stop))
            fit(path, module=module(), max_epochs=-1, max_steps=stop, callbacks=[saved], **options)
            checkpoint = Path(saved.best_model_path)
            resumed = fit(path, checkpoint, module=module(), max_epochs=EPOCHS, **options)
            check(whole, resumed, stop)


@pytest.mark.parametrize("step", [1, 2, 5, 6, 7])
def test_groups_of_a_schedule_are_those_of_the_epoch_that_is_resumed(
    tmp_path: Path, step: int
) -> None:
    """Groups of 2 batches in epoch 0, of 4 from there on: 5 steps, then 3 steps an epoch."""
    done = [0, 2, 4, 6, 8, 9, 13, 17, 18][step]

    def schedule() -> GradientAccumulationScheduler:
        return GradientAccumulationScheduler({0: 2, 1: 4})

    whole = fit(tmp_path, max_epochs=EPOCHS, callbacks=[schedule()])
    for saver in ({"every_n_train_steps": step}, {}):
        saved = ModelCheckpoint(tmp_path / str(len(saver)), **saver)
        fit(tmp_path, max_epochs=-1, max_steps=step, callbacks=[schedule(), saved])
        checkpoint = Path(saved.best_model_path)
        assert torch.load(checkpoint, weights_only=True)["global_step"] == step
        resumed = fit(tmp_path, checkpoint, max_epochs=EPOCHS, callbacks=[schedule()])
        assert_continues(whole, resumed, done)
        assert whole.trainer.global_step == 11


class Growing(MemmapDataModule):
    """Has larger batches from epoch 1 on."""

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        return 4 if self.trainer is None or self.trainer.current_epoch < 1 else 6


@pytest.mark.parametrize("saver", [{"every_n_train_steps": 1}, {}], ids=["batch end", "epoch end"])
def test_batch_size_of_the_epoch_that_follows_is_right_after_a_resume(
    tmp_path: Path, saver: dict[str, Any]
) -> None:
    def run(checkpoint: Path | None = None, **options: Any) -> Any:
        data = Growing(Points(72), store_dir=tmp_path / "stores", num_shards=4)
        return fit(tmp_path, checkpoint, data=data, reload_dataloaders_every_n_epochs=1, **options)

    whole = run(max_epochs=EPOCHS)
    assert [len(rows) for rows in whole.seen["train"]] == [8] * 9 + [12] * 12
    for stop in (3, 9, 11, 15):
        saved = ModelCheckpoint(tmp_path / str(stop), save_top_k=1, **saver)
        run(max_epochs=-1, max_steps=stop, callbacks=[saved])
        assert_continues(whole, run(Path(saved.best_model_path), max_epochs=EPOCHS), stop)


@pytest.mark.parametrize(
    "ended",
    [
        {"max_epochs": -1, "max_steps": 2 * EPOCH_STEPS},
        {"max_epochs": 2},
        {"max_epochs": 2, "limit_train_batches": 7},
        {"max_epochs": -1, "max_steps": 13},
        {"max_epochs": 2, "max_steps": 3},
    ],
)
def test_fit_resumed_without_anything_to_do_stays_where_it_was(
    tmp_path: Path, ended: dict[str, Any]
) -> None:
    limit = {name: value for name, value in ended.items() if name == "limit_train_batches"}
    whole = fit(tmp_path / "whole", max_epochs=EPOCHS, **limit)
    module = fit(tmp_path, **ended)
    num_done = len(module.seen["train"])
    for number in range(4):
        checkpoint = tmp_path / f"{number}.ckpt"
        module.trainer.save_checkpoint(checkpoint)
        if number > 0:
            resumed = fit(tmp_path, checkpoint, max_epochs=EPOCHS, **limit)
            assert_continues(whole, resumed, num_done)
        module = fit(tmp_path, checkpoint, **ended)
        assert not module.seen
