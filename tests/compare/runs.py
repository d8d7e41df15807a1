"""Runs of a comparison in this process, with what they are about."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from torch.utils.data import Dataset

from lightning_memmap import MemmapDataModule
from lightning_memmap.compare.config import parse_variants
from lightning_memmap.compare.folder import WEIGHTS
from lightning_memmap.compare.parity import Parity, check_parity
from lightning_memmap.compare.prepare import prepare, prepare_store
from lightning_memmap.compare.run_files import RankRecord, RunKind, RunSpec, read_records
from lightning_memmap.compare.worker import all_trainer_options, train, train_variant
from lightning_memmap.loading.row_random import RowRandom
from tests.support.models import ACCELERATOR_VARIABLE, Points, Regression


class CheckResult(NamedTuple):
    """What a check run left behind."""

    folder: Path
    ranks: list[RankRecord]


DEVICES, BATCH_SIZE, ROWS, STEPS, NUM_SHARDS = 2, 8, 100, 6, 24
#: Bytes of a row: a number, eight floats and one.
ROW_BYTES = 8 + 32 + 4
PARAMETERS = 8 * 16 + 16 + 16 + 1


class Jitter(torch.nn.Module):
    """A transform that is random on purpose."""

    def forward(self, batch: Any, generator: torch.Generator) -> Any:
        noise = torch.rand(batch["x"].shape, generator=generator)
        return {**batch, "x": batch["x"] + noise}


class RowJitter(torch.nn.Module):
    """A transform with random numbers for each row."""

    def forward(self, batch: Any, random: RowRandom) -> Any:
        noise = random.normal(*batch["x"].shape[1:])
        return {**batch, "x": batch["x"] + noise * random.bernoulli()[:, None]}


class Double(torch.nn.Module):
    """A transform that is the same for every row at any time."""

    def forward(self, batch: Any) -> Any:
        return {**batch, "x": batch["x"] * 2}


class OfItsDevice(torch.nn.Module):
    """A transform that sees the rows of one data device, and does what depends on all of them."""

    def forward(self, batch: Any) -> Any:
        return {**batch, "x": batch["x"] - batch["x"].mean(0)}


class WithDropout(Regression):
    """A network that draws random numbers in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, torch.nn.Dropout(0.5))


def config(
    path: Path, model: str = "tests.support.models.Regression", **data: Any
) -> dict[str, Any]:
    dataset = {"class_path": "tests.support.models.Points", "init_args": {"num_rows": ROWS}}
    return {
        "seed_everything": 3,
        "model": {"class_path": model},
        "data": {
            "class_path": "lightning_memmap.MemmapDataModule",
            "init_args": {
                "train_dataset": dataset,
                "store_dir": str(path / "stores"),
                "batch_size": BATCH_SIZE,
                **data,
            },
        },
    }


def make_spec(
    path: Path, kind: RunKind, variant: str, sections: dict[str, Any], **options: Any
) -> RunSpec:
    # The first check run in a folder is the reference.
    reference = options.pop("reference", None) or next(path.glob(f"*-check/{WEIGHTS}"), None)
    chosen = parse_variants(variant)[0].variant_options(DEVICES)
    accelerator = os.environ.get(ACCELERATOR_VARIABLE, "cpu")
    trainer = {"accelerator": accelerator, **chosen, **options.pop("trainer", {})}
    values = {
        "warmup_steps": 2 if kind == "timed" else 0,
        "steps": STEPS,
        "transform_is_random": False,
        **options,
    }
    out = path / f"{variant}-{kind}"
    # Of several processes, each comes here.
    out.mkdir(exist_ok=True)
    return RunSpec(
        kind=kind,
        config=sections,
        trainer=trainer,
        variant=variant,
        devices=DEVICES,
        global_batch=DEVICES * BATCH_SIZE,
        num_shards=NUM_SHARDS,
        out=str(out),
        reference=None if reference is None else str(reference),
        **values,
    )


def facts_of(sections: dict[str, Any]) -> dict[str, Any]:
    return prepare(sections, DEVICES, STEPS)


def timed_rank(spec: RunSpec) -> RankRecord:
    """Train, and read what the only process wrote."""
    train(spec)
    (rank,) = read_records(Path(spec.out))
    return rank


def run(spec: RunSpec) -> CheckResult:
    train(spec)
    return result_of(Path(spec.out))


def check_run(
    path: Path,
    variant: str,
    make_model: Callable[[], L.LightningModule] = Regression,
    data_class: type[MemmapDataModule] = MemmapDataModule,
    trainer: dict[str, Any] | None = None,
    rows: Dataset[Any] | None = None,
    reference: Path | None = None,
    **options: Any,
) -> CheckResult:
    """A check run, by default of `Points`. To read a config takes most of the time of a run: here
    there is none."""
    spec = make_spec(path, "check", variant, {}, trainer=trainer or {}, reference=reference)
    L.seed_everything(3)
    options = {"store_dir": path / "stores", "batch_size": BATCH_SIZE, **options}
    data = data_class(rows or Points(ROWS), drop_last=True, **options)
    made = L.Trainer(**all_trainer_options(spec))
    train_variant(spec, made, make_model(), data)
    made.strategy.barrier()  # Every process has written its record.
    return result_of(Path(spec.out))


def result_of(folder: Path) -> CheckResult:
    """What the processes of a check run wrote."""
    return CheckResult(folder, read_records(folder))


def check_all_parity(
    checks: dict[str, CheckResult], expected: Sequence[int], tolerance: float = 1e-4
) -> dict[str, Parity]:
    """The parity of each check run with the first of them."""
    reference = next(iter(checks.values())).ranks
    return {
        name: check_parity(check.ranks, reference, expected, tolerance)
        for name, check in checks.items()
    }


def check_runs_parity(path: Path, runs: dict[str, CheckResult]) -> dict[str, Parity]:
    """The parity of runs with the first of them, whose store is the right one."""
    data = MemmapDataModule(store_dir=path / "stores", batch_size=BATCH_SIZE)
    return check_all_parity(runs, prepare_store(data, DEVICES, STEPS)[1])
