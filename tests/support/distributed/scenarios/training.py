"""Fit and test a small regression under any strategy, and tell what each rank saw."""

import json
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_memmap import MemmapDataModule
from lightning_memmap.strategies import STRATEGIES, SuperBatchDDPStrategy
from tests.support.models import (
    CombinedData,
    Points,
    Regression,
    TwoOptimizers,
    make_trainer,
    weights,
)

#: The last two steps of an epoch have 12 and 11 rows, which 2 processes do not divide.
ROWS = 151


class Recorder(Regression):
    """Regression with a metric that is synchronised over the processes."""

    def __init__(self) -> None:
        super().__init__()
        self.test_mean = MeanMetric()
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.step(batch, "train")
        self.losses.append(loss.item())
        return loss

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.seen.setdefault("test", []).append(batch["row"].tolist())
        self.test_mean.update(batch["y"])
        self.log("test_mean", self.test_mean)


def make_strategy(name: str, options: dict[str, Any] | None) -> Any:
    """A name for the Trainer, or with options an object of this pack."""
    if options is None:
        return name
    return {entry[0]: entry[1] for entry in STRATEGIES}[name](**options)


def fit_and_test(
    out: Path,
    strategy: str,
    devices: int,
    batch_size: int,
    rows: int,
    num_nodes: int = 1,
    strategy_options: dict[str, Any] | None = None,
    skip_steps: list[int] | None = None,
    prefetch: int | None = None,
) -> dict[str, Any]:
    """Train for two epochs and test once."""
    data = MemmapDataModule(
        Points(rows),
        None,
        Points(rows - 3, 5000),
        store_dir=out / "stores",
        batch_size=batch_size,
        skip_steps=skip_steps,
        prefetch=prefetch,
    )
    trainer = make_trainer(
        out,
        strategy=make_strategy(strategy, strategy_options),
        devices=devices,
        num_nodes=num_nodes,
        max_epochs=2,
    )
    module = Recorder()
    trainer.fit(module, data)
    (metrics,) = trainer.test(module, data, verbose=False)
    return {
        "seen": module.seen,
        "losses": module.losses,
        "weights": weights(module),
        "test_mean": metrics["test_mean"],
    }


def fit_in_children(out: Path, strategy: str, devices: int, rows: int) -> dict[str, Any]:
    """Train where the Trainer starts the processes itself and brings the weights back."""
    data = MemmapDataModule(Points(rows), store_dir=out / "stores", batch_size=8)
    trainer = make_trainer(out, strategy=strategy, devices=devices, max_epochs=2)
    module = Noting(out)
    # Processes that are spawned have imported everything, as this one has.
    multiprocessing.set_executable(sys.executable)
    trainer.fit(module, data)
    return {"weights": weights(module), "num_steps": trainer.global_step}


class Noting(Regression):
    """Regression that leaves the rows of each rank in a file: the processes are gone afterwards."""

    def __init__(self, out: Path) -> None:
        super().__init__()
        self.out = out

    def on_train_end(self) -> None:
        (self.out / f"rows{self.global_rank}.json").write_text(json.dumps(self.seen["train"]))


def fit_compiled(out: Path, rows: int, toggles: bool) -> dict[str, Any]:
    """Train a module as it is, and compiled. Weights and logged values of both."""
    found = {}
    for name in ("plain", "compiled"):
        torch.manual_seed(0)
        module = TwoOptimizers() if toggles else Regression()
        strategy = SuperBatchDDPStrategy(find_unused_parameters=toggles)
        data = MemmapDataModule(Points(rows), store_dir=out / "stores", batch_size=4)
        trainer = make_trainer(out, strategy=strategy, devices=2, max_epochs=2, precision="64-true")
        target: Any = torch.compile(module, backend="eager") if name == "compiled" else module
        trainer.fit(target, data)
        logged = {key: value.item() for key, value in trainer.callback_metrics.items()}
        found[name] = {"weights": weights(module), "logged": logged, "left": "log" in vars(module)}
    return found


class ReadAhead:
    """A loader without a length, which Lightning reads one batch ahead."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


class ReadAheadData(MemmapDataModule):
    def train_dataloader(self) -> Any:
        return ReadAhead(super().train_dataloader())


class PairedData(CombinedData):
    """Sets of other lengths, so that one ends with an uneven step where the other one goes on."""

    sets: ClassVar = {"long": Points(ROWS), "short": Points(44, offset=1000)}


class Paired(Regression):
    """Learns from a batch of each loader, or takes the batches itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = [self.step(part, name) for name, part in batch.items() if part is not None]
        return sum(losses) / len(losses)


class ByIterator(Regression):
    def training_step(self, dataloader_iter: Iterator[Any]) -> Any:
        batch, _, _ = next(dataloader_iter)
        return self.step(batch, "train")


def fit_wrapped(
    out: Path, kind: str, strategy: str, strategy_options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train for an epoch from loaders that reach the Trainer in another form than they are made."""
    options: dict[str, Any] = {"batch_size": 8, "num_shards": 4, "store_dir": out / "stores"}
    module: Regression = Regression()
    data: Any
    if kind == "read ahead":
        data = ReadAheadData(Points(ROWS), **options)
    elif kind == "iterator":
        data, module = MemmapDataModule(Points(ROWS), **options), ByIterator()
    else:
        drop_last = kind == "paired, whole steps"
        data, module = PairedData(out, "max_size_cycle", 8, drop_last=drop_last), Paired()
    precision: Any = "64-true" if kind == "read ahead" else "32-true"
    trainer = make_trainer(
        out,
        strategy=make_strategy(strategy, strategy_options),
        devices=2,
        max_epochs=1,
        precision=precision,
        limit_val_batches=0,
    )
    try:
        trainer.fit(module, data)
    except ValueError as error:
        return {"error": str(error)}
    return {"weights": weights(module)}


class Counting(Regression):
    """Adds up what each process sees, in buffers of a dtype that NCCL knows, and of another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("known", torch.zeros(1, dtype=torch.int32))
        self.register_buffer("unknown", torch.zeros(1, dtype=torch.int16))
        self.register_buffer("assigned", torch.zeros(1, dtype=torch.int16))
        self.register_buffer("expanded", torch.ones(1, dtype=torch.int16).expand(4))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        seen = int(batch["row"].sum()) % 100
        for buffer in (self.known, self.unknown):
            buffer += seen
        self.assigned = self.assigned + seen
        return self.step(batch, "train")


def count_up(out: Path, strategy: str, devices: int) -> dict[str, Any]:
    """Train for an epoch. What was counted, in each buffer."""
    module = Counting()
    data = MemmapDataModule(Points(60), store_dir=out / "stores", batch_size=4)
    make_trainer(out, strategy=strategy, devices=devices).fit(module, data)
    buffers = module.known, module.unknown, module.assigned
    return {"counts": [buffer.item() for buffer in buffers]}


def leave_parameters_out(out: Path, strategy: str) -> dict[str, Any]:
    """Train where each step uses some of the parameters. The error that it ends with."""
    data = MemmapDataModule(Points(60), store_dir=out / "stores", batch_size=4)
    try:
        make_trainer(out, strategy=strategy, devices=2).fit(TwoOptimizers(), data)
    except RuntimeError as error:
        return {"error": str(error)}
    return {}
