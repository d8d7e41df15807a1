"""The figures of a comparison. Each is one entry of `FIGURES`, and no other code knows it.

An entry computes a figure from the records of the processes of one run, or it relates two variants
and is filled in when both have run. Tables and pages follow from the entries.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from lightning_memmap.compare.run_files import RankRecord, RunKind
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


def compute_part_s(part: str, ranks: Ranks) -> float:
    """Compute the mean seconds of one part of a step."""
    return fmean(record.mean_s(part) for record in ranks)


def list_processes(ranks: Ranks) -> list[Sequence[int]]:
    """List private and shared bytes of each process once. Ranks see their descendants, too."""
    by_id = {pid: sizes for record in reversed(ranks) for pid, sizes in record.processes.items()}
    return [*by_id.values()]


def compute_state_bytes(kinds: Sequence[str], ranks: Ranks) -> int:
    """Return the bytes of some kinds of state on the device that has most state in all."""
    states = [Counter(state) for record in ranks for state in record.state_bytes.values()]
    largest = max(states, key=Counter.total, default=Counter[str]())
    return sum(largest[kind] for kind in kinds)


def compute_device_peak(ranks: Ranks) -> int | None:
    """Return the peak of the fullest accelerator; processes on one device add up."""
    peaks: Counter[str] = sum((Counter(record.peaks) for record in ranks), Counter())
    return max(peaks.values(), default=None)


#: The titles of tables, by key.
TABLES = {
    "speed": "Speed: the median of the runs, and lowest..highest",
    "parts": "Where a step goes: means",
    "memory": "Memory of all processes",
    "state": "Model state on the device that has most",
    "devices": "GPUs: peak memory in the measured steps",
}
_percent = "{:.0%}".format


@dataclass(frozen=True)
class Figure:
    """One figure of a variant.

    Args:
        key: Name in ``report.json``.
        label: Heading of its column.
        table: Key of its table in `TABLES`.
        format: Writes a value as text.
        compute: Computes it from the records of one run, a check run if its table is ``state`` and
            otherwise a timed run; None stands for unknown. A figure that relates two variants has
            no such function.
        meaning: Description for the page and the docs.
    """

    key: str
    label: str
    table: str
    format: Callable[[float], str]
    compute: Callable[[Ranks], float | None] | None
    meaning: str

    @property
    def run(self) -> RunKind:
        """The kind of run that it is computed from."""
        return "check" if self.table == "state" else "timed"


_FIGURES = (
    Figure(
        SPEED, "samples/s", "speed", "{:,.0f}".format, compute_rate,
        "rows per second over all processes",
    ),
    Figure(
        NO_LOAD, "of no-load upper bound", "speed", _percent, None,
        "samples/s relative to the same strategy with `+ideal`, which replays one batch",
    ),
    Figure(
        "data_stall", "data stall", "speed", _percent, compute_data_stall,
        "fraction of a step that waits for its batch: data loading and transfer",
    ),
    Figure(
        "first_batch_s", "time to first batch", "speed", "{:.2f} s".format,
        lambda ranks: max(record.first_batch_s for record in ranks),
        "from `Trainer.fit` until the first batch is on its device, in the slowest process:"
        " processes and workers started, store opened, shards placed",
    ),
    *(
        Figure(
            f"{part}_s", "data loading" if part == "data" else part, "parts",
            lambda seconds: f"{seconds * 1e3:.2f} ms", partial(compute_part_s, part), meaning,
        )
        for part, meaning in STEP_PARTS.items()
    ),
    Figure(
        "private_bytes", "private memory", "memory", format_bytes,
        lambda ranks: sum(private for private, _ in list_processes(ranks)),
        "pages that belong to only one process (USS), added up over all processes after the last"
        " step",
    ),
    Figure(
        "shared_bytes", "shared memory", "memory", format_bytes,
        lambda ranks: max(shared for _, shared in list_processes(ranks)),
        "the most shared pages in one process, such as the pages of a mapped store",
    ),
    Figure(
        "state_bytes", "all model state", "state", format_bytes,
        partial(compute_state_bytes, STATE),
        "parameters, gradients and optimizer state of one process on one device, where they are"
        " largest; the buckets of DDP, a second copy of the gradients, are not seen",
    ),
    *(
        Figure(
            f"{kind}_bytes", kind, "state", format_bytes, partial(compute_state_bytes, (kind,)),
            f"the part of the model state that is {kind}",
        )
        for kind in STATE
    ),
    Figure(
        "device_peak_bytes", "peak", "devices", format_bytes, compute_device_peak,
        "CUDA's peak of allocated memory on the fullest device in the measured steps; processes on"
        " one device add up",
    ),
)  # fmt: skip
#: All figures, by key.
FIGURES = {figure.key: figure for figure in _FIGURES}


def compute_figures(ranks: Ranks, kind: RunKind) -> dict[str, float]:
    """Compute the figures of one run of a kind; unknown ones are missing."""
    computed = {
        key: figure.compute(ranks)
        for key, figure in FIGURES.items()
        if figure.compute is not None and figure.run == kind
    }
    return {key: float(value) for key, value in computed.items() if value is not None}
