"""Trainings that end at random moments and go on from what they saved.

``python -m tests.programs.reliability.resumes [--cases 200] [--minutes 10]`` ends a training by
``max_steps`` or by an error in a random hook, resumes it from a checkpoint of a random callback,
and does so up to three times. Modules step in every batch, accumulate gradients by the Trainer or
by hand, also across epochs. The last run must end with the weights and the rows of one training
that nobody ended, bit for bit. Prints a row of the table in docs/reliability.md.
"""

import argparse
import logging
import random
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor

from lightning_memmap import MemmapDataModule
from tests.support.models import Points, Regression, make_trainer, weights
from tests.support.versions import weights_only

HOOKS = ("training_step", "on_train_batch_end", "on_before_zero_grad", "validation_step")


class EndError(Exception):
    """Ends a training."""


@dataclass(frozen=True)
class Case:
    """What is trained.

    Args:
        group: Batches whose gradients are accumulated.
        kind: Who does so: the ``trainer``, the module by the number of its batch (``hand``), or by
            a number over all epochs (``across``).
    """

    num_rows: int
    batch_size: int
    epochs: int
    group: int
    kind: str
    val_check_interval: float

    @classmethod
    def draw(cls, rng: random.Random) -> "Case":
        """Draw one."""
        return cls(
            rng.randrange(33, 90),
            rng.choice((2, 4)),
            rng.randrange(2, 4),
            rng.choice((1, 2, 3, 4)),
            rng.choice(("trainer", "hand", "across")),
            rng.choice((1.0, 0.5)),
        )


class Learner(Regression):
    """Notes the rows of each batch, and fails in a hook of one of them."""

    def __init__(self, case: Case, fails: tuple[str, int] = ("", 0)) -> None:
        super().__init__()
        self.case = case
        self.fails = fails
        self.automatic_optimization = case.kind == "trainer"
        self.num_batches = 0
        #: By the number of a batch over all epochs.
        self.rows: dict[tuple[int, int], list[int]] = {}

    def reach(self, hook: str) -> None:
        """Fail, if it is time."""
        if self.trainer.sanity_checking or hook != self.fails[0]:
            return
        if self.num_batches >= self.fails[1]:
            raise EndError

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.num_batches += 1
        self.rows[self.trainer.current_epoch, batch_idx] = batch["row"].tolist()
        self.reach("training_step")
        loss = self.step(batch, "train")
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss / self.case.group)
        number = batch_idx
        if self.case.kind == "across":
            number += self.trainer.current_epoch * int(self.trainer.num_training_batches)
        if number % self.case.group == self.case.group - 1:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
        return None

    def on_train_batch_end(self, *_: Any) -> None:
        self.reach("on_train_batch_end")

    def on_before_zero_grad(self, *_: Any) -> None:
        self.reach("on_before_zero_grad")

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.reach("validation_step")
        self.step(batch, "val")


def fit(
    path: Path,
    case: Case,
    module: Learner,
    callbacks: list[Any],
    checkpoint: Path | None = None,
    max_steps: int = -1,
) -> Learner:
    """Train until the end of the case, or until ``max_steps`` or an error."""
    data = MemmapDataModule(
        Points(case.num_rows),
        Points(9, 1000),
        store_dir=path / "stores",
        batch_size=case.batch_size,
        num_shards=4,
    )
    trainer = make_trainer(
        path,
        strategy="memmap_superbatch",
        devices=2,
        max_epochs=case.epochs,
        max_steps=max_steps,
        num_sanity_val_steps=0,
        val_check_interval=case.val_check_interval,
        accumulate_grad_batches=case.group if case.kind == "trainer" else 1,
        enable_checkpointing=bool(callbacks),
        callbacks=callbacks,
    )
    trainer.fit(module, data, ckpt_path=checkpoint, **weights_only(checkpoint is not None))
    return module


def end_once(path: Path, case: Case, rng: random.Random, checkpoint: Path | None) -> Path | None:
    """Train, end early, and return a checkpoint that was saved; the old one if none was."""
    saver = ModelCheckpoint(
        path,
        "{epoch}-{step}",
        save_top_k=-1,
        save_last=rng.random() < 0.5,
        **rng.choice(
            [{}, {"every_n_train_steps": rng.randrange(1, 4)}, {"save_on_train_epoch_end": False}]
        ),
    )
    steps = -1 if checkpoint is None else torch.load(checkpoint, weights_only=True)["global_step"]
    if rng.random() < 0.5:
        module = Learner(case)
        max_steps = max(0, steps) + rng.randrange(1, 12)
        fit(path, case, module, [saver], checkpoint, max_steps)
    else:
        module = Learner(case, (rng.choice(HOOKS), rng.randrange(1, 25)))
        saved = OnExceptionCheckpoint(path, "error")
        try:
            fit(path, case, module, [saver, saved], checkpoint)
        except EndError:
            return path / "error.ckpt"
    found = sorted(path.glob("*.ckpt"))
    return rng.choice(found) if found else checkpoint


def run_case(scratch: Path, number: int) -> list[str]:
    """Run a case, and return what is wrong with it."""
    rng = random.Random(number)
    case = Case.draw(rng)
    path = scratch / str(number)
    whole = fit(path, case, Learner(case), [])
    checkpoint: Path | None = None
    for attempt in range(rng.randrange(1, 4)):
        checkpoint = end_once(path / str(attempt), case, rng, checkpoint)
    resumed = fit(path, case, Learner(case), [], checkpoint)
    faults = []
    if any(whole.rows[place] != rows for place, rows in resumed.rows.items()):
        faults.append("a batch has other rows")
    if not torch.equal(weights(resumed), weights(whole)):
        faults.append("the weights differ")
    if resumed.global_step != whole.global_step:
        faults.append(f"{resumed.global_step} steps instead of {whole.global_step}")
    return [f"{case}, {checkpoint}: {fault}" for fault in faults]


def main(arguments: list[str] | None = None) -> int:
    """Run the program. Returns 1 where anything went wrong, else 0."""
    parser = argparse.ArgumentParser(
        "python -m tests.programs.reliability.resumes", description=__doc__
    )
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="at most")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    started, num_cases, num_faults = monotonic(), 0, 0
    with tempfile.TemporaryDirectory(prefix="reliability-") as directory:
        for number in range(options.first, options.first + options.cases):
            if monotonic() - started > 60 * options.minutes:
                break
            num_cases += 1
            faults = run_case(Path(directory), number)
            num_faults += bool(faults)
            for fault in faults:
                print(f"case {number}: {fault}", flush=True)
    print(f"| ended and resumed | {num_cases} | {num_faults} | {monotonic() - started:,.0f} |")
    return int(num_faults > 0)


if __name__ == "__main__":
    sys.exit(main())
