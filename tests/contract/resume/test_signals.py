"""A signal that comes while an optimizer updates the weights is handled after the update."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor

from tests.contract.resume import runs
from tests.contract.resume.runs import assert_continues, make_data
from tests.support.models import Regression, weights
from tests.support.preloaded import run


class Interrupted(torch.optim.Optimizer):
    """Receives a signal in the middle of an update.

    Args:
        stop: The number of the update, from 0 on; -1 for none.
        signum: The signal.
    """

    def __init__(self, parameters: Any, stop: int, signum: int) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.stop = stop
        self.signum = signum
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                if index == 2 and self.num_steps == self.stop:
                    signal.raise_signal(self.signum)
                parameter -= 0.1 * parameter.grad
        self.num_steps += 1
        return loss


class Signalled(Regression):
    def __init__(
        self, stop: int = -1, signum: int = signal.SIGINT, is_manual: bool = False
    ) -> None:
        super().__init__()
        self.stop = stop
        self.signum = signum
        self.automatic_optimization = not is_manual

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if self.stop == -2:
            signal.raise_signal(self.signum)
            raise AssertionError("the signal was deferred")
        loss = self.step(batch, "train")
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return Interrupted(self.parameters(), self.stop, self.signum)


def fit(path: Path, module: Signalled, checkpoint: Path | None = None) -> Signalled:
    callbacks = [OnExceptionCheckpoint(path, "stopped")] if module.stop != -1 else []
    return runs.fit(module, make_data(path, 5), checkpoint, max_epochs=2, callbacks=callbacks)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The handlers of this program, before and after."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGUSR1)}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize("is_manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("stop", [0, 3, 4])
def test_update_in_which_ctrl_c_comes_is_completed_and_counts(
    tmp_path: Path, stop: int, is_manual: bool
) -> None:
    whole = fit(tmp_path, Signalled(is_manual=is_manual))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(SystemExit):
        fit(tmp_path, Signalled(stop, is_manual=is_manual))
    resumed = fit(tmp_path, Signalled(is_manual=is_manual), tmp_path / "stopped.ckpt")
    assert_continues(whole, resumed, stop + 1)


def test_handler_of_a_program_that_saves_a_checkpoint_saves_whole_updates(tmp_path: Path) -> None:
    whole = fit(tmp_path, Signalled())
    interrupted = Signalled(3, signal.SIGUSR1)
    signal.signal(
        signal.SIGUSR1, lambda *_: interrupted.trainer.save_checkpoint(tmp_path / "signal.ckpt")
    )
    assert torch.equal(weights(fit(tmp_path, interrupted)), weights(whole))
    assert_continues(whole, fit(tmp_path, Signalled(), tmp_path / "signal.ckpt"), 4)


def test_ctrl_c_outside_of_an_update_is_not_deferred(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        fit(tmp_path, Signalled(-2))


PROGRAM = """
import sys, time, threading, os, signal
from pathlib import Path
import torch
from lightning_memmap import MemmapDataModule
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from tests.support.models import Points, Regression, make_trainer

class Learner(Regression):
    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_step == 3:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05, foreach=False)

path, delay = Path(sys.argv[1]), float(sys.argv[2])
data = MemmapDataModule(Points(40), store_dir=path / "stores", batch_size=8, num_shards=4)
trainer = make_trainer(
    path, max_epochs=100000, strategy="memmap_superbatch", enable_checkpointing=True,
    callbacks=[OnExceptionCheckpoint(path, "stopped")],
)
trainer.fit(Learner(), data)
"""


@pytest.mark.parametrize("delay", [0.5, 0.6, 0.7])
def test_real_ctrl_c_leaves_weights_of_whole_steps(tmp_path: Path, delay: float) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = run(tmp_path / "program.py", tmp_path, delay)
    assert ended.returncode == 1, ended.stderr
    saved = torch.load(tmp_path / "stopped.ckpt", weights_only=True)
    # Adam has a counter for each parameter.
    steps = {int(state["step"]) for state in saved["optimizer_states"][0]["state"].values()}
    state = saved["MemmapDataModule"]
    if "fit" in state:
        assert steps == {state["fit"]["optimizer_steps"]} == {state["fit"]["total_batches"]}
    else:
        # Between two epochs of 5 steps.
        assert state["train"]["position"] == 0
        assert steps == {5 * state["train"]["epoch"]}
