"""A checkpoint that is saved inside a step goes on with what its weights have not learned from."""

import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor

from tests.contract.resume import runs
from tests.contract.resume.runs import assert_ends_alike, make_data
from tests.support.models import Points, Regression

EPOCHS, EPOCH_STEPS = 2, 5
#: In the order of a step: before the weights have learned from it, and after.
BEFORE = [
    "on_after_batch_transfer",
    "on_train_batch_start",
    "training_step",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
]
AFTER = ["optimizer_step", "on_train_batch_end"]

SUPERBATCH: dict[str, Any] = {"strategy": "memmap_superbatch", "devices": 2}
RUNS: dict[str, dict[str, Any]] = {
    "superbatch": SUPERBATCH,
    "prefetch": SUPERBATCH,
    "accumulated": {**SUPERBATCH, "accumulate_grad_batches": 3},
    "dp": {"strategy": "memmap_dp", "devices": 2},
    "stock": {"strategy": "auto", "devices": 1},
}


class InterruptError(Exception):
    pass


class Interrupted(Regression):
    """Fails at some places, and notes the rows of the batches that were begun.

    Attributes:
        error: What is raised there.

    Args:
        failures: By the number of a batch of this run, from 1 on, the hook that fails.
    """

    error: type[BaseException] = InterruptError

    def __init__(self, **failures: int) -> None:
        super().__init__()
        self.failures = failures
        self.rows: list[list[int]] = []
        self.num_begun = 0

    def reach(self, hook: str) -> None:
        if self.trainer.training and self.failures.get(hook) == self.num_begun:
            raise self.error

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        # Under memmap_dp, of the batch of the first replica.
        if self.trainer.training and 0 in batch["row"] % 2:
            self.num_begun += 1
        self.reach("on_after_batch_transfer")
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.rows.append(batch["row"].tolist())
        self.reach("on_train_batch_start")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.reach("training_step")
        return self.step(batch, "train")

    def on_before_backward(self, loss: Tensor) -> None:
        self.reach("on_before_backward")

    def on_after_backward(self) -> None:
        self.reach("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.reach("on_before_optimizer_step")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.reach("optimizer_step")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.reach("on_train_batch_end")

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        if self.failures.get("validation_step") == self.num_begun:
            raise InterruptError
        self.step(batch, "val")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.08)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def fit(path: Path, run: str, checkpoint: Path | None = None, **failures: int) -> Interrupted:
    """A run that saves ``stopped.ckpt`` when it is interrupted."""
    options = dict(RUNS[run])
    data = make_data(
        path,
        EPOCH_STEPS,
        val_dataset=Points(12, 1000),
        batch_size=8 // options["devices"],
        prefetch=2 if run == "prefetch" else None,
    )
    module = Interrupted(**failures)
    options["callbacks"] = [OnExceptionCheckpoint(path, "stopped")] if failures else []
    # The Trainer itself ends the program after Ctrl-C.
    ended = SystemExit if module.error is KeyboardInterrupt else module.error
    with pytest.raises(ended) if failures else nullcontext():
        runs.fit(module, data, checkpoint, max_epochs=EPOCHS, val_check_interval=2, **options)
    return module


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Interrupted]:
    return {run: fit(tmp_path_factory.mktemp(run), run) for run in RUNS}


def check(whole: Interrupted, resumed: Interrupted, num_left: int) -> None:
    """A resumed run has the last steps of the whole one, and ends as it does."""
    assert resumed.rows == whole.rows[len(whole.rows) - num_left :]
    assert_ends_alike(whole, resumed)
    (config,) = resumed.trainer.lr_scheduler_configs
    assert config.scheduler.last_epoch == whole.trainer.global_step


CASES = [
    *(("superbatch", hook, 3) for hook in (*BEFORE, *AFTER)),
    # The last step of an epoch.
    *(("superbatch", hook, 5) for hook in ("training_step", *AFTER)),
    *((run, hook, 3) for run in ("prefetch", "dp", "stock") for hook in ("training_step", *AFTER)),
    # Inside of a group, and at its end.
    *(("accumulated", hook, 2) for hook in ("on_train_batch_start", "on_train_batch_end")),
    *(("accumulated", hook, 3) for hook in ("on_after_backward", *AFTER)),
    *(("accumulated", hook, 5) for hook in ("training_step", *AFTER)),
    *((run, "validation_step", 2) for run in ("superbatch", "accumulated", "dp")),
]


@pytest.mark.parametrize(("run", "hook", "batch"), CASES)
def test_step_that_is_interrupted_is_resumed_with_what_the_weights_lack(
    tmp_path: Path,
    whole_runs: dict[str, Interrupted],
    run: str,
    hook: str,
    batch: int,
) -> None:
    fit(tmp_path, run, **{hook: batch})
    resumed = fit(tmp_path, run, tmp_path / "stopped.ckpt")
    num_done = batch - (hook in BEFORE)
    if run == "accumulated":
        # Gradients that wait for the rest of their group are in no checkpoint.
        num_done -= 0 if num_done == EPOCH_STEPS else num_done % 3
    check(whole_runs[run], resumed, EPOCHS * EPOCH_STEPS - num_done)


@pytest.mark.parametrize("run", ["superbatch", "dp", "accumulated"])
def test_step_that_is_ended_by_ctrl_c_is_resumed(
    tmp_path: Path,
    whole_runs: dict[str, Interrupted],
    monkeypatch: pytest.MonkeyPatch,
    run: str,
) -> None:
    monkeypatch.setattr(Interrupted, "error", KeyboardInterrupt)
    # The Trainer would make this program deaf to Ctrl-C.
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    fit(tmp_path, run, training_step=4)
    resumed = fit(tmp_path, run, tmp_path / "stopped.ckpt")
    check(whole_runs[run], resumed, EPOCHS * EPOCH_STEPS - 3)


@pytest.mark.parametrize("second", ["training_step", "on_train_batch_end"])
def test_run_that_is_interrupted_again_and_again_ends_as_the_whole_one(
    tmp_path: Path, whole_runs: dict[str, Interrupted], second: str
) -> None:
    checkpoint = tmp_path / "stopped.ckpt"
    fit(tmp_path, "superbatch", training_step=2)
    # From the second step on, one more each time.
    for _ in range(3):
        fit(tmp_path, "superbatch", checkpoint, **{second: 2})
    num_done = 1 + 3 * (1 if second == "training_step" else 2)
    check(whole_runs["superbatch"], fit(tmp_path, "superbatch", checkpoint), 10 - num_done)


def test_checkpoint_of_an_interrupt_counts_as_lightning_does(tmp_path: Path) -> None:
    for hook, done in (("training_step", 2), ("on_train_batch_end", 3)):
        fit(tmp_path / hook, "superbatch", **{hook: 3})
        saved = torch.load(tmp_path / hook / "stopped.ckpt", weights_only=True)
        states = saved["loops"]["fit_loop"]["state_dict"]["combined_loader"]
        assert [state["steps"] for state in states] == [done]
        assert [state["position"] for state in states] == [8 * done]
        assert saved["MemmapDataModule"]["train"] == states[0]
        current = saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
        assert current["processed"] == done
