"""Runs of a comparison in this process, with what they are about."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning_memmap.compare.arms import parse_arms
from lightning_memmap.compare.child import prepare, train, train_arm, trainer_options
from lightning_memmap.compare.launch import RunResult
from lightning_memmap.compare.parity import Check, Parity, judge
from lightning_memmap.compare.rows import expected_hashes
from lightning_memmap.compare.spec import RunKind, RunSpec
from torch.utils.data import Dataset

from lightning_memmap import MemmapDataModule
from lightning_memmap.sampling import BatchSchedule
from lightning_memmap.store import open_store
from tests.models import Points, Regression

DEVICES, BATCH_SIZE, ROWS, STEPS = 2, 8, 100, 6
#: Bytes of a row: a number, eight floats and one.
ROW_BYTES = 8 + 32 + 4
PARAMETERS = 8 * 16 + 16 + 16 + 1


class Jitter(torch.nn.Module):
    """A transform that is random on purpose."""

    def forward(self, batch: Any, generator: torch.Generator) -> Any:
        noise = torch.rand(batch["x"].shape, generator=generator)
        return {**batch, "x": batch["x"] + noise}


class Double(torch.nn.Module):
    """A transform that is the same for every row at any time."""

    def forward(self, batch: Any) -> Any:
        return {**batch, "x": batch["x"] * 2}


class WithDropout(Regression):
    """A network that draws random numbers in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, torch.nn.Dropout(0.5))


def config(path: Path, model: str = "tests.models.Regression", **data: Any) -> dict[str, Any]:
    dataset = {"class_path": "tests.models.Points", "init_args": {"num_rows": ROWS}}
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
    path: Path, kind: RunKind, arm: str, sections: dict[str, Any], **options: Any
) -> RunSpec:
    chosen = parse_arms(arm)[0].trainer_options(DEVICES) if arm else {"devices": 1}
    trainer = {"accelerator": "cpu", **chosen, **options.pop("trainer", {})}
    values = {
        "warmup_steps": 2 if kind == "timed" else 0,
        "steps": STEPS,
        "split_steps": 3 if kind == "timed" else 0,
        "transform_is_random": False,
        **options,
    }
    out = path / f"{arm or 'facts'}-{kind}"
    # Of several processes, each comes here.
    out.mkdir(exist_ok=True)
    return RunSpec(
        kind=kind,
        config=sections,
        trainer=trainer,
        arm=arm,
        devices=DEVICES,
        global_batch=DEVICES * BATCH_SIZE,
        calm=kind == "check",
        out=str(out),
        **values,
    )


def facts_of(path: Path, sections: dict[str, Any]) -> dict[str, Any]:
    spec = make_spec(path, "prepare", "", sections)
    prepare(spec)
    found: dict[str, Any] = json.loads((Path(spec.out) / "facts.json").read_text())
    return found


def run(spec: RunSpec) -> RunResult:
    train(spec)
    out = Path(spec.out)
    return result_of(out)


def check_run(
    path: Path,
    arm: str,
    make_model: Callable[[], L.LightningModule] = Regression,
    data_class: type[MemmapDataModule] = MemmapDataModule,
    trainer: dict[str, Any] | None = None,
    rows: Dataset[Any] | None = None,
    **options: Any,
) -> RunResult:
    """A check run, by default of `Points`. To read a config takes most of the time of a run: here
    there is none."""
    spec = make_spec(path, "check", arm, {}, trainer=trainer or {})
    L.seed_everything(3)
    options = {"store_dir": path / "stores", "batch_size": BATCH_SIZE, **options}
    data = data_class(rows or Points(ROWS), drop_last=True, **options)
    train_arm(spec, L.Trainer(**trainer_options(spec)), make_model(), data)
    return result_of(Path(spec.out))


def result_of(out: Path) -> RunResult:
    """What the processes of a run wrote."""
    return RunResult(out, tuple(json.loads(path.read_text()) for path in out.glob("rank*.json")))


def judge_all(
    checks: dict[str, RunResult], facts: dict[str, Any], tolerance: float = 1e-4
) -> dict[str, Parity]:
    """The parity of each check run with the first of them."""
    found = {name: Check.of(check) for name, check in checks.items()}
    reference = next(iter(found.values()))
    is_random = facts["transform_is_random"] and not facts["has_eval_transform"]
    return {
        name: judge(check, reference, facts["expected"], tolerance, is_random=is_random)
        for name, check in found.items()
    }


def judge_runs(path: Path, runs: dict[str, RunResult]) -> dict[str, Parity]:
    """The parity of runs with the first of them, whose store is the right one."""
    store = open_store(path / "stores" / "train")
    data = MemmapDataModule(store_dir=path / "stores")
    plan = BatchSchedule(store.num_rows, DEVICES * BATCH_SIZE, store.num_shards, drop_last=True)
    stream = data.train_stream(store.manifest, store.num_shards)
    facts = {
        "expected": expected_hashes(store, stream, plan, STEPS),
        "transform_is_random": False,
        "has_eval_transform": False,
    }
    return judge_all(runs, facts)
