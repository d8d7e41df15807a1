"""A Trainer step of a trivial model under ``memmap_superbatch``.

    python tests/programs/benchmarks/trainer.py --devices 1,4
    python tests/programs/benchmarks/trainer.py --row-results --rounds 20 --clock cpu

It is compared with the stock Trainer on one device that is fed from a list of ready batches. What
is timed is an epoch of training, from its first hook to its last; the first epoch of each fit is
not counted. With ``--row-results``, epochs of a linear model on case A with and without
`RowResults` take turns in one fit. Whole fits of real models are compared by
``lightning-memmap compare``.
"""

import argparse
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from timing import CLOCKS, machine, spread
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_memmap import MemmapDataModule
from lightning_memmap.callbacks import RowResults


class Timed(L.LightningModule):
    """A classifier that notes how long each epoch of training takes, in seconds."""

    def __init__(self, net: nn.Module, now: Callable[[], float]) -> None:
        super().__init__()
        self.net = net
        self.now = now
        self.epochs_s: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        return nn.functional.cross_entropy(self.net(inputs), labels)

    def on_train_epoch_start(self) -> None:
        self.start = self.now()

    def on_train_epoch_end(self) -> None:
        self.epochs_s.append(self.now() - self.start)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Ready:
    """Batches that are there already. A bare list would be one loader for each of them."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def fit_s(
    net: Callable[[], nn.Module], data: Any, epochs: int, now: Callable[[], float], **options: Any
) -> list[float]:
    """Seconds of each epoch but the first."""
    torch.manual_seed(0)
    module = Timed(net(), now)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=epochs + 1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"devices": 1, **options},
    )
    if isinstance(data, L.LightningDataModule):
        trainer.fit(module, datamodule=data)
    else:
        trainer.fit(module, data)
    return module.epochs_s[1:]


def compare(runs: dict[str, Callable[[], list[float]]], rounds: int) -> dict[str, list[float]]:
    """The median epoch of each fit; the fits take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for index in range(rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(statistics.median(runs[name]()))
    return seconds


def report(seconds: dict[str, list[float]], base: str, num_steps: int) -> None:
    """Microseconds of a step, and the ratio to the base, round by round."""
    for name, values in seconds.items():
        step_us = [1e6 * value / num_steps for value in values]
        ratios = [value / other for value, other in zip(values, seconds[base], strict=True)]
        print(
            f"{name:>44} {spread(step_us, '{:,.1f}'):>32} us/step, time {spread(ratios)} of"
            f" {base!r}",
            flush=True,
        )


def steps(args: argparse.Namespace, directory: Path) -> None:
    """The cost of a step of a trivial model."""
    rows = TensorDataset(torch.randn(16_000, 8), torch.arange(16_000) % 10)
    batch, now = 32, CLOCKS[args.clock]
    ready = Ready([list(rows[at : at + batch]) for at in range(0, len(rows), batch)])
    runs = {
        "stock Trainer, list of ready batches": lambda: fit_s(
            lambda: nn.Linear(8, 10), ready, args.epochs, now
        )
    }
    for devices in (int(number) for number in args.devices.split(",")):
        data = MemmapDataModule(rows, store_dir=directory, batch_size=batch // devices)
        runs[f"{devices} data devices"] = lambda devices=devices, data=data: fit_s(
            lambda: nn.Linear(8, 10),
            data,
            args.epochs,
            now,
            devices=devices,
            strategy="memmap_superbatch",
        )
    print(f"trivial model, {len(ready)} steps of {batch} rows")
    report(compare(runs, args.rounds), "stock Trainer, list of ready batches", len(ready))


class TimedRows(Timed):
    """Returns the loss of each row of case A as well."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        images, labels = batch
        inputs = images.flatten(1).float()
        losses = nn.functional.cross_entropy(self.net(inputs), labels, reduction="none")
        return {"loss": losses.mean(), "row_loss": losses}


class EverySecondEpoch(RowResults):
    """Stores the results of even epochs, and does nothing in odd ones.

    It notes the seconds that it spends in the steps and in the commit of each epoch.
    """

    def __init__(self, path: Path, keys: list[str], now: Callable[[], float]) -> None:
        super().__init__(path, keys)
        self.now = now
        self.steps_s: list[float] = []
        self.commits_s: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.steps_s.append(0.0)

    def on_train_batch_start(self, *args: Any) -> None:
        start = self.now()
        super().on_train_batch_start(*args)
        self.steps_s[-1] += self.now() - start

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.current_epoch % 2 == 0:
            start = self.now()
            super().on_train_batch_end(trainer, *args)
            self.steps_s[-1] += self.now() - start

    def on_train_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.current_epoch % 2 == 0:
            start = self.now()
            super().on_train_epoch_end(trainer, *args)
            self.commits_s.append(self.now() - start)


def row_results(args: argparse.Namespace, directory: Path) -> None:
    """The cost of one float per row, with its commit at the end of an epoch."""
    images = torch.randint(256, (50_000, 3, 32, 32), dtype=torch.uint8)
    rows = TensorDataset(images, torch.arange(50_000) % 10)
    data = MemmapDataModule(rows, store_dir=directory / "stores", batch_size=512)
    module = TimedRows(nn.Linear(3072, 10), CLOCKS[args.clock])
    callback = EverySecondEpoch(directory / "results", ["row_loss"], CLOCKS[args.clock])
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy="memmap_superbatch",
        max_epochs=2 * (args.rounds + 1),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    trainer.fit(module, data)
    seconds = {"without": module.epochs_s[3::2], "RowResults": module.epochs_s[2::2]}
    print("linear model, 98 steps of 512 rows of case A")
    report(seconds, "without", 98)
    for name, values in (("steps", callback.steps_s[2::2]), ("commit", callback.commits_s[1:])):
        ratios = [value / epoch for value, epoch in zip(values, seconds["without"], strict=True)]
        values_ms = [1e3 * value for value in values]
        print(f"{name:>44} {spread(values_ms, '{:,.2f}'):>32} ms/epoch, {spread(ratios, '{:.4f}')}")


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--devices", default="1,4", help="logical data devices, such as 1,4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3, help="that are counted, of each fit")
    parser.add_argument("--row-results", action="store_true", help="the cost of RowResults")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", ".*does not have many workers")
    print(f"{machine()}; {args.clock} time, {args.rounds} rounds")
    with tempfile.TemporaryDirectory() as directory:
        measure = row_results if args.row_results else steps
        measure(args, Path(directory))


if __name__ == "__main__":
    main()
