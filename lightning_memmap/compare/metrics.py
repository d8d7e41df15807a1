"""The figures of a comparison. Each is one entry of `METRICS`, and nothing else knows it.

An entry says what it collects from the record of each process of a run, and how that is reduced to
one figure; or it relates two variants, and is known when both have run. Tables, the page and the
list in docs/compare.md follow from it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

from lightning_memmap.sizes import format_bytes

#: Parts of a step, in the order in which they happen.
PARTS = {
    "data": "the computing stream waits for the loader; where super-batches are assembled in the"
    " loader, as under `memmap_superbatch`, this includes bringing them to the root device",
    "transfer": "the strategy's `batch_to_device`",
    "forward": "`training_step`; under `memmap_pipeline` with the backward pass, and in manual"
    " optimization with clearing gradients and clipping",
    "backward": "the backward pass, with the collectives that it waits for",
    "optimizer": "`optimizer_step`: clearing gradients, clipping, the step itself; in manual"
    " optimization the step alone",
    "other": "the Trainer's own work, callbacks, logging, and the stop signal that Lightning"
    " broadcasts in each step of several processes",
}
#: Kinds of model state, in the order in which a picture stacks them.
STATE = ("parameters", "gradients", "optimizer")
#: The figure by which variants are sorted.
SPEED = "samples_per_s"
#: The speed relative to that of the same strategy with ``+ideal``.
NO_LOAD = "no_load_share"


@dataclass(frozen=True)
class Rank:
    """The record of one process of a run."""

    rank: int
    world_size: int
    data_rank: int
    global_batch: int
    losses: Sequence[float]
    first_batch_s: float = 0.0
    #: Seconds of each part of each measured step.
    steps: Sequence[Mapping[str, float]] = ()
    #: By process id, private and shared bytes of this process and all that it has started.
    processes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    #: By accelerator, the peak of allocated bytes.
    peaks: Mapping[str, int] = field(default_factory=dict)
    #: By device and kind, bytes of the model's state.
    state_bytes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    moved_bytes: int = 0
    #: Of each step of a check run, the rows as the loader gave them.
    hashes: Sequence[int] = ()
    #: Parts of its rows of a step, each of which goes through the module by itself.
    num_parts: int = 1
    parameters: Sequence[str] = ()

    def mean_s(self, *parts: str) -> float:
        """Mean seconds of some parts of a step."""
        return fmean(sum(step[part] for part in parts) for step in self.steps)


def shares_of(ranks: Sequence[Rank]) -> list[list[Rank]]:
    """The processes by their share of the global batch, in the order of data-parallel ranks."""
    shares: dict[int, list[Rank]] = defaultdict(list)
    for rank in sorted(ranks, key=lambda rank: rank.data_rank):
        shares[rank.data_rank].append(rank)
    return [*shares.values()]


#: How a figure is written: a number in SI units.
COUNT, SHARE, SECONDS = "{:,.0f}".format, "{:.0%}".format, "{:.2f} s".format


@dataclass(frozen=True)
class Metric:
    """One figure."""

    key: str
    label: str
    write: Callable[[float], str]
    meaning: str
    #: None of a figure that relates two variants.
    collect: Callable[[Rank], Any] | None = None
    reduce: Callable[[list[Any]], float | None] = fmean
    run: Literal["timed", "check"] = "timed"
    table: str = ""


#: The titles of tables.
TABLES = {
    "speed": "Speed: the median of the runs, and lowest..highest",
    "parts": "Where a step goes: means",
    "memory": "Memory and communication",
    "devices": "GPUs: peak memory in the measured steps",
}


def _total_rate(values: list[tuple[int, float]]) -> float:
    """Rows per second over all processes. Of processes with the same rows, the slowest counts."""
    slowest: dict[int, float] = {}
    for data_rank, rate in values:
        slowest[data_rank] = min(rate, slowest.get(data_rank, rate))
    return fmean(slowest.values())


def _of_processes(total: Callable[[list[Any]], int], index: int = 0) -> dict[str, Any]:
    """A figure over all processes, each of which counts once: ranks see their child processes."""

    def reduce(values: list[Any]) -> int:
        by_id = {pid: sizes[index] for found in reversed(values) for pid, sizes in found.items()}
        return total([*by_id.values()])

    return {"collect": lambda rank: rank.processes, "reduce": reduce}


def _state_bytes(*kinds: str) -> dict[str, Any]:
    """Bytes of some kinds, on the device that has most of all kinds."""

    def size(state: Mapping[str, int]) -> int:
        return sum(state.values())

    return {
        "collect": lambda rank: max(rank.state_bytes.values(), key=size, default={}),
        "reduce": lambda values: sum(max(values, key=size).get(kind, 0) for kind in kinds),
        "run": "check",
    }


METRICS = {
    metric.key: metric
    for metric in (
        Metric(
            SPEED, "samples/s", COUNT, "rows per second over all processes",
            lambda rank: (rank.data_rank, rank.global_batch / rank.mean_s(*PARTS)), _total_rate,
            table="speed",
        ),
        Metric(
            NO_LOAD, "of no-load upper bound", SHARE,
            "samples/s relative to the same strategy with `+ideal`, which replays one batch",
            table="speed",
        ),
        Metric(
            "data_stall", "data stall", SHARE,
            "share of a step that waits for its batch: data loading and transfer",
            lambda rank: rank.mean_s("data", "transfer") / rank.mean_s(*PARTS), table="speed",
        ),
        Metric(
            "first_batch_s", "time to first batch", SECONDS,
            "from `Trainer.fit` until the first batch is on its device, in the slowest process:"
            " processes and workers started, store opened, shards placed",
            lambda rank: rank.first_batch_s, max, table="speed",
        ),
        *(
            Metric(
                f"{part}_s", "data loading" if part == "data" else part,
                lambda value: f"{value * 1e3:.2f} ms", meaning,
                lambda rank, part=part: rank.mean_s(part), table="parts",  # type: ignore[misc]
            )
            for part, meaning in PARTS.items()
        ),
        Metric(
            "private_bytes", "private memory", format_bytes,
            "pages that belong to only one process (USS), added up over all processes after the"
            " last step",
            **_of_processes(sum), table="memory",
        ),
        Metric(
            "shared_bytes", "shared memory", format_bytes,
            "the most shared pages in one process, such as those of a mapped store",
            **_of_processes(max, 1), table="memory",
        ),
        Metric(
            "state_bytes", "model state per device", format_bytes,
            "parameters, gradients and optimizer state of one process on one device, where they"
            " are largest; the buckets of DDP, a second copy of the gradients, are not seen",
            **_state_bytes(*STATE), table="memory",
        ),
        *(
            Metric(
                f"{kind}_bytes", kind, format_bytes, f"the part of the model state that is {kind}",
                **_state_bytes(kind),
            )
            for kind in STATE
        ),
        Metric(
            "communication_bytes", "communication volume per step", format_bytes,
            "what each process sends in collectives, the least that a ring needs, and copies"
            " between devices, as torch's dispatcher sees them in the main thread; between logical"
            " devices of one memory nothing moves",
            lambda rank: rank.moved_bytes, sum, run="check", table="memory",
        ),
        Metric(
            "device_peak_bytes", "peak", format_bytes,
            "CUDA's peak of allocated memory on the fullest device in the measured steps; processes"
            " on one device add up",
            lambda rank: rank.peaks,
            lambda values: max(sum(map(Counter, values), Counter()).values(), default=None),
            table="devices",
        ),
    )
}  # fmt: skip


def figures_of(ranks: Sequence[Rank], kind: str) -> dict[str, float]:
    """The known figures of one run of a kind."""
    found = {
        key: metric.reduce([*map(metric.collect, ranks)])
        for key, metric in METRICS.items()
        if metric.collect and metric.run == kind
    }
    return {key: float(value) for key, value in found.items() if value is not None}
