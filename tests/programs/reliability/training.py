"""Kills in the first epoch of trainings that build their stores.

``python -m tests.programs.reliability.training [--kills 200] [--minutes 10]`` trains with
``build="while_training"``, and at a random moment kills the process, one of its workers, or one of
two ranks. The run that goes on from the last checkpoint must end with the weights of one that
nobody killed, bit for bit, and with a whole store. Prints rows of the table in docs/reliability.md.
"""

import os
import random
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_memmap import MemmapDataModule
from lightning_memmap.sampling import Mixture
from lightning_memmap.store import open_store, verify_store
from tests.programs.reliability.dataset import plain, rows_of
from tests.programs.reliability.forks import Raised, orphans, wait_for_orphans
from tests.programs.reliability.kills import (
    begin_training,
    end_killed,
    end_training,
    run_program,
)
from tests.programs.reliability.outcome import Fault, Outcome
from tests.support.models import make_trainer

NUM_ROWS, NUM_SHARDS, BATCH = 300, 4, 6
#: How often rows of two sets come, where these are mixed, and their shares of all rows.
SHARES = {"a": 0.7, "b": 0.3}
#: How long a row and a step take, and about how long the first epoch lasts.
_ROW_S, _STEP_S, _EPOCH_S = 0.003, 0.01, 0.8
#: How long workers may live without their parent.
_ORPHAN_LIMIT_S = 5.0
TITLES = {
    "parent": "first epoch, training process killed",
    "worker": "first epoch, worker killed",
    "rank": "first epoch, one of two ranks killed",
}


class Rows(Dataset[dict[str, Any]]):
    """Rows that take some time, one field of which differs in length."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        sleep(_ROW_S)
        x = torch.sin(torch.arange(1, 9) * (row + 1.0))
        return {"x": x, "sound": torch.full((row % 5,), row + 0.5)}


class Remembering(L.LightningModule):
    """Its weights depend on every value of every batch, and on the order of the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, dtype=torch.float64))

    def training_step(self, batch: Any, _: int) -> Tensor:
        sleep(_STEP_S)
        sounds = sum(each.double().sum() for each in batch["sound"])
        target = batch["x"].double() + sounds / 1000
        return (target - self.weight).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def sets(are_mixed: bool) -> Any:
    """What is trained on."""
    mixed = {name: Rows(int(NUM_ROWS * share)) for name, share in SHARES.items()}
    return mixed if are_mixed else Rows(NUM_ROWS)


def train(directory: Path, num_ranks: int, are_mixed: bool, build: str = "while_training") -> str:
    """Train for two epochs, from the last checkpoint on, and return the weights."""
    data = MemmapDataModule(
        sets(are_mixed),
        sampler=Mixture(SHARES) if are_mixed else None,
        store_dir=directory / "stores",
        batch_size=BATCH,
        num_shards=NUM_SHARDS,
        num_workers=2,
        fingerprint="1",
        layout={"sound": "list"},
        build=build,
    )
    checkpoints = ModelCheckpoint(
        directory / "checkpoints", "{step:04d}", save_top_k=-1, every_n_train_steps=4
    )
    trainer = make_trainer(
        directory,
        devices=2,
        strategy="ddp" if num_ranks > 1 else "memmap_superbatch",
        max_epochs=2,
        callbacks=[checkpoints],
        enable_checkpointing=True,
    )
    model = Remembering()
    last = max((directory / "checkpoints").glob("*.ckpt"), default=None)
    trainer.fit(model, datamodule=data, ckpt_path=last)
    return model.weight.detach().numpy().tobytes().hex()


def kill(
    directory: Path, victim: str, are_mixed: bool, rng: random.Random, outcome: Outcome
) -> None:
    """Begin a training, and kill one of its processes at a random moment of the first epoch."""
    started, begun = time(), False
    ranks = begin_training(train, directory, 2 if victim == "rank" else 1, are_mixed)
    # Ranks that have not met yet wait for each other as long as torch lets them.
    while not (begun or any(rank.ended_within(0.002) for rank in ranks)):
        with suppress(FileNotFoundError):  # The store has just been committed.
            found = (directory / "stores").rglob("g-*/requests")
            begun = any(path.stat().st_ctime > started for path in found)
    delay_s = rng.uniform(0.0, _EPOCH_S)
    killed = begun and not ranks[0].ended_within(delay_s)
    if killed:
        processes = [rank.pid for rank in ranks]
        if victim == "worker":
            processes = ranks[0].workers() or processes
        os.kill(rng.choice(processes), signal.SIGKILL)
    outcome.notes["killed" if killed else "ended before"] += 1
    for ending in end_killed(ranks, outcome):
        if isinstance(ending.value, Raised) and victim == "worker":
            outcome.add_ending(ending, "training without a worker", allowed=killed)
    if orphans() and wait_for_orphans(_ORPHAN_LIMIT_S):
        outcome.add(Fault.ORPHAN, "workers outlived their training")


def run_case(
    directory: Path, number: int, expected: dict[tuple[int, bool], list[str]]
) -> tuple[str, Outcome]:
    """Kill a training once or twice, let it go on to its end, and look at what came out."""
    rng = random.Random(number)
    outcome = Outcome()
    started = monotonic()
    victim = [*TITLES][number % len(TITLES)]
    are_mixed = number // len(TITLES) % 2 > 0
    num_ranks = 2 if victim == "rank" else 1
    for _ in range(rng.choice((1, 1, 2))):
        kill(directory, victim, are_mixed, rng, outcome)
    endings = [rank.end() for rank in begin_training(train, directory, num_ranks, are_mixed)]
    if all(outcome.add_ending(each, "the run that goes on") for each in endings):
        if [each.value for each in endings] != expected[num_ranks, are_mixed]:
            outcome.add(Fault.WRONG_ROWS, "the weights differ from those of a run without a kill")
        for name, rows in (sets(True) if are_mixed else {"": sets(False)}).items():
            _look_at(directory / "stores" / "train" / name, rows, outcome)
    shutil.rmtree(directory)
    outcome.seconds = monotonic() - started
    return victim, outcome


def _look_at(path: Path, rows: Rows, outcome: Outcome) -> None:
    if rows_of(open_store(path)) != [plain(rows[row]) for row in range(len(rows))]:
        outcome.add(Fault.WRONG_ROWS, "the store has other rows")
    if damage := verify_store(path):
        outcome.add(Fault.HALF_STORE, f"`verify` finds {damage}")
    left = {each.name for each in path.iterdir()} - {"manifest.json", ".lock"}
    left |= {each.name for each in path.glob("g-*/*") if not each.suffix[1:].isalpha()}
    if len(left) != 1:
        outcome.add(Fault.LEFTOVER, f"beside the store there is {sorted(left)}")


def reference(scratch: Path, num_ranks: int, are_mixed: bool) -> list[str]:
    """The weights of a training from a finished store that nobody kills."""
    directory = scratch / f"reference-{num_ranks}-{are_mixed}"
    return end_training(begin_training(train, directory, num_ranks, are_mixed, "first"))


if __name__ == "__main__":
    name = "tests.programs.reliability.training"
    sys.exit(run_program(name, __doc__, TITLES, run_case, reference))
