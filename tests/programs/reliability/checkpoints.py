"""Kills in the middle of writing a checkpoint over an older one.

``python -m tests.programs.reliability.checkpoints [--kills 200] [--minutes 10]`` trains programs
that save the same checkpoint after each step, in one file or by two ranks in one folder, and kills
a process at a random moment. The checkpoint must then be that of one step, and the next training
must replace it and leave nothing else. Prints rows of the table in docs/reliability.md.
"""

import os
import random
import shutil
import sys
from pathlib import Path
from time import monotonic
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_memmap import MemmapDataModule
from lightning_memmap.strategies import FSDP2Strategy
from tests.programs.reliability.forks import LIMIT_S, call
from tests.programs.reliability.kills import begin_training, end_killed, run_program
from tests.programs.reliability.outcome import Fault, Outcome
from tests.support.models import Points, make_trainer

#: Parameters of a module, in two layers; and how often it is saved if nobody interrupts it.
_WIDTH, _NUM_STEPS = 700, 400
#: How long after the first checkpoint a process is killed, at most.
_DELAY_S = 0.6
TITLES = {
    "training": "checkpoint in a file over another one, training process killed",
    "rank": "checkpoint in a folder over another one, one of two ranks killed",
}


class Constant(L.LightningModule):
    """All of its weights are the number of the last step."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.net = nn.Sequential(nn.Linear(8, _WIDTH), nn.Linear(_WIDTH, _WIDTH))

    def training_step(self, batch: Any, _: int) -> Tensor:
        return self.net(batch["x"]).sum() * 0  # type: ignore[no-any-return]

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                getattr(parameter, "to_local", lambda p=parameter: p)().fill_(self.global_step)
        self.trainer.save_checkpoint(self.path)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def train(directory: Path, num_ranks: int, num_steps: int = _NUM_STEPS) -> None:
    """Train, and save the same checkpoint after each step."""
    strategy: Any = "memmap_superbatch"
    if num_ranks > 1:
        strategy = FSDP2Strategy(save_distributed_checkpoint=True)
    options: dict[str, Any] = {"max_epochs": -1, "max_steps": num_steps}
    trainer = make_trainer(directory, devices=num_ranks, strategy=strategy, **options)
    data = MemmapDataModule(Points(24), store_dir=directory / "stores", batch_size=4)
    trainer.fit(Constant(directory / "last.ckpt"), datamodule=data)


def read(path: Path, whole: Path) -> tuple[int, set[float]]:
    """Return the step of a checkpoint, and the values of its weights."""
    if path.is_dir():
        dcp_to_torch_save(path, whole)
        step = torch.load(path / "meta.pt", weights_only=False)["global_step"]
        weights = torch.load(whole, weights_only=True)["state_dict"]
    else:
        checkpoint = torch.load(path, weights_only=False)
        step, weights = checkpoint["global_step"], checkpoint["state_dict"]
    return step, {value for tensor in weights.values() for value in tensor.unique().tolist()}


def run_case(scratch: Path, number: int, _: Any) -> tuple[str, Outcome]:
    """Kill a process that saves again and again, and look at the checkpoint; then save again."""
    outcome = Outcome()
    started = monotonic()
    rng = random.Random(number)
    victim = [*TITLES][number % len(TITLES)]
    num_ranks = 2 if victim == "rank" else 1
    path = scratch / "last.ckpt"
    ranks = begin_training(train, scratch, num_ranks)
    while not path.exists():
        if any(rank.ended_within(0.002) for rank in ranks):
            break
    chosen = rng.choice(ranks)
    is_killed = not chosen.ended_within(rng.uniform(0.0, _DELAY_S))
    if is_killed:
        chosen.kill()
    outcome.notes["killed" if is_killed else "not hit"] += 1
    for ending in end_killed(ranks, outcome):
        if not is_killed and not ending.hung:
            outcome.add_ending(ending, "the training")
    _look_at(outcome, path, scratch, "after the kill")
    # Another training, to its end.
    for rank in begin_training(train, scratch, num_ranks, 3):
        outcome.add_ending(rank.end(LIMIT_S), "the next training")
    _look_at(outcome, path, scratch, "after the next training", 3)
    if left := sorted(each.name for each in scratch.iterdir() if each.name.startswith(".")):
        outcome.add(Fault.LEFTOVER, f"beside the checkpoint there is {left}")
    shutil.rmtree(scratch)
    outcome.seconds = monotonic() - started
    return victim, outcome


def _look_at(
    outcome: Outcome, path: Path, scratch: Path, when: str, expected: int | None = None
) -> None:
    ending = call(read, path, scratch / "whole.pt")
    if ending.status != 0 or not isinstance(ending.value, tuple):
        outcome.add(Fault.HALF_STORE, f"{when}: the checkpoint cannot be read: {ending}")
        return
    step, values = ending.value
    if values != {step} or step != (expected or step):
        outcome.add(Fault.WRONG_ROWS, f"{when}: step {step}, with the weights of {sorted(values)}")


if __name__ == "__main__":
    sys.exit(run_program("tests.programs.reliability.checkpoints", __doc__, TITLES, run_case))
