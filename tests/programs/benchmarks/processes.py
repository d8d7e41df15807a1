"""Strategies of several processes beside hand-written torch loops: one small GPT, two of gloo.

    python tests/programs/benchmarks/processes.py --rounds 5 --steps 30
    python tests/programs/benchmarks/processes.py --memory --width 512 --layers 4

Each pair trains in the same two processes, in turn: first one, then the other. What is printed is
the time of a step of each, and their ratio round by round, by the clock and by the CPU time of
both processes, which other work on the machine disturbs less. A loop has its batches in memory
and does nothing but train: no Trainer, no loader, no logs. ``--strategies ddp`` is Lightning's own
with the batches of the loop: what the Trainer takes by itself. ``accumulating`` is memmap_fsdp2
with accumulated gradients, which are reduced once in a step, beside one reduction in each
micro-batch; times are of a micro-batch.

``--memory`` prints the peak of each process's resident memory above that before the module is
built, from the second optimizer step on. Each variant has processes of its own.
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
from collections.abc import Callable, Iterator, Sequence
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
#: Micro-batches whose gradients are accumulated.
ACCUMULATED = 4


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


class PeakMemory(L.Callback):
    """The peak of this process's resident memory above that before the fit, in bytes."""

    def __init__(self) -> None:
        self._before = status_bytes("VmRSS")
        self.peak = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == ACCUMULATED:
            Path("/proc/self/clear_refs").write_text("5")

    def on_train_epoch_end(self, *args: Any) -> None:
        self.peak = status_bytes("VmHWM") - self._before


def status_bytes(name: str) -> int:
    """A size in ``/proc/self/status``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def by_trainer(
    strategy: str,
    steps: int,
    out: Path,
    accumulated: int = 1,
    callbacks: Sequence[L.Callback] = (),
    **options: Any,
) -> Timed:
    timed = Timed()
    made: Any = strategy
    if strategy == "memmap_fsdp2":
        made = lightning_memmap.strategies.FSDP2Strategy(wrap_classes=["Block"], **options)
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
        callbacks=[TimedCallback(timed), *callbacks],
        accumulate_grad_batches=accumulated,
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


LOOPS: dict[str, Callable[[int], Timed]] = {
    "ddp": lambda steps: by_hand_data_parallel(steps, shard=False),
    "memmap_superbatch_ddp": lambda steps: by_hand_data_parallel(steps, shard=False),
    "memmap_fsdp2": lambda steps: by_hand_data_parallel(steps, shard=True),
    "memmap_pipeline": by_hand_pipeline,
}
PAIRS = [*LOOPS, "accumulating"]


def pair(name: str, steps: int, out: Path) -> list[Callable[[], Timed]]:
    """What is compared, and what it is compared with."""
    if name != "accumulating":
        return [lambda: by_trainer(name, steps, out), lambda: LOOPS[name](steps)]

    def fit(sync: bool) -> Timed:
        options = {"accumulated": ACCUMULATED, "sync_each_micro_batch": sync}
        return by_trainer("memmap_fsdp2", steps, out, **options)

    return [lambda: fit(False), lambda: fit(True)]


#: By name, strategies and options whose memory is measured.
VARIANTS: dict[str, dict[str, Any]] = {
    "memmap_superbatch_ddp": {"strategy": "memmap_superbatch_ddp"},
    "memmap_fsdp2": {"strategy": "memmap_fsdp2"},
    "memmap_fsdp2, sync_each_micro_batch": {
        "strategy": "memmap_fsdp2",
        "sync_each_micro_batch": True,
    },
}


def measure_memory(out: Path, variant: str) -> None:
    """What each process does to measure the memory of a variant."""
    prepare_process()
    memory = PeakMemory()
    options = {"accumulated": ACCUMULATED, "callbacks": [memory], **VARIANTS[variant]}
    by_trainer(steps=3 * ACCUMULATED, out=out, **options)
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(memory.peak))
    dist.barrier()
    dist.destroy_process_group()


def prepare_process() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def work(out: Path, strategies: list[str], rounds: int, steps: int) -> None:
    """What each process does to measure times."""
    prepare_process()
    found: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in strategies}
    for index in range(rounds + 1):
        for name in strategies:
            runs = pair(name, steps, out)
            order = [0, 1] if index % 2 else [1, 0]
            took = {which: runs[which]().found for which in order}
            # The first round writes the store and loads code.
            if index:
                found[name].append([took[0], took[1]])
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def processes(arguments: list[str], **more: str) -> Iterator[list["subprocess.Popen[bytes]"]]:
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
        environment |= {"OMP_NUM_THREADS": "1", **more}
        command = [sys.executable, __file__, *arguments]
        started.append(subprocess.Popen(command, env=environment))
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def in_processes(arguments: list[str], **environment: str) -> list[Any]:
    """Run this program in several processes, and return what each has written."""
    with TemporaryDirectory() as out:
        with processes([*arguments, "--out", out], **environment) as started:
            for process in started:
                if process.wait():
                    sys.exit(f"a process ended with {process.returncode}")
        return [json.loads((Path(out) / f"rank{r}.json").read_text()) for r in range(PROCESSES)]


def main() -> None:
    global WIDTH, LAYERS
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategies", nargs="+", default=PAIRS, choices=PAIRS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--variant")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    WIDTH, LAYERS = given.width, given.layers
    steps = given.steps + WARM_UP
    if given.variant is not None:
        measure_memory(given.out, given.variant)
        return
    if given.out is not None:
        work(given.out, given.strategies, given.rounds, steps)
        return
    print(machine())
    if given.memory:
        print(f"{sum(p.numel() for p in GPT().parameters()):,} parameters of 4 bytes")
        for variant in VARIANTS:
            # Freed memory of tensors is returned to the system at once.
            options = {"MALLOC_MMAP_THRESHOLD_": "65536"}
            peaks = in_processes([*sys.argv[1:], "--variant", variant], **options)
            print(f"{variant}: {', '.join(f'{peak / 2**20:.0f} MiB' for peak in peaks)}")
        return
    ranks = in_processes(sys.argv[1:])
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
            print(f"{name} by {clock}: {times[0]} ms, other {times[1]} ms, ratio {ratios}")


if __name__ == "__main__":
    main()
