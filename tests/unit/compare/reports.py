"""Reports of runs that never were, with figures that are easy to follow."""

from typing import Any

from lightning_memmap.compare.report.figures import Measured, Run, figures_of
from lightning_memmap.compare.report.footprint import footprint_of
from lightning_memmap.compare.report.parity import Parity
from lightning_memmap.compare.report.records import (
    PARTS,
    CheckRank,
    ModelBytes,
    Movement,
    ProcessMemory,
    TimedRank,
)
from lightning_memmap.compare.report.report import (
    Data,
    Environment,
    Model,
    Process,
    Report,
    ScalingPoint,
    Settings,
    VariantResult,
)
from lightning_memmap.compare.run.variants import parse_variants

GLOBAL_BATCH, STEPS = 32, 10
MIB = 2**20
LOSSES = tuple(1.0 / (1 + step) for step in range(STEPS))


def _place(rank: int, size: int) -> dict[str, Any]:
    return {
        "pid": 100 + rank,
        "rank": rank,
        "world_size": size,
        "data_rank": rank,
        "data_size": size,
        "num_data_devices": size,
        "root_device": "cpu",
        "data_devices": ("cpu",),
        "threads": 1,
        "first_batch_s": 0.5 + rank,
        "process_to_first_batch_s": 2.0 + rank,
        "losses": LOSSES,
    }


def timed_rank(rank: int = 0, size: int = 1, rate: float = 1000.0, **values: Any) -> TimedRank:
    """What one process of a timed run writes: a step takes as long as the rate says."""
    step_s = GLOBAL_BATCH / rate / size
    found = {
        **_place(rank, size),
        "samples_per_s": rate,
        "step_s": (step_s,) * STEPS,
        "parts_s": (dict.fromkeys(PARTS, step_s / len(PARTS)),) * STEPS,
        "memory": (ProcessMemory(100 + rank, 1, 300 * MIB, 200 * MIB),),
        "device_peaks": {},
    }
    return TimedRank(**{**found, **values})


def check_rank(rank: int = 0, size: int = 1, **values: Any) -> CheckRank:
    """What one process of a check run writes."""
    found = {
        **_place(rank, size),
        "loader_hashes": (1,) * STEPS,
        "model_hashes": (1,) * STEPS,
        "is_assembled": True,
        "batch_bytes": GLOBAL_BATCH * 64 // size,
        "model_bytes": {"cpu": ModelBytes(4000, 4000, 8000)},
        "movements": (),
        "resident_bytes": {"0: cpu": {"mmap": 5000}},
        "flops": 1000,
        "parameters": (),
    }
    return CheckRank(**{**found, **values})


def measured(*runs: Run, **values: Any) -> Measured:
    """What the figures of some timed runs are computed from."""
    return Measured(
        **{
            "runs": runs,
            "footprint": None,
            "global_batch": GLOBAL_BATCH,
            "steps": STEPS,
            **values,
        }
    )


def make_parity(**values: Any) -> Parity:
    return Parity(
        **{
            "holds": True,
            "rows": (10, 10),
            "same_content": True,
            "same_initial": True,
            "loss_difference": 1e-7,
            "weight_difference": 2e-7,
            "tolerance": 1e-3,
            **values,
        }
    )


def make_variant(
    name: str, rates: tuple[float, ...] = (1000.0, 1100.0), **values: Any
) -> VariantResult:
    """A variant that ran once for each rate; with two processes where its name begins with ddp."""
    (variant,) = parse_variants(name)
    size = 2 if variant.strategy == "ddp" else 1
    movements = (Movement("allreduce", "process", "2 processes", 4000),) if size > 1 else ()
    checks = [check_rank(rank, size, movements=movements) for rank in range(size)]
    runs = [[timed_rank(rank, size, rate / size) for rank in range(size)] for rate in rates]
    footprint = footprint_of(checks, variant.loader, GLOBAL_BATCH)
    processes = tuple(
        Process(f"rank {rank}", 300 * MIB, 200 * MIB, 100 * MIB) for rank in range(size)
    )
    defaults: dict[str, Any] = {
        "status": "ok",
        "parity": make_parity() if variant.is_compared else None,
        "footprint": footprint,
        "figures": figures_of(measured(*runs, footprint=footprint)),
        "processes": processes if runs else (),
        "check_losses": LOSSES if variant.is_compared else (),
        "timed_losses": LOSSES,
    }
    return VariantResult(
        name,
        variant.strategy,
        variant.loader_name,
        variant.description,
        **{**defaults, **values},
    )


ENVIRONMENT = Environment(
    python="3.11.7",
    platform="Linux",
    packages={"torch": "2.13.0"},
    processor="a processor",
    cores=2,
    memory_bytes=2**34,
    load_before=0.5,
    omp_num_threads=None,
    cuda=None,
    devices=(),
)
SETTINGS = Settings(
    config="digits.yaml",
    variants="all",
    devices=2,
    repeats=2,
    steps=STEPS,
    warmup_steps=2,
    check_steps=6,
    scaling="",
    accelerator="cpu",
    tolerance=1e-3,
    timeout_s=60.0,
    out="runs/compare",
    global_batch=GLOBAL_BATCH,
    precision="32-true",
    seed=0,
)
DATA = Data(
    data_class="lightning_memmap.MemmapDataModule",
    store_path="stores/x",
    num_rows=1257,
    num_shards=24,
    row_bytes=72,
    num_bytes=90_000,
    fields={"image": "image: uint8 (8, 8)"},
    store_s=0.2,
    check_store_s=None,
    steps_per_epoch=39,
    batch_size=16,
    has_transform=False,
    transform_is_random=False,
    has_eval_transform=False,
)
MODEL = Model(
    model_class="examples.Net",
    configures_itself=False,
    automatic_optimization=True,
    num_parameters=1000,
    parameter_bytes=4000,
    dropouts=(),
    batch_norms=(),
)


def make_report(*variants: VariantResult, **values: Any) -> Report:
    defaults: dict[str, Any] = {
        "created": "2026-01-02T03:04:05+00:00",
        "command": "lightning-memmap compare --config digits.yaml",
        "environment": ENVIRONMENT,
        "settings": SETTINGS,
        "data": DATA,
        "model": MODEL,
        "reference": "auto",
        "scaling": (
            ScalingPoint("ddp", 1, 16, (600.0,)),
            ScalingPoint("ddp", 2, 32, (1000.0, 1100.0)),
        ),
    }
    return Report(variants=variants, **{**defaults, **values})
