"""Strategies of several processes beside hand-written torch loops: one small GPT, two of gloo.

    python tests/programs/benchmarks/processes.py --rounds 5 --steps 30

Each pair trains in the same two processes, in turn: first one, then the other. What is printed is
the time of a step of each, and their ratio round by round, by the clock and by the CPU time of
both processes, which other work on the machine disturbs less. A loop has its batches in memory
and does nothing but train: no Trainer, no loader, no logs. ``--strategies ddp`` is Lightning's own
with the batches of the loop: what the Trainer takes by itself.
"""

import argparse
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from timing import machine, pairwise_ratios, spread
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import lightning_memmap
from lightning_memmap import MemmapDataModule

PROCESSES = 2
VOCABULARY, WIDTH, LAYERS, LENGTH = 512, 128, 4, 64
#: Rows of a step over all processes.
ROWS = 16
WARM_UP = 5
MICROBATCHES = 4


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.zeros(LENGTH, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(tokens) + self.places
        return embedded


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = len(x)
        heads = self.mixed(self.norms[0](x)).view(rows, LENGTH, 3, 4, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class GPT(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = Embedding()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def stages(self) -> list[nn.Module]:
        half = LAYERS // 2
        first, last = self.blocks[:half], self.blocks[half:]
        return [nn.Sequential(self.embedding, *first), nn.Sequential(*last, self.head)]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return cross_entropy(output.flatten(0, 1), batch[1].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self(batch[0]), batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in module.parameters() if not p.is_meta], lr=1e-3)


class Timed:
    """Seconds and CPU seconds of the steps after the first ones."""

    def __init__(self) -> None:
        self.steps = 0
        self.found: tuple[float, float] = (0.0, 0.0)

    def end_of_step(self) -> None:
        self.steps += 1
        if self.steps == WARM_UP:
            dist.barrier()
            self._start = (perf_counter(), process_time())

    def stop(self) -> None:
        cpu_s = process_time() - self._start[1]
        dist.barrier()
        count = self.steps - WARM_UP
        self.found = ((perf_counter() - self._start[0]) / count, cpu_s / count)


class TimedCallback(L.Callback):
    def __init__(self, timed: Timed) -> None:
        self.timed = timed

    def on_train_batch_end(self, *args: Any) -> None:
        self.timed.end_of_step()

    def on_train_epoch_end(self, *args: Any) -> None:
        self.timed.stop()


def rows_of(steps: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (steps * ROWS, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loop(steps: int, step: Callable[[Tensor, Tensor], None], rank: int, size: int) -> Timed:
    """Call a step with the rows of a rank of so many."""
    timed = Timed()
    for inputs, targets in Batches(steps, rank, size):
        step(inputs, targets)
        timed.end_of_step()
    timed.stop()
    return timed


class Batches:
    """The batches of a rank, as the loop has them."""

    def __init__(self, steps: int, rank: int, size: int) -> None:
        inputs, targets = (each.split(ROWS) for each in rows_of(steps))
        self._batches = [
            [each[rank::size] for each in pair] for pair in zip(inputs, targets, strict=True)
        ]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def by_hand_data_parallel(steps: int, shard: bool) -> Timed:
    module: Any = GPT()
    if shard:
        for block in module.blocks:
            fully_shard(block)
        fully_shard(module)
    else:
        module = nn.parallel.DistributedDataParallel(module)
    optimizer = optimizer_of(module)

    def step(inputs: Tensor, targets: Tensor) -> None:
        cross_entropy(module(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return loop(steps, step, dist.get_rank(), PROCESSES)


def by_hand_pipeline(steps: int) -> Timed:
    rank = dist.get_rank()
    stage = GPT().stages()[rank]
    optimizer = optimizer_of(stage)
    schedule = Schedule1F1B(
        PipelineStage(stage, rank, PROCESSES, torch.device("cpu")),
        MICROBATCHES,
        loss_fn=lambda output, target: cross_entropy(output.flatten(0, 1), target.flatten()),
    )

    def step(inputs: Tensor, targets: Tensor) -> None:
        if rank == 0:
            schedule.step(inputs, return_outputs=False)
        else:
            schedule.step(target=targets, losses=[], return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()

    return loop(steps, step, 0, 1)


def by_trainer(strategy: str, steps: int, out: Path) -> Timed:
    timed = Timed()
    made: Any = strategy
    if strategy == "memmap_fsdp2":
        made = lightning_memmap.strategies.FSDP2Strategy(wrap_classes=["Block"])
    elif strategy == "memmap_pipeline":
        made = lightning_memmap.strategies.PipelineStrategy(num_microbatches=MICROBATCHES)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=PROCESSES,
        strategy=made,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[TimedCallback(timed)],
    )
    if strategy == "ddp":
        trainer.fit(GPT(), Batches(steps, dist.get_rank(), PROCESSES))
        return timed
    batch_size = ROWS if strategy == "memmap_pipeline" else ROWS // PROCESSES
    data = MemmapDataModule(
        TensorDataset(*rows_of(steps)), store_dir=out / "stores", batch_size=batch_size
    )
    trainer.fit(GPT(), datamodule=data)
    return timed


PAIRS: dict[str, Callable[[int], Timed]] = {
    "ddp": lambda steps: by_hand_data_parallel(steps, shard=False),
    "memmap_superbatch_ddp": lambda steps: by_hand_data_parallel(steps, shard=False),
    "memmap_fsdp2": lambda steps: by_hand_data_parallel(steps, shard=True),
    "memmap_pipeline": by_hand_pipeline,
}


def work(out: Path, strategies: list[str], rounds: int, steps: int) -> None:
    """What each process does."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in strategies}
    for index in range(rounds + 1):
        for name in strategies:
            runs = [lambda n=name: by_trainer(n, steps, out), lambda n=name: PAIRS[n](steps)]
            order = [0, 1] if index % 2 else [1, 0]
            took = {which: runs[which]().found for which in order}
            # The first round writes the store and loads code.
            if index:
                found[name].append([took[0], took[1]])
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def processes(arguments: list[str]) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """This program in several processes, as torchrun starts them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(PROCESSES):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "MASTER_PORT": port}
        variables |= {"WORLD_SIZE": PROCESSES, "LOCAL_WORLD_SIZE": PROCESSES}
        environment = os.environ | {name: str(value) for name, value in variables.items()}
        environment |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "1"}
        environment |= {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, *arguments]
        started.append(subprocess.Popen(command, env=environment))
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategies", nargs="+", default=list(PAIRS), choices=list(PAIRS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    steps = given.steps + WARM_UP
    if given.out is not None:
        work(given.out, given.strategies, given.rounds, steps)
        return
    print(machine())
    with TemporaryDirectory() as out:
        with processes([*sys.argv[1:], "--out", out]) as started:
            for process in started:
                if process.wait():
                    sys.exit(f"a process ended with {process.returncode}")
        ranks = [json.loads((Path(out) / f"rank{r}.json").read_text()) for r in range(PROCESSES)]
    for name in given.strategies:
        for clock, of in (("clock", max), ("CPU", sum)):
            index = 0 if clock == "clock" else 1
            ours, loops = (
                [
                    of(rank[name][turn][which][index] for rank in ranks)
                    for turn in range(given.rounds)
                ]
                for which in (0, 1)
            )
            ratios = spread(pairwise_ratios(ours, loops))
            times = [spread([1e3 * each for each in run], "{:.1f}") for run in (ours, loops)]
            print(f"{name} by {clock}: {times[0]} ms, loop {times[1]} ms, ratio {ratios}")


if __name__ == "__main__":
    main()
