"""The figures of a comparison. Each is one entry of `METRICS`, and nothing else knows it.

An entry says what a process collects at the end of a run, and how the figure is reduced from what
all processes collected. Tables, the page, the check against a baseline and the list in
docs/compare.md follow from it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from statistics import fmean, median
from typing import Any, Literal

from lightning_memmap.compare.memory import device_peaks, process_memory
from lightning_memmap.sizes import format_bytes

#: Parts of a step, in the order in which they happen.
PARTS = {
    "data": "the computing stream waits for the loader; where super-batches are assembled in the"
    " loader, as under `memmap_superbatch`, this includes bringing them to the root device",
    "transfer": "the strategy's `batch_to_device`",
    "forward": "`training_step`; with the optimizer, in manual optimization",
    "backward": "the backward pass, with the collectives that it waits for",
    "optimizer": "`optimizer_step`: clearing gradients, clipping, the step itself",
    "other": "the Trainer's own work, callbacks, logging, and the stop signal that Lightning"
    " broadcasts in each step of several processes",
}
#: Kinds of model state, in the order in which a picture stacks them.
STATE = ("parameters", "gradients", "optimizer")
#: The figure by which variants are sorted.
SPEED = "samples_per_s"
#: The speed relative to that of the same strategy with ``+ideal``, which a run alone does not know.
NO_LOAD = "no_load_share"


@dataclass
class Observed:
    """What a process has seen when a run ends, for metrics to collect from."""

    data_rank: int
    global_batch: int
    first_batch_s: float = 0.0
    steps: Sequence[Mapping[str, float]] = ()
    state_bytes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    moved_bytes: int = 0
    processes: Mapping[str, Sequence[int | None]] = field(default_factory=process_memory)
    peaks: Mapping[str, Sequence[int]] = field(default_factory=device_peaks)

    @property
    def step_s(self) -> list[float]:
        """Seconds of each measured step."""
        return [sum(step.values()) for step in self.steps]

    def mean_s(self, *parts: str) -> float:
        """Mean seconds of some parts of a step."""
        return fmean(sum(step[part] for part in parts) for step in self.steps)


@dataclass(frozen=True)
class Rank:
    """What one process of a run writes down."""

    rank: int
    world_size: int
    data_rank: int
    losses: Sequence[float]
    values: Mapping[str, Any]


def shares_of(ranks: Sequence[Rank]) -> list[list[Rank]]:
    """The processes by their share of the global batch, in the order of data-parallel ranks."""
    shares: dict[int, list[Rank]] = defaultdict(list)
    for rank in sorted(ranks, key=lambda rank: rank.data_rank):
        shares[rank.data_rank].append(rank)
    return [*shares.values()]


@dataclass(frozen=True)
class Unit:
    """How a figure is written: a name beside its label, and the text of a number in SI units."""

    name: str
    write: Callable[[float], str]


COUNT = Unit("", "{:,.0f}".format)
SHARE = Unit("", "{:.0%}".format)
BYTES = Unit("", lambda value: format_bytes(int(value)))
SECONDS = Unit("s", "{:.2f}".format)
MILLISECONDS = Unit("ms", lambda value: f"{value * 1e3:.2f}")


@dataclass(frozen=True)
class Metric:
    """One figure."""

    key: str
    label: str
    unit: Unit
    meaning: str
    collect: Callable[[Observed], Any]
    reduce: Callable[[list[Any]], float | None]
    run: Literal["timed", "check", "none"] = "timed"
    table: str = ""

    @property
    def heading(self) -> str:
        """The label with its unit."""
        return f"{self.label} {self.unit.name}".rstrip()


#: The titles of tables.
TABLES = {
    "speed": "Speed: the median of the runs, and lowest..highest",
    "parts": "Where a step goes: means",
    "memory": "Memory and communication",
    "devices": "GPUs: peak memory in the measured steps",
}


def _total_rate(values: list[Any]) -> float:
    """Rows per second over all processes. Of processes with the same rows, the slowest counts."""
    slowest: dict[int, float] = {}
    for data_rank, rate in values:
        slowest[data_rank] = min(rate, slowest.get(data_rank, rate))
    return fmean(slowest.values())


def _all_processes(values: list[Any]) -> list[Any]:
    # Ranks see their own child processes, and rank 0 also the ranks that it started.
    return [*{pid: each for own in reversed(values) for pid, each in own.items()}.values()]


def _process_bytes(index: int, total: Callable[[list[int]], int]) -> dict[str, Any]:
    def collect(seen: Observed) -> Any:
        return {pid: sizes[index] for pid, sizes in seen.processes.items()}

    def reduce(values: list[Any]) -> int | None:
        known = _all_processes(values)
        return None if None in known else total(known)

    return {"collect": collect, "reduce": reduce}


def _peak_bytes(index: int) -> dict[str, Any]:
    def collect(seen: Observed) -> Any:
        return {device: peaks[index] for device, peaks in seen.peaks.items()}

    def reduce(values: list[Any]) -> int | None:
        """Of the fullest device. Processes on one device add up."""
        return max(sum(map(Counter, values), Counter()).values(), default=None)

    return {"collect": collect, "reduce": reduce}


def _state_bytes(*kinds: str) -> dict[str, Any]:
    """Bytes of some kinds, on the device that has most of all kinds."""

    def size(state: Mapping[str, int]) -> int:
        return sum(state.values())

    def reduce(values: list[Any]) -> int:
        fullest = max(values, key=size)
        return sum(fullest.get(kind, 0) for kind in kinds)

    return {
        "collect": lambda seen: max(seen.state_bytes.values(), key=size, default={}),
        "reduce": reduce,
        "run": "check",
    }


METRICS = {
    metric.key: metric
    for metric in (
        Metric(
            SPEED, "samples/s", COUNT, "rows per second over all processes",
            lambda seen: [seen.data_rank, seen.global_batch / fmean(seen.step_s)], _total_rate,
            table="speed",
        ),
        Metric(
            NO_LOAD, "of no-load upper bound", SHARE,
            "samples/s relative to the same strategy with `+ideal`, which replays one batch",
            lambda seen: None, lambda values: None, run="none", table="speed",
        ),
        Metric(
            "step_s", "step", MILLISECONDS, "the median step on rank 0",
            lambda seen: median(seen.step_s), itemgetter(0), table="speed",
        ),
        Metric(
            "data_stall", "data stall", SHARE,
            "share of a step that waits for its batch: data loading and transfer",
            lambda seen: seen.mean_s("data", "transfer") / fmean(seen.step_s), fmean,
            table="speed",
        ),
        Metric(
            "first_batch_s", "time to first batch", SECONDS,
            "from `Trainer.fit` until the first batch is on its device, in the slowest process:"
            " processes and workers started, store opened, shards placed",
            lambda seen: seen.first_batch_s, max, table="speed",
        ),
        *(
            Metric(
                f"{part}_s", "data loading" if part == "data" else part, MILLISECONDS, meaning,
                lambda seen, part=part: seen.mean_s(part), fmean,  # type: ignore[misc]
                table="parts",
            )
            for part, meaning in PARTS.items()
        ),
        Metric(
            "num_processes", "processes", COUNT, "training processes and their workers",
            lambda seen: dict.fromkeys(seen.processes), lambda values: len(_all_processes(values)),
            table="memory",
        ),
        Metric(
            "private_bytes", "private memory", BYTES,
            "pages that belong to only one process (USS), added up over all processes after the"
            " last step",
            **_process_bytes(0, sum), table="memory",
        ),
        Metric(
            "shared_bytes", "shared memory", BYTES,
            "the most shared pages in one process, such as those of a mapped store",
            **_process_bytes(1, max), table="memory",
        ),
        Metric(
            "state_bytes", "model state per device", BYTES,
            "parameters, gradients and optimizer state of one process on one device, where they"
            " are largest; the buckets of DDP, a second copy of the gradients, are not seen",
            **_state_bytes(*STATE), table="memory",
        ),
        *(
            Metric(
                f"{kind}_bytes", kind, BYTES, f"the part of the model state that is {kind}",
                **_state_bytes(kind),
            )
            for kind in STATE
        ),
        Metric(
            "communication_bytes", "communication volume per step", BYTES,
            "what each process sends in collectives, the least that a ring needs, and copies"
            " between devices, as torch's dispatcher sees them in the main thread; between logical"
            " devices of one memory nothing moves",
            lambda seen: seen.moved_bytes, sum, run="check", table="memory",
        ),
        Metric(
            "device_peak_bytes", "peak", BYTES,
            "CUDA's peak of allocated memory on the fullest device in the measured steps",
            **_peak_bytes(0), table="devices",
        ),
        Metric(
            "device_reserved_bytes", "reserved", BYTES, "the same of reserved memory",
            **_peak_bytes(1), table="devices",
        ),
    )
}  # fmt: skip


def collected(seen: Observed, kind: str) -> dict[str, Any]:
    """What the metrics of a kind of run note in this process."""
    return {key: each.collect(seen) for key, each in METRICS.items() if each.run == kind}


def figures_of(ranks: Sequence[Rank], kind: str) -> dict[str, float]:
    """The known figures of one run of a kind."""
    found = {
        key: metric.reduce([rank.values[key] for rank in ranks])
        for key, metric in METRICS.items()
        if metric.run == kind
    }
    return {key: float(value) for key, value in found.items() if value is not None}
