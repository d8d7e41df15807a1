"""Kills of trainings that write results per row.

``python -m tests.programs.reliability.results [--kills 200] [--minutes 20]`` trains with
`RowResults`, and kills a training at a random moment of its fit, or of the commit of an epoch, or
one of two ranks. In half of the cases each epoch draws its rows by the results of the one before.
After each kill, the committed epochs must be those of a run that nobody killed. The run that
resumes from the last checkpoint must end with the same weights and results, bit for bit, and leave
nothing else. Prints rows of the table in docs/reliability.md.
"""

import os
import random
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from threading import Timer
from time import monotonic, time
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_memmap import MemmapDataModule
from lightning_memmap.callbacks import RowResults
from lightning_memmap.results import Results, read_row_results
from lightning_memmap.results.folder import ResultFolder
from lightning_memmap.sampling import Weighted
from lightning_memmap.store import verify_store
from tests.programs.reliability.kills import (
    begin_training,
    end_killed,
    end_training,
    run_program,
)
from tests.programs.reliability.outcome import Fault, Outcome
from tests.support.models import Points, Regression, make_trainer, weights

NUM_ROWS, NUM_EPOCHS, BATCH = 120, 4, 6
KEYS = ["weight", "row", "vector"]
#: About how long a commit takes.
_COMMIT_S = 0.012
TITLES = {
    "fit": "results per row, training process killed",
    "commit": "results per row, training process killed in a commit",
    "rank": "results per row, one of two ranks killed",
}


class PerRow(Regression):
    """Returns a float, an integer and a vector for each row, which depend on the weights."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        losses = (self(batch["x"]) - batch["y"]).square().mean(1)
        vector = losses[:, None] * torch.arange(1, 6)
        return {
            "loss": losses.mean(),
            "weight": losses + 0.1,
            "row": batch["row"],
            "vector": vector,
        }


def kill_in_commit(number: int, delay_s: float) -> Any:
    """Kill this process some time after the beginning of a commit."""
    commit, num_begun = ResultFolder.commit, 0

    def begin(*args: Any, **kwargs: Any) -> bool:
        nonlocal num_begun
        if num_begun == number:
            Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        num_begun += 1
        return commit(*args, **kwargs)

    return patch.object(ResultFolder, "commit", begin)


def train(
    directory: Path, num_ranks: int, is_following: bool, blow: tuple[int, float] | None = None
) -> str:
    """Train from the last checkpoint on, and return the weights."""
    results = directory / "results"
    checkpoints = directory / "checkpoints"
    column = Results(results, "weight", each_epoch=True)
    data = MemmapDataModule(
        Points(NUM_ROWS),
        store_dir=directory / "stores",
        batch_size=BATCH,
        num_shards=4,
        sampler=Weighted(column) if is_following else None,
    )
    trainer = make_trainer(
        directory,
        devices=2,
        strategy="ddp" if num_ranks > 1 else "memmap_superbatch",
        max_epochs=NUM_EPOCHS,
        callbacks=[
            RowResults(results, KEYS),
            ModelCheckpoint(checkpoints, "{step:04d}", save_top_k=-1, every_n_train_steps=3),
            ModelCheckpoint(checkpoints, "{step:04d}-end", save_top_k=-1, every_n_epochs=1),
        ],
        enable_checkpointing=True,
    )
    model = PerRow()
    last = max(checkpoints.glob("*.ckpt"), default=None)
    if blow is not None:
        kill_in_commit(*blow).start()
    trainer.fit(model, datamodule=data, ckpt_path=last, weights_only=False)
    return weights(model).numpy().tobytes().hex()


def has_begun(directory: Path, started: float) -> bool:
    """Whether a training that was started then has claimed its results."""
    with suppress(FileNotFoundError):
        return (directory / "results" / "results.json").stat().st_ctime > started
    return False


def kill(
    directory: Path, victim: str, is_following: bool, fit_s: float, rng: random.Random
) -> Outcome:
    """Begin a training, and kill one of its processes."""
    outcome = Outcome()
    blow = None
    if victim == "commit":
        blow = rng.randrange(NUM_EPOCHS), rng.uniform(0.0, _COMMIT_S)
    started = time()
    ranks = begin_training(train, directory, 2 if victim == "rank" else 1, is_following, blow)
    is_killed = False
    if victim == "rank":
        # Ranks that have not met yet wait for each other as long as torch lets them.
        while not has_begun(directory, started):
            if any(rank.ended_within(0.01) for rank in ranks):
                break
    if blow is None:
        chosen = rng.choice(ranks)
        # Two ranks have begun by now.
        latest_s = fit_s if victim == "fit" else fit_s / 2
        is_killed = not chosen.ended_within(rng.uniform(0.0, latest_s))
        if is_killed:
            chosen.kill()
    for ending in end_killed(ranks, outcome):
        is_killed |= ending.status == -signal.SIGKILL
        if not is_killed and not ending.hung:
            outcome.add_ending(ending, "a training that was not hit")
    outcome.notes["killed" if is_killed else "not hit"] += 1
    return outcome


def look_at(
    directory: Path, expected: dict[int, dict[str, Tensor]], outcome: Outcome, when: str
) -> list[int]:
    """Compare the committed epochs with those of a run that nobody killed, and return them."""
    epochs = []
    results = directory / "results"
    for path in sorted(results.glob("epoch-*/manifest.json")):
        epoch = int(path.parent.name[-6:])
        epochs.append(epoch)
        try:
            damage = verify_store(path.parent)
            table = read_epochs(results)[epoch]
        except Exception as error:
            outcome.add(Fault.HALF_STORE, f"{when}, epoch {epoch} cannot be read: {error!r}")
            continue
        if damage:
            outcome.add(Fault.HALF_STORE, f"{when}, epoch {epoch} is damaged: {damage}")
        for name, values in expected[epoch].items():
            if not torch.equal(table[name].view(torch.uint8), values.view(torch.uint8)):
                outcome.add(Fault.WRONG_ROWS, f"{when}, epoch {epoch} has other values of {name}")
    return epochs


def read_epochs(results: Path) -> dict[int, dict[str, Tensor]]:
    """Read all committed epochs, each by its number."""
    table = read_row_results(results, "all")
    numbers = table["epoch"][:, 0].tolist()
    parts = zip(numbers, table.unbind(0), strict=True)
    return {number: {str(key): v.clone() for key, v in part.items()} for number, part in parts}


def run_case(
    directory: Path, number: int, expected: dict[tuple[int, bool], Any]
) -> tuple[str, Outcome]:
    """Kill a training once or twice, resume it to its end, and look at the results."""
    rng = random.Random(number)
    victim = [*TITLES][number % len(TITLES)]
    is_following = number // len(TITLES) % 2 > 0
    num_ranks = 2 if victim == "rank" else 1
    outcome = Outcome()
    started = monotonic()
    model, epochs, fit_s = expected[num_ranks, is_following]
    for _ in range(rng.choice((1, 1, 2))):
        hit = kill(directory, victim, is_following, fit_s, rng)
        outcome.faults += hit.faults
        outcome.notes += hit.notes
        look_at(directory, epochs, outcome, "after the kill")
    ranks = begin_training(train, directory, num_ranks, is_following)
    endings = [rank.end() for rank in ranks]
    if all(outcome.add_ending(ending, "the run that resumes") for ending in endings):
        if [ending.value for ending in endings] != model:
            outcome.add(Fault.WRONG_ROWS, "the weights differ from those of a run without a kill")
        if look_at(directory, epochs, outcome, "at the end") != [*epochs]:
            outcome.add(Fault.WRONG_ROWS, "an epoch is missing")
        look_for_leftovers(directory / "results", outcome)
    shutil.rmtree(directory)
    outcome.seconds = monotonic() - started
    return victim, outcome


def look_for_leftovers(results: Path, outcome: Outcome) -> None:
    """Look for files that belong to no epoch."""
    left = [*results.glob("parts/*")]
    left += [
        path for path in results.iterdir() if path.name[:6] not in ("epoch-", "result", "parts")
    ]
    for epoch in results.glob("epoch-*"):
        left += [path for path in epoch.iterdir() if path.name not in ("manifest.json", ".lock")][
            1:
        ]
        left += [path for path in epoch.glob("g-*/*") if path.suffix != ".memmap"]
    if left:
        outcome.add(Fault.LEFTOVER, f"beside the results there is {sorted(map(str, left))}")


def reference(scratch: Path, num_ranks: int, is_following: bool) -> Any:
    """The weights and the results of a training that nobody kills, and the seconds it takes."""
    directory = scratch / f"reference-{num_ranks}-{is_following}"
    started = monotonic()
    model = end_training(begin_training(train, directory, num_ranks, is_following))
    epochs = read_epochs(directory / "results")
    assert [*epochs] == [*range(NUM_EPOCHS)]
    return model, epochs, monotonic() - started


if __name__ == "__main__":
    name = "tests.programs.reliability.results"
    sys.exit(run_program(name, __doc__, TITLES, run_case, reference))
