"""Kills in the middle of writing a checkpoint over an older one.

``python -m tests.programs.reliability.checkpoints [--kills 200] [--minutes 10]`` trains programs
that save the same checkpoint after each step, in one file or by two ranks in one folder, and kills
a process at a random moment. The checkpoint must then be that of one step, and the next training
must replace it and leave nothing else. Prints rows of the table in docs/reliability.md.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
from collections import Counter
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
from tests.programs.reliability.forks import LIMIT_S, Forked, call
from tests.programs.reliability.outcome import Fault, Outcome
from tests.support.models import Points
from tests.support.processes import free_port

#: Parameters of a module, in two layers; and how often it is saved if nobody interrupts it.
_WIDTH, _NUM_STEPS = 700, 400
#: How long a rank may wait for one that was killed, and how long after the first checkpoint it is.
_PATIENCE_S, _DELAY_S = 30.0, 0.6
#: By the number of processes.
TITLES = {
    1: "checkpoint in a file over another one, training process killed",
    2: "checkpoint in a folder over another one, one of two ranks killed",
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


def train(directory: Path, rank: int, num_ranks: int, port: int, num_steps: int) -> None:
    """Train, and save the same checkpoint after each step."""
    if num_ranks > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_PORT": port}
        names |= {"LOCAL_WORLD_SIZE": num_ranks, "GROUP_RANK": 0}
        os.environ |= {name: str(value) for name, value in names.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "kills"}
    torch.set_num_threads(1)
    strategy: Any = "memmap_superbatch"
    if num_ranks > 1:
        strategy = FSDP2Strategy(save_distributed_checkpoint=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy=strategy,
        max_steps=num_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = MemmapDataModule(Points(24), store_dir=directory / "stores", batch_size=4)
    trainer.fit(Constant(directory / "last.ckpt"), datamodule=data)


def run(directory: Path, num_ranks: int, num_steps: int) -> list[Forked]:
    """Begin a training."""
    port = free_port()
    return [Forked(train, directory, r, num_ranks, port, num_steps) for r in range(num_ranks)]


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


def kill_while_saving(scratch: Path, num_ranks: int, rng: random.Random) -> Outcome:
    """Kill a process that saves again and again, and look at the checkpoint; then save again."""
    outcome, started = Outcome(), monotonic()
    path = scratch / "last.ckpt"
    ranks = run(scratch, num_ranks, _NUM_STEPS)
    while not path.exists():
        if any(rank.ended_within(0.002) for rank in ranks):
            break
    victim = rng.choice(ranks)
    is_killed = not victim.ended_within(rng.uniform(0.0, _DELAY_S))
    if is_killed:
        os.kill(victim.pid, signal.SIGKILL)
    outcome.notes["killed" if is_killed else "not hit"] += 1
    for rank in ranks:
        ending = rank.end(_PATIENCE_S)
        if ending.hung:
            outcome.add(Fault.HANG, f"it went on without the other rank\n{ending.output}")
        elif not is_killed:
            outcome.add_ending(ending, "the training")
    _look_at(outcome, path, scratch, "after the kill")
    # Another training, to its end.
    for rank in run(scratch, num_ranks, 3):
        outcome.add_ending(rank.end(LIMIT_S), "the next training")
    _look_at(outcome, path, scratch, "after the next training", 3)
    if left := sorted(each.name for each in scratch.iterdir() if each.name.startswith(".")):
        outcome.add(Fault.LEFTOVER, f"beside the checkpoint there is {left}")
    outcome.seconds = monotonic() - started
    return outcome


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


def main(arguments: list[str] | None = None) -> int:
    """Run the program. Returns 1 where anything went wrong, else 0."""
    parser = argparse.ArgumentParser(
        "python -m tests.programs.reliability.checkpoints", description=__doc__
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="at most")
    options = parser.parse_args(arguments)
    ends = monotonic() + 60 * options.minutes
    found: dict[int, list[Outcome]] = {num_ranks: [] for num_ranks in TITLES}
    for number in range(options.kills):
        if monotonic() > ends:
            break
        num_ranks = number % len(TITLES) + 1
        with tempfile.TemporaryDirectory(prefix="reliability-") as scratch:
            outcome = kill_while_saving(Path(scratch), num_ranks, random.Random(number))
        found[num_ranks].append(outcome)
        for fault, text in outcome.faults:
            print(f"case {number}: {fault.value}: {text}", flush=True)
    for num_ranks, outcomes in found.items():
        faults = Counter(fault for outcome in outcomes for fault, _ in outcome.faults)
        num_kills = sum(outcome.notes["killed"] for outcome in outcomes)
        seconds = sum(outcome.seconds for outcome in outcomes)
        cells = [TITLES[num_ranks], f"{num_kills}", *(f"{faults[fault]}" for fault in Fault)]
        print(f"| {' | '.join(cells)} | {seconds:,.0f} |")
    return int(any(outcome.faults for outcomes in found.values() for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
