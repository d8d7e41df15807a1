"""Reports of runs that never were, with figures that are easy to follow."""

from typing import Any

from lightning_memmap.compare.config import parse_variants
from lightning_memmap.compare.figures import STEP_PARTS, compute_figures
from lightning_memmap.compare.parity import Parity
from lightning_memmap.compare.report import Report, VariantResult
from lightning_memmap.compare.run_files import RankRecord

GLOBAL_BATCH, STEPS = 32, 10
MIB = 2**20
LOSSES = [1.0 / (1 + step) for step in range(STEPS)]


def timed_rank(
    rank: int = 0,
    size: int = 1,
    rate: float = 1000.0,
    data_rank: int | None = None,
    num_shares: int | None = None,
    **seen: Any,
) -> RankRecord:
    """What one process of a timed run writes: a step takes as long as its rate says."""
    step_s = GLOBAL_BATCH / rate / (num_shares or size)
    found: dict[str, Any] = {
        "data_rank": rank if data_rank is None else data_rank,
        "steps": [dict.fromkeys(STEP_PARTS, step_s / len(STEP_PARTS))] * STEPS,
        "first_batch_s": 0.5 + rank,
        "processes": {str(100 + rank): [200 * MIB, 100 * MIB]},
    }
    return RankRecord(rank, size, global_batch=GLOBAL_BATCH, losses=LOSSES, **{**found, **seen})


def check_rank(rank: int = 0, size: int = 1, **values: Any) -> RankRecord:
    """What one process of a check run writes."""
    state = {"cpu": {"parameters": 4000, "gradients": 4000, "optimizer": 8000}}
    found = {"losses": LOSSES, "state_bytes": state, "hashes": [1] * STEPS}
    return RankRecord(rank, size, rank, GLOBAL_BATCH, **{**found, **values})


def figures(*runs: list[RankRecord]) -> dict[str, list[float]]:
    """The figures of some timed runs."""
    result = VariantResult("auto")
    for ranks in runs:
        result.add(compute_figures(ranks, "timed"))
    return result.figures


def make_parity(**values: Any) -> Parity:
    return Parity(
        **{
            "holds": True,
            "steps_with_equal_rows": [10, 10],
            "loss_difference": 1e-7,
            "weight_difference": 2e-7,
            **values,
        }
    )


def make_variant(
    name: str, rates: tuple[float, ...] = (1000.0, 1100.0), **values: Any
) -> VariantResult:
    """A variant that ran once for each rate; with two processes where its name begins with ddp."""
    (variant,) = parse_variants(name)
    size = 2 if variant.strategy == "ddp" else 1
    defaults: dict[str, Any] = {
        "status": "ok",
        "parity": make_parity() if variant.loader != "ideal" else None,
        "check_losses": list(LOSSES) if variant.loader != "ideal" else [],
    }
    result = VariantResult(name, **{**defaults, **values})
    if rates and "figures" not in values:
        checks = [check_rank(rank, size) for rank in range(size)]
        result.add(compute_figures(checks, "check"))
        for rate in rates:
            ranks = [timed_rank(rank, size, rate / size) for rank in range(size)]
            result.add(compute_figures(ranks, "timed"))
    return result


ENVIRONMENT: dict[str, Any] = {
    "python": "3.11.7",
    "platform": "Linux",
    "packages": {"torch": "2.13.0"},
    "processor": "a processor",
    "cores": 2,
    "memory_bytes": 2**34,
    "load_before": 0.5,
    "omp_num_threads": None,
    "cuda": None,
    "devices": [],
}
SETTINGS: dict[str, Any] = {
    "config": "digits.yaml",
    "variants": "all",
    "devices": 2,
    "repeats": 2,
    "steps": STEPS,
    "warmup_steps": 2,
    "check_steps": 6,
    "accelerator": "cpu",
    "tolerance": 1e-3,
    "timeout_s": 60.0,
    "out": "runs/compare",
    "global_batch": GLOBAL_BATCH,
    "precision": "32-true",
    "seed": 0,
}
DATA: dict[str, Any] = {
    "store_path": "stores/x",
    "num_rows": 1257,
    "num_shards": 24,
    "row_bytes": 72,
    "num_bytes": 90_000,
    "store_s": 0.2,
    "steps_per_epoch": 39,
    "batch_size": 16,
    "transform_is_random": False,
}
MODEL: dict[str, Any] = {"model_class": "examples.Net", "num_parameters": 1000, "batch_norms": []}


def make_report(*variants: VariantResult, **values: Any) -> Report:
    defaults: dict[str, Any] = {
        "created": "2026-01-02T03:04:05+00:00",
        "command": "lightning-memmap compare --config digits.yaml",
        "environment": ENVIRONMENT,
        "settings": SETTINGS,
        "data": DATA,
        "model": MODEL,
        "reference": "auto",
    }
    return Report(variants=list(variants), **{**defaults, **values})
