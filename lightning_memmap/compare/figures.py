"""The figures of a comparison. Each is one entry of `FIGURES`, and no other code knows it.

An entry computes a figure from the records of the processes of one run, or it relates two variants
and is filled in when both have run. Tables and pages follow from the entries.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Literal

from lightning_memmap.sizes import format_bytes

#: Parts of a step, in the order in which they happen.
STEP_PARTS = {
    "data": "the compute stream waits for the loader; where super-batches are assembled in the"
    " loader, as under `memmap_superbatch`, this includes the copies to the root device",
    "transfer": "the strategy's `batch_to_device`",
    "forward": "`training_step`; under `memmap_pipeline` with the backward pass, and in manual"
    " optimization with clearing gradients and clipping",
    "backward": "the backward pass, with the collectives that it waits for",
    "optimizer": "`optimizer_step`: clearing gradients, clipping, the step itself; in manual"
    " optimization the step alone",
    "other": "the Trainer's own work, callbacks, logging, and the stop signal that Lightning"
    " broadcasts in each step of several processes",
}
#: Kinds of model state.
STATE = ("parameters", "gradients", "optimizer")
#: The figure by which variants are sorted.
SPEED = "samples_per_s"
#: The speed relative to the same strategy with ``+ideal``.
NO_LOAD = "no_load_share"


@dataclass(frozen=True)
class RankRecord:
    """The measurements of one process of a run, which it writes to a JSON file."""

    rank: int
    world_size: int
    data_rank: int
    global_batch: int
    losses: Sequence[float]
    first_batch_s: float = 0.0
    #: Seconds of each part of each measured step.
    steps: Sequence[Mapping[str, float]] = ()
    #: Private and shared bytes of this process and all its descendants, by process id.
    processes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    #: Peak of allocated bytes, by accelerator.
    peaks: Mapping[str, int] = field(default_factory=dict)
    #: Bytes of the model's state, by device and kind.
    state_bytes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    #: Hash of the rows of each step of a check run, as the loader returned them.
    hashes: Sequence[int] = ()
    #: Number of parts of this process's rows that go through the module separately.
    num_separate_batches: int = 1
    parameters: Sequence[str] = ()
    #: Digests of the weights before the first step and after the last one; on global rank zero.
    initial: Mapping[str, str] = field(default_factory=dict)
    final: Mapping[str, str] = field(default_factory=dict)
    #: Squared distance of the final weights: in the reference run from the initial weights, in any
    #: other run from the reference. None if names or shapes differ, and on other ranks.
    squared_distance: float | None = None

    def mean_s(self, *parts: str) -> float:
        """Return the mean seconds of some parts of a step."""
        return fmean(sum(step[part] for part in parts) for step in self.steps)


Ranks = Sequence[RankRecord]


def group_by_data_rank(ranks: Ranks) -> list[list[RankRecord]]:
    """Group the processes that train on the same rows, in the order of data-parallel ranks."""
    groups: dict[int, list[RankRecord]] = defaultdict(list)
    for record in sorted(ranks, key=lambda record: record.data_rank):
        groups[record.data_rank].append(record)
    return [*groups.values()]


def compute_rate(ranks: Ranks) -> float:
    """Compute rows per second over all processes. The slowest counts where rows are the same."""
    return fmean(
        min(record.global_batch / record.mean_s(*STEP_PARTS) for record in group)
        for group in group_by_data_rank(ranks)
    )


def compute_data_stall(ranks: Ranks) -> float:
    """Compute the fraction of a step that waits for its batch."""
    return fmean(record.mean_s("data", "transfer") / record.mean_s(*STEP_PARTS) for record in ranks)


def compute_first_batch_s(ranks: Ranks) -> float:
    """Return the time to the first batch in the slowest process."""
    return max(record.first_batch_s for record in ranks)


def compute_part_s(part: str, ranks: Ranks) -> float:
    """Compute the mean seconds of one part of a step."""
    return fmean(record.mean_s(part) for record in ranks)


def _processes(ranks: Ranks) -> list[Sequence[int]]:
    """List private and shared bytes of each process once. Ranks see their descendants, too."""
    by_id = {pid: sizes for record in reversed(ranks) for pid, sizes in record.processes.items()}
    return [*by_id.values()]


def compute_private_bytes(ranks: Ranks) -> int:
    """Add up the private bytes of all processes."""
    return sum(private for private, _ in _processes(ranks))


def compute_shared_bytes(ranks: Ranks) -> int:
    """Return the most shared bytes of any process."""
    return max(shared for _, shared in _processes(ranks))


def compute_state_bytes(kinds: Sequence[str], ranks: Ranks) -> int:
    """Return the bytes of some kinds of state on the device that has most state in all."""
    states = [state for record in ranks for state in record.state_bytes.values()]
    largest: Mapping[str, int] = max(
        states, key=lambda state: sum(state.values()), default=Counter()
    )
    return sum(largest.get(kind, 0) for kind in kinds)


def compute_device_peak(ranks: Ranks) -> int | None:
    """Return the peak of the fullest accelerator; processes on one device add up."""
    peaks: Counter[str] = sum((Counter(record.peaks) for record in ranks), Counter())
    return max(peaks.values(), default=None)


def format_count(value: float) -> str:
    """Format a number of rows."""
    return f"{value:,.0f}"


def format_percent(value: float) -> str:
    """Format a fraction."""
    return f"{value:.0%}"


def format_seconds(value: float) -> str:
    """Format seconds."""
    return f"{value:.2f} s"


def format_milliseconds(value: float) -> str:
    """Format seconds as milliseconds."""
    return f"{value * 1e3:.2f} ms"


#: The titles of tables, by key.
TABLES = {
    "speed": "Speed: the median of the runs, and lowest..highest",
    "parts": "Where a step goes: means",
    "memory": "Memory of all processes",
    "state": "Model state on the device that has most",
    "devices": "GPUs: peak memory in the measured steps",
}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of a variant.

    Args:
        key: Name in ``report.json``.
        label: Heading of its column.
        meaning: Description for the page and the docs.
        table: Key of its table in `TABLES`.
        format: Writes a value as text.
        run: Kind of run that it is computed from.
        compute: Computes it from the records of one run; None stands for unknown. A figure that
            relates two variants has no such function.
    """

    key: str
    label: str
    meaning: str
    table: str
    format: Callable[[float], str]
    run: Literal["timed", "check"] = "timed"
    compute: Callable[[Ranks], float | None] | None = None


_SPEED = [
    Figure(
        key=SPEED,
        label="samples/s",
        meaning="rows per second over all processes",
        table="speed",
        format=format_count,
        compute=compute_rate,
    ),
    Figure(
        key=NO_LOAD,
        label="of no-load upper bound",
        meaning="samples/s relative to the same strategy with `+ideal`, which replays one batch",
        table="speed",
        format=format_percent,
    ),
    Figure(
        key="data_stall",
        label="data stall",
        meaning="fraction of a step that waits for its batch: data loading and transfer",
        table="speed",
        format=format_percent,
        compute=compute_data_stall,
    ),
    Figure(
        key="first_batch_s",
        label="time to first batch",
        meaning="from `Trainer.fit` until the first batch is on its device, in the slowest process:"
        " processes and workers started, store opened, shards placed",
        table="speed",
        format=format_seconds,
        compute=compute_first_batch_s,
    ),
]
_PART_TIMES = [
    Figure(
        key=f"{part}_s",
        label="data loading" if part == "data" else part,
        meaning=meaning,
        table="parts",
        format=format_milliseconds,
        compute=partial(compute_part_s, part),
    )
    for part, meaning in STEP_PARTS.items()
]
_MEMORY = [
    Figure(
        key="private_bytes",
        label="private memory",
        meaning="pages that belong to only one process (USS), added up over all processes after the"
        " last step",
        table="memory",
        format=format_bytes,
        compute=compute_private_bytes,
    ),
    Figure(
        key="shared_bytes",
        label="shared memory",
        meaning="the most shared pages in one process, such as the pages of a mapped store",
        table="memory",
        format=format_bytes,
        compute=compute_shared_bytes,
    ),
]
_STATE = [
    Figure(
        key="state_bytes",
        label="all model state",
        meaning="parameters, gradients and optimizer state of one process on one device, where they"
        " are largest; the buckets of DDP, a second copy of the gradients, are not seen",
        table="state",
        format=format_bytes,
        run="check",
        compute=partial(compute_state_bytes, STATE),
    ),
    *(
        Figure(
            key=f"{kind}_bytes",
            label=kind,
            meaning=f"the part of the model state that is {kind}",
            table="state",
            format=format_bytes,
            run="check",
            compute=partial(compute_state_bytes, (kind,)),
        )
        for kind in STATE
    ),
]
_DEVICES = [
    Figure(
        key="device_peak_bytes",
        label="peak",
        meaning="CUDA's peak of allocated memory on the fullest device in the measured steps;"
        " processes on one device add up",
        table="devices",
        format=format_bytes,
        compute=compute_device_peak,
    ),
]
#: All figures, by key.
FIGURES = {figure.key: figure for figure in (*_SPEED, *_PART_TIMES, *_MEMORY, *_STATE, *_DEVICES)}


def compute_figures(ranks: Ranks, kind: str) -> dict[str, float]:
    """Compute the figures of one run of a kind; unknown ones are missing."""
    figures = {}
    for key, figure in FIGURES.items():
        if figure.compute is not None and figure.run == kind:
            value = figure.compute(ranks)
            if value is not None:
                figures[key] = float(value)
    return figures
