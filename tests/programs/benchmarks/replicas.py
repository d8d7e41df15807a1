"""What ``memmap_dp`` adds to the computation of its replicas, on one physical CPU.

    OMP_NUM_THREADS=1 python tests/programs/benchmarks/replicas.py --clock cpu

A small GPT learns tokens for an epoch. Against it, a loop written by hand that calls the same
module on each half of the same rows in turn, with one backward pass over the mean of the losses.
Both are given batches that are there already; the runs of a round take turns.
"""

import argparse
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from timing import CLOCKS, machine, spread
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_memmap import MemmapDataModule

VOCABULARY = 512


class GPT(L.LightningModule):
    """A few blocks of a transformer, which notes how long an epoch of training takes."""

    def __init__(self, layers: int, width: int, now: Callable[[], float]) -> None:
        super().__init__()
        self.now = now
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY)
        self.epoch_s = 0.0

    def loss(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1] - 1)
        hidden = self.tokens(tokens[:, :-1])
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch[0])

    def on_train_epoch_start(self) -> None:
        self.epoch_s = -self.now()

    def on_train_epoch_end(self) -> None:
        self.epoch_s += self.now()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def in_turn_s(module: GPT, batches: list[Tensor], replicas: int) -> float:
    """Seconds of an epoch of a loop that calls the module on each part of a batch."""
    optimizer = module.configure_optimizers()
    start = module.now()
    for batch in batches:
        losses = [module.loss(batch[index::replicas]) for index in range(replicas)]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    return module.now() - start


def replicas_s(module: GPT, data: MemmapDataModule, replicas: int) -> float:
    """Seconds of an epoch under ``memmap_dp``."""
    trainer = L.Trainer(
        accelerator="cpu",
        devices=replicas,
        strategy="memmap_dp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    return module.epoch_s


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    now = CLOCKS[args.clock]
    rows = torch.randint(0, VOCABULARY, (args.batch * args.steps, args.length + 1))
    with tempfile.TemporaryDirectory() as directory:
        data = MemmapDataModule(
            TensorDataset(rows),
            store_dir=Path(directory),
            batch_size=args.batch // args.replicas,
            shuffle=False,
            residency="host",
        )
        runs: dict[str, Callable[[], float]] = {
            "in turn": lambda: in_turn_s(
                GPT(args.layers, args.width, now), list(rows.split(args.batch)), args.replicas
            ),
            "memmap_dp": lambda: replicas_s(GPT(args.layers, args.width, now), data, args.replicas),
        }
        for run in runs.values():
            run()
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for index in range(args.rounds):
            for name in sorted(runs, reverse=bool(index % 2)):
                seconds[name].append(runs[name]())
    print(f"{machine()}; {args.clock} time, {args.rounds} rounds, {args.replicas} replicas")
    for name, values in seconds.items():
        step_ms = [1e3 * value / args.steps for value in values]
        ratios = [v / other for v, other in zip(values, seconds["in turn"], strict=True)]
        print(f"{name:>10} {spread(step_ms, '{:,.1f}'):>24} ms/step, {spread(ratios)} of in turn")


if __name__ == "__main__":
    main()
