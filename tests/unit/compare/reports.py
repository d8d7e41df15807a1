"""Reports of runs that never were, with figures that are easy to follow."""

from pathlib import Path
from typing import Any

from lightning_memmap.compare.arms import parse_arms
from lightning_memmap.compare.clock import PARTS
from lightning_memmap.compare.launch import RunResult
from lightning_memmap.compare.parity import Parity
from lightning_memmap.compare.results import ArmResult, cost_of, holding_of

from lightning_memmap.compare.report import Report, ScalingPoint

GLOBAL_BATCH, STEPS = 32, 10
FACTS = {"global_batch": GLOBAL_BATCH}


def make_rank(rank: int = 0, size: int = 1, rate: float = 1000.0, **values: Any) -> dict[str, Any]:
    """What one process of a run writes: a step takes as long as the rate says."""
    step_s = GLOBAL_BATCH / rate / size
    return {
        "pid": 100 + rank,
        "rank": rank,
        "world_size": size,
        "data_rank": rank,
        "data_size": size,
        "num_data_devices": size,
        "root_device": "cpu",
        "threads": 1,
        "data_devices": ["cpu"],
        "first_batch_s": 0.5 + rank,
        "process_to_first_batch_s": 2.0 + rank,
        "losses": [1.0 / (1 + step) for step in range(STEPS)],
        "samples_per_s": rate,
        "window_s": STEPS * step_s,
        "step_s": [step_s] * STEPS,
        "parts_s": [dict.fromkeys(PARTS, step_s / len(PARTS))] * STEPS,
        "device_peaks": {},
        "memory": [
            {"pid": 100 + rank, "parent": 1, "rss": 300 * 2**20, "own": 200 * 2**20,
             "shared": 100 * 2**20}
        ],
        "taken": [1] * STEPS,
        "seen": [1] * STEPS,
        "flops": 1000,
        "batch_bytes": GLOBAL_BATCH * 64 // size,
        "model_bytes": {"cpu": {"parameters": 4000, "gradients": 4000, "optimizer": 8000}},
        "movements": [],
        "resident_bytes": {"0: cpu": {"mmap": 5000}},
        **values,
    }  # fmt: skip


def make_run(*ranks: dict[str, Any]) -> RunResult:
    return RunResult(Path("unused"), ranks or (make_rank(),))


def make_parity(**values: Any) -> Parity:
    return Parity(
        **{
            "held": True,
            "rows": (10, 10),
            "same_content": True,
            "same_initial": True,
            "loss_difference": 1e-7,
            "weight_difference": 2e-7,
            "tolerance": 1e-3,
            **values,
        }
    )


def make_arm(name: str, rates: tuple[float, ...] = (1000.0, 1100.0), **values: Any) -> ArmResult:
    """An arm that ran once for each rate; with two processes where its name begins with ddp."""
    (arm,) = parse_arms(name)
    size = 2 if arm.strategy == "ddp" else 1
    movements = [
        {"kind": "allreduce", "source": "process", "target": "2 processes", "num_bytes": 4000,
         "num_calls": 1}
    ] if size > 1 else []  # fmt: skip
    ranks = [make_rank(rank, size, movements=movements) for rank in range(size)]
    runs = [
        make_run(*(make_rank(rank, size, rate / size) for rank in range(size))) for rate in rates
    ]
    defaults: dict[str, Any] = {
        "status": "ok",
        "parity": make_parity() if arm.is_compared else None,
        "holding": holding_of(make_run(*ranks), arm, FACTS),
        "cost": cost_of(runs, GLOBAL_BATCH, STEPS) if runs else None,
        "check_losses": tuple(ranks[0]["losses"]) if arm.is_compared else (),
        "timed_losses": tuple(ranks[0]["losses"]),
    }
    return ArmResult(name, arm.strategy, str(arm.feed), arm.description, **{**defaults, **values})


def make_report(*arms: ArmResult, **values: Any) -> Report:
    defaults: dict[str, Any] = {
        "created": "2026-01-02T03:04:05+00:00",
        "command": "lightning-memmap compare --config digits.yaml",
        "environment": {
            "python": "3.11.7",
            "platform": "Linux",
            "packages": {"torch": "2.13.0"},
            "processor": "a processor",
            "cores": 2,
            "memory_bytes": 2**34,
            "load_before": 0.5,
            "devices": [],
        },
        "settings": {
            "global_batch": GLOBAL_BATCH,
            "devices": 2,
            "accelerator": "cpu",
            "steps": STEPS,
            "warmup_steps": 2,
            "repeats": 2,
            "precision": "32-true",
            "seed": 0,
            "tolerance": 1e-3,
        },
        "data": {"num_rows": 1257, "num_bytes": 90_000, "store_path": "stores/x", "store_s": 0.2},
        "model": {"model_class": "examples.Net", "num_parameters": 1000, "parameter_bytes": 4000},
        "reference": "auto",
        "scaling": (
            ScalingPoint("ddp", 1, 16, (600.0,)),
            ScalingPoint("ddp", 2, 32, (1000.0, 1100.0)),
        ),
    }
    return Report(arms=arms, **{**defaults, **values})
