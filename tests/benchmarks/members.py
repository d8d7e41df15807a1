"""Members of ``memmap_independent`` in processes of their own, and sequentially in one.

    python tests/benchmarks/members.py --members 2 8 --epochs 2 100

A program that trains that many small members is started anew in each round. What is printed is its
wall time, the CPU time of all its processes, and the sum of the most memory that each has had.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import lightning as L
import torch
from timing import machine, pairwise_ratios, spread
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from lightning_memmap import MemmapDataModule
from lightning_memmap.strategies import IndependentStrategy
from lightning_memmap.strategies.independent import MEMBER_VARIABLE

ROWS = 1024
BATCH_SIZE = 32


class Perceptron(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return mse_loss(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def train(out: Path, members: int, epochs: int, processes: bool) -> None:
    """The program that is measured."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = TensorDataset(torch.randn(ROWS, 64), torch.randn(ROWS, 1))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=IndependentStrategy(num_members=members, processes=processes),
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=out,
    )
    data = MemmapDataModule(
        rows, store_dir=out / "stores", batch_size=BATCH_SIZE, num_parts=members
    )
    trainer.fit(Perceptron(), datamodule=data)
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (out / f"kib_{os.environ.get(MEMBER_VARIABLE, '0')}").write_text(str(kib))


def measure(members: int, epochs: int, mode: str) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds and MiB of one program."""
    with TemporaryDirectory() as out:
        options = json.dumps(
            {"members": members, "epochs": epochs, "processes": mode == "processes"}
        )
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = perf_counter()
        subprocess.run(
            [sys.executable, __file__, "--program", out, options],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wall = perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        kib = sum(int(path.read_text()) for path in Path(out).glob("kib_*"))
    return wall, cpu, kib / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--epochs", type=int, nargs="+", default=[2, 100])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--program", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.program:
        train(Path(args.program[0]), **json.loads(args.program[1]))
        return
    print(f"{machine()}, {os.cpu_count()} cores; {args.rounds} rounds")
    for members in args.members:
        for epochs in args.epochs:
            measured: dict[str, list[tuple[float, float, float]]] = {
                "processes": [],
                "sequential": [],
            }
            for round_ in range(args.rounds):
                for mode in sorted(measured, reverse=bool(round_ % 2)):
                    measured[mode].append(measure(members, epochs, mode))
            steps = epochs * -(-ROWS // members // BATCH_SIZE)
            print(f"{members} members, {steps} steps each")
            for mode, rounds in measured.items():
                wall, cpu, mib = zip(*rounds, strict=True)
                print(
                    f"  {mode:10} wall {spread(wall, '{:.1f}'):>20} s  CPU"
                    f" {spread(cpu, '{:.1f}'):>20} s  {spread(mib, '{:.0f}')} MiB"
                )
            for index, name in enumerate(("wall", "CPU", "memory")):
                columns = [[r[index] for r in rounds] for rounds in measured.values()]
                print(f"  processes / sequential, {name}: {spread(pairwise_ratios(*columns))}")


if __name__ == "__main__":
    main()
