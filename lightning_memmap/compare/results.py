"""What the runs of an arm amount to: figures with their spread over repeats."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from lightning_memmap.compare.arms import Arm
from lightning_memmap.compare.clock import PARTS
from lightning_memmap.compare.launch import RunResult
from lightning_memmap.compare.parity import Parity, parts_of
from lightning_memmap.sampling import shard_rows


@dataclass(frozen=True)
class Spread:
    """A figure over repeats.

    Args:
        median: The middle one.
        low: The lowest.
        high: The highest.
        values: One for each run.
    """

    median: float
    low: float
    high: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """The spread of at least one value."""
        given = tuple(values)
        return cls(median(given), min(given), max(given), given)


@dataclass(frozen=True)
class Edge:
    """Bytes that move in one step from one place to another.

    Args:
        source: Where from.
        target: Where to.
        num_bytes: Bytes in a step.
        what: What moves: ``rows``, or the kind of a collective or copy.
        logical: Whether both places are one physical device, so that nothing but a copy within
            its memory happens.
    """

    source: str
    target: str
    num_bytes: int
    what: str
    logical: bool


@dataclass(frozen=True)
class Cost:
    """What an arm costs. Times are in seconds, sizes in bytes.

    Args:
        samples_per_s: Rows a second over all processes, in the undisturbed steps.
        step_s: The median step of each run, on rank 0.
        parts_s: The mean of each part of a step, over steps, processes and runs.
        data_share: Share of a step that waits for data.
        first_batch_s: From the call of ``Trainer.fit`` until the first batch is on its device:
            store opened, shards placed, processes and workers started. The slowest process.
        process_to_first_batch_s: The same from the start of the process, with its imports.
        own_bytes: Pages that belong to one process alone, added up over all processes, workers
            included, after the last step.
        max_shared_bytes: The most shared pages in one process.
        processes: Processes with their own and shared pages, from the last run.
        device_peaks: By CUDA device, peak bytes during the undisturbed steps.
        joules_per_sample: Energy of the GPUs.
        ideal_share: Speed relative to the same strategy with its batches replayed.
        flops_per_s: Floating point operations a second, those of the reference's model.
        threads: Threads that torch uses in each process.
    """

    samples_per_s: Spread
    step_s: Spread
    parts_s: Mapping[str, float]
    data_share: Spread
    first_batch_s: Spread
    process_to_first_batch_s: Spread
    own_bytes: Spread
    max_shared_bytes: Spread
    processes: tuple[Mapping[str, Any], ...]
    device_peaks: Mapping[str, Mapping[str, int]]
    joules_per_sample: Spread | None
    ideal_share: float | None = None
    flops_per_s: float | None = None
    threads: int = 0


@dataclass(frozen=True)
class Holding:
    """What an arm holds where, from its check run, in bytes.

    Args:
        model: By process and device, parameters, gradients and optimizer state.
        rows: By process and data device, shards by residency.
        edges: What moves in a step.
        num_processes: Training processes.
        num_data_devices: Data devices of all processes.
        flops_per_step: Floating point operations of a step in all processes, as far as torch
            counts them.
        batch_bytes: Bytes of a global batch after the transform.
    """

    model: Mapping[str, Mapping[str, int]]
    rows: Mapping[str, Mapping[str, int]]
    edges: tuple[Edge, ...]
    num_processes: int
    num_data_devices: int
    flops_per_step: int
    batch_bytes: int

    @property
    def state_bytes_per_device(self) -> int:
        """Parameters, gradients and optimizer state where they are the most."""
        return max((sum(sizes.values()) for sizes in self.model.values()), default=0)

    @property
    def moved_bytes(self) -> int:
        """Bytes that move in a step over all edges but the logical ones."""
        return sum(edge.num_bytes for edge in self.edges if not edge.logical)


@dataclass(frozen=True)
class ArmResult:
    """All that is known of an arm.

    Args:
        arm: Its name.
        strategy: Its strategy.
        feed: Its feed.
        description: What it is, in one line.
        status: ``ok``; ``unavailable``: it cannot run on this machine; ``refused``: the strategy
            or the data said that it cannot do this; ``failed``; ``pending``: not finished.
        reason: Why it is not ``ok``.
        parity: None for an arm that is not compared, or has not got so far.
        holding: From its check run.
        cost: From its timed runs.
        check_losses: The loss of each global batch of the check run.
        trace: Bytes by kind over time, on rank 0; see `lightning_memmap.callbacks.MemoryTrace`.
        timed_losses: Those of the first timed run, with transform and dropout as configured.
        logs: The logs of its runs, relative to the report.
    """

    arm: str
    strategy: str
    feed: str
    description: str
    status: str
    reason: str = ""
    parity: Parity | None = None
    holding: Holding | None = None
    cost: Cost | None = None
    check_losses: tuple[float, ...] = ()
    timed_losses: tuple[float, ...] = ()
    trace: Mapping[str, Sequence[float]] | None = None
    logs: tuple[str, ...] = field(default=())


def cost_of(results: Sequence[RunResult], global_batch: int, steps: int) -> Cost:
    """The figures of the timed runs of an arm.

    Args:
        results: Its runs, one at least, all of which succeeded.
        global_batch: Rows of a step.
        steps: Steps that were measured.
    """
    runs = [run.ranks for run in results]
    parts = {part: fmean(_mean_part(ranks, part) for ranks in runs) for part in PARTS}
    energies = [_joules(ranks) for ranks in runs]
    joules = [energy / (steps * global_batch) for energy in energies if energy is not None]
    processes = [_processes(ranks) for ranks in runs]
    return Cost(
        samples_per_s=Spread.of(map(_samples_per_s, runs)),
        step_s=Spread.of(median(ranks[0]["step_s"]) for ranks in runs),
        parts_s=parts,
        data_share=Spread.of(map(_data_share, runs)),
        first_batch_s=Spread.of(_slowest(ranks, "first_batch_s") for ranks in runs),
        process_to_first_batch_s=Spread.of(
            _slowest(ranks, "process_to_first_batch_s") for ranks in runs
        ),
        own_bytes=Spread.of(sum(max(p["own"], 0) for p in found) for found in processes),
        max_shared_bytes=Spread.of(max(p["shared"] for p in found) for found in processes),
        processes=tuple(processes[-1]),
        device_peaks=_device_peaks(runs),
        joules_per_sample=Spread.of(joules) if len(joules) == len(runs) else None,
        threads=int(runs[0][0]["threads"]),
    )


def _samples_per_s(ranks: Sequence[Mapping[str, Any]]) -> float:
    # Processes that share their rows are one consumer: the slower one tells.
    return sum(min(float(rank["samples_per_s"]) for rank in part) for part in parts_of(ranks))


def _mean_part(ranks: Sequence[Mapping[str, Any]], part: str) -> float:
    return fmean(step[part] for rank in ranks for step in rank["parts_s"])


def _data_share(ranks: Sequence[Mapping[str, Any]]) -> float:
    total = sum(_mean_part(ranks, part) for part in PARTS)
    return _mean_part(ranks, "data") / total if total else 0.0


def _slowest(ranks: Sequence[Mapping[str, Any]], name: str) -> float:
    return max(float(rank[name]) for rank in ranks)


def _joules(ranks: Sequence[Mapping[str, Any]]) -> float | None:
    found = [float(rank["joules"]) for rank in ranks if "joules" in rank]
    return sum(found) if found else None


def _processes(ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All processes of a run once: ranks see their own children, and rank 0 the other ranks."""
    names = {rank["pid"]: f"rank {rank['rank']}" for rank in ranks}
    found = {process["pid"]: process for rank in reversed(ranks) for process in rank["memory"]}

    def name(pid: int) -> str:
        if pid in names:
            return names[pid]
        parent = int(found[pid]["parent"])
        return f"worker of {name(parent)}" if parent in found else "worker"

    ordered = sorted(found.values(), key=lambda process: (name(process["pid"]), process["pid"]))
    return [
        {"process": name(p["pid"]), "own": p["own"], "shared": p["shared"], "rss": p["rss"]}
        for p in ordered
    ]


def _device_peaks(runs: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, int]]:
    """The highest peak of each device over runs; processes on one device add up."""
    peaks: dict[str, dict[str, int]] = {}
    for ranks in runs:
        sums: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for rank in ranks:
            for device, sizes in rank["device_peaks"].items():
                for name, size in sizes.items():
                    sums[device][name] += size
        for device, sizes in sums.items():
            before = peaks.get(device, {})
            peaks[device] = {name: max(size, before.get(name, 0)) for name, size in sizes.items()}
    return peaks


def holding_of(result: RunResult, arm: Arm, facts: Mapping[str, Any]) -> Holding:
    """What the check run of an arm saw of bytes.

    Args:
        result: The check run, which succeeded.
        arm: The arm.
        facts: What was found out about model and data.
    """
    ranks = result.ranks
    return Holding(
        model={
            f"rank {rank['rank']}, {device}": sizes
            for rank in ranks
            for device, sizes in rank.get("model_bytes", {}).items()
        },
        rows={
            f"rank {rank['rank']}, data device {device}": sizes
            for rank in ranks
            for device, sizes in rank["resident_bytes"].items()
        },
        edges=tuple(_edges(ranks, arm, facts)),
        num_processes=len(ranks),
        num_data_devices=int(ranks[0]["num_data_devices"]),
        flops_per_step=sum(int(rank["flops"]) for rank in ranks),
        batch_bytes=sum(int(part[0].get("batch_bytes", 0)) for part in parts_of(ranks)),
    )


def read_trace(result: RunResult) -> dict[str, list[float]] | None:
    """The memory trace of a check run on rank 0; None where there is none."""
    path = result.out / "memory_trace_rank0.json"
    if not path.exists():
        return None
    found: dict[str, list[float]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _edges(
    ranks: Sequence[Mapping[str, Any]], arm: Arm, facts: Mapping[str, Any]
) -> Iterable[Edge]:
    for rank in ranks:
        process = f"rank {rank['rank']}"
        root = rank["root_device"]
        target = f"{process}: {root}"
        num_bytes = int(rank.get("batch_bytes", 0))
        if arm.feed.kind == "dataloader":
            yield Edge("DataLoader", target, num_bytes, "rows", logical=root == "cpu")
        elif arm.feed.kind == "memmap":
            yield from _row_edges(rank, num_bytes, facts)
        for found in rank["movements"]:
            source, other = found["source"], found["target"]
            yield Edge(
                process if source == "process" else source,
                other,
                int(found["num_bytes"]),
                found["kind"],
                logical=False,
            )


def _row_edges(rank: Mapping[str, Any], num_bytes: int, facts: Mapping[str, Any]) -> Iterable[Edge]:
    """From the data devices of a process to its root device, where super-batches are assembled."""
    devices = rank["data_devices"]
    root = rank["root_device"]
    if len(devices) < 2 or not rank.get("is_assembled", True):
        return
    counts = shard_rows(facts["global_batch"] // rank["data_size"], len(devices))
    for index, (device, count) in enumerate(zip(devices, counts.tolist(), strict=True)):
        is_root = device == root and (index == 0 or root != "cpu")
        if not is_root:
            moved = num_bytes * count // int(counts.sum())
            source = f"data device {index}: {device}"
            target = f"rank {rank['rank']}: {root}"
            yield Edge(source, target, moved, "rows", logical=device == root)
