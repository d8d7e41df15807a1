"""The figures of a comparison. Each is one entry of `METRICS`, and nothing else knows it.

An entry says what a process collects at the end of a run, and how the figure is reduced from what
all processes collected. Tables, the page, the check against a baseline and the list in
docs/compare.md follow from it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median
from typing import Any, Literal

import lightning as L

from lightning_memmap.compare.memory import device_peaks, process_memory
from lightning_memmap.sizes import format_bytes

#: Parts of a step, in the order in which they happen.
PARTS = ("data", "transfer", "forward", "backward", "optimizer", "other")
#: Kinds of model state, in the order in which a picture stacks them.
STATE = ("parameters", "gradients", "optimizer")
#: The figure whose regression has its own exit code.
SPEED = "samples_per_s"


@dataclass
class Observed:
    """What a process has seen when a run ends, for metrics to collect from.

    Args:
        trainer: The Trainer.
        steps: Seconds of each of `PARTS` of each measured step, in a timed run.
        first_batch_s: Seconds from ``Trainer.fit`` until the first batch was on its device.
        state_bytes: In a check run: by device, the bytes of parameters, gradients and optimizer.
        moved_bytes: In a check run: bytes that left this process or a device in a step.
    """

    trainer: L.Trainer
    steps: list[dict[str, float]] = field(default_factory=list)
    first_batch_s: float = 0.0
    state_bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    moved_bytes: int = 0


@dataclass(frozen=True)
class Rank:
    """What one process of a run writes down.

    Args:
        rank: Its global rank.
        world_size: Processes of the run.
        data_rank: Its data-parallel rank. Pipeline stages and tensor-parallel ranks share one.
        losses: The loss of each step; NaN where ``training_step`` returns none.
        values: What metrics collected, by the name of the function; in a check run also what the
            parity check needs.
    """

    rank: int
    world_size: int
    data_rank: int
    losses: Sequence[float]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """The processes of a run, and what a figure may be relative to.

    Args:
        ranks: What they wrote.
        global_batch: Rows of a step.
        ideal_rate: Rows per second of the same strategy replaying one batch; None if not measured.
    """

    ranks: Sequence[Rank]
    global_batch: int
    ideal_rate: float | None = None

    def values(self, collect: Callable[[Observed], Any]) -> list[Any]:
        """What a function collected in each process."""
        return [rank.values[collect.__name__] for rank in self.ranks]


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
    """One figure.

    Args:
        key: Its name in ``report.json``.
        label: Its name in tables.
        unit: How it is written.
        meaning: What it is, in a sentence.
        collect: What each process notes at the end of a run, as JSON holds it. Metrics may share
            a function; it is then called once.
        reduce: Computes the figure of a run; None where it is not known.
        run: Whether it is measured in each timed run or in the check run.
        better: Whether ``more`` or ``less`` is better. A baseline is compared in these figures.
        table: The table that shows it, of `TABLES`; empty for none.
        shows_range: Whether the table shows the lowest and the highest run too.
    """

    key: str
    label: str
    unit: Unit
    meaning: str
    collect: Callable[[Observed], Any]
    reduce: Callable[[Run], float | None]
    run: Literal["timed", "check"] = "timed"
    better: Literal["more", "less"] | None = None
    table: str = ""
    shows_range: bool = False


#: The titles of tables, and the unit of all columns where the title names it.
TABLES: dict[str, tuple[str, Unit | None]] = {
    "speed": ("Speed: the median of the runs, and lowest..highest", None),
    "parts": ("Where a step goes: means in ms", MILLISECONDS),
    "memory": ("Memory and communication", None),
    "devices": ("GPUs: peak memory in the measured steps", None),
}


def steps(seen: Observed) -> Any:
    """Seconds of each part of each measured step."""
    return seen.steps


def first_batch(seen: Observed) -> Any:
    """Seconds to the first batch."""
    return seen.first_batch_s


def memory(seen: Observed) -> Any:
    """Private and shared bytes by process, of this process and those that it has started."""
    return process_memory()


def peaks(seen: Observed) -> Any:
    """Peak bytes by device, allocated and reserved."""
    return device_peaks()


def state(seen: Observed) -> Any:
    """Bytes of the model by device."""
    return seen.state_bytes


def moved(seen: Observed) -> Any:
    """Bytes that move in a step."""
    return seen.moved_bytes


def rate_of(run: Run) -> float:
    """Rows per second over all processes. Of processes with the same rows, the slowest counts."""
    shares = shares_of(run.ranks)
    return sum(
        run.global_batch / len(shares) / max(_step_s(rank) for rank in share) for share in shares
    )


def _step_s(rank: Rank) -> float:
    return fmean(sum(parts.values()) for parts in rank.values["steps"])


def _part_s(run: Run, *parts: str) -> float:
    return fmean(sum(step[part] for part in parts) for own in run.values(steps) for step in own)


def _all_processes(run: Run) -> list[Any]:
    # Ranks see their own child processes, and rank 0 also the ranks that it started.
    found = {pid: sizes for own in reversed(run.values(memory)) for pid, sizes in own.items()}
    return list(found.values())


def _memory_bytes(run: Run, index: int, total: Callable[[Iterable[int]], int]) -> float | None:
    known = [sizes[index] for sizes in _all_processes(run)]
    return None if None in known else total(known)


def _peak_bytes(run: Run, index: int) -> float | None:
    """Of the fullest device. Processes on one device add up."""
    sums: dict[str, int] = {}
    for own in run.values(peaks):
        for device, found in own.items():
            sums[device] = sums.get(device, 0) + found[index]
    return max(sums.values(), default=None)


def _state_bytes(run: Run, *kinds: str) -> float:
    """Bytes of some kinds, on the device that has most of all kinds."""
    devices: list[dict[str, int]] = [sizes for own in run.values(state) for sizes in own.values()]
    fullest = max(devices, key=lambda sizes: sum(sizes.values()), default={})
    return sum(fullest.get(kind, 0) for kind in kinds)


_PART_MEANINGS = {
    "data": "the computing stream waits for the loader; where super-batches are assembled in the"
    " loader, as under `memmap_superbatch`, this includes bringing them to the root device",
    "transfer": "the strategy's `batch_to_device`",
    "forward": "`training_step`; with the optimizer, in manual optimization",
    "backward": "the backward pass, with the collectives that it waits for",
    "optimizer": "`optimizer_step`: clearing gradients, clipping, the step itself",
    "other": "the Trainer's own work, callbacks, logging, and the stop signal that Lightning"
    " broadcasts in each step of several processes",
}

METRICS = {
    metric.key: metric
    for metric in (
        Metric(
            SPEED, "samples/s", COUNT, "rows per second over all processes",
            steps, rate_of, better="more", table="speed", shows_range=True,
        ),
        Metric(
            "no_load_share", "of no-load upper bound", SHARE,
            "samples/s relative to the same strategy with `+ideal`, which replays one batch",
            steps, lambda run: rate_of(run) / run.ideal_rate if run.ideal_rate else None,
            table="speed",
        ),
        Metric(
            "step_s", "step", MILLISECONDS, "the median step on rank 0",
            steps, lambda run: median(sum(step.values()) for step in run.values(steps)[0]),
            table="speed",
        ),
        Metric(
            "data_stall", "data stall", SHARE,
            "share of a step that waits for its batch: data loading and transfer",
            steps, lambda run: _part_s(run, "data", "transfer") / _part_s(run, *PARTS),
            table="speed",
        ),
        Metric(
            "first_batch_s", "time to first batch", SECONDS,
            "from `Trainer.fit` until the first batch is on its device, in the slowest process:"
            " processes and workers started, store opened, shards placed",
            first_batch, lambda run: float(max(run.values(first_batch))), better="less",
            table="speed",
        ),
        *(
            Metric(
                f"{part}_s", "data loading" if part == "data" else part, MILLISECONDS, meaning,
                steps, lambda run, part=part: _part_s(run, part),  # type: ignore[misc]
                table="parts",
            )
            for part, meaning in _PART_MEANINGS.items()
        ),
        Metric(
            "num_processes", "processes", COUNT, "training processes and their workers",
            memory, lambda run: len(_all_processes(run)), table="memory",
        ),
        Metric(
            "private_bytes", "private memory", BYTES,
            "pages that belong to only one process (USS), added up over all processes after the"
            " last step",
            memory, partial(_memory_bytes, index=0, total=sum), better="less", table="memory",
        ),
        Metric(
            "shared_bytes", "shared memory", BYTES,
            "the most shared pages in one process, such as those of a mapped store",
            memory, partial(_memory_bytes, index=1, total=max), table="memory",
        ),
        Metric(
            "state_bytes", "model state per device", BYTES,
            "parameters, gradients and optimizer state of one process on one device, where they"
            " are largest; the buckets of DDP, a second copy of the gradients, are not seen",
            state, lambda run: _state_bytes(run, *STATE), run="check", table="memory",
        ),
        *(
            Metric(
                f"{kind}_bytes", kind, BYTES, f"the part of the model state that is {kind}",
                state, lambda run, kind=kind: _state_bytes(run, kind),  # type: ignore[misc]
                run="check",
            )
            for kind in STATE
        ),
        Metric(
            "communication_bytes", "communication volume per step", BYTES,
            "what each process sends in collectives, the least that a ring needs, and copies"
            " between devices, as torch's dispatcher sees them in the main thread; between logical"
            " devices of one memory nothing moves",
            moved, lambda run: sum(run.values(moved)), run="check", table="memory",
        ),
        Metric(
            "device_peak_bytes", "peak", BYTES,
            "CUDA's peak of allocated memory on the fullest device in the measured steps",
            peaks, partial(_peak_bytes, index=0), better="less", table="devices",
        ),
        Metric(
            "device_reserved_bytes", "reserved", BYTES, "the same of reserved memory",
            peaks, partial(_peak_bytes, index=1), table="devices",
        ),
    )
}  # fmt: skip


def collected(seen: Observed, kind: str) -> dict[str, Any]:
    """What the metrics of a kind of run note in this process, by the name of the function."""
    return {m.collect.__name__: m.collect(seen) for m in METRICS.values() if m.run == kind}


def figures_of(timed: Sequence[Run], check: Run | None) -> dict[str, list[float]]:
    """The figures that are known: by key a value for each timed run, or one of the check run.

    Without timed runs there are none.
    """
    runs = {"timed": timed, "check": [check] if check and timed else []}
    found = {
        key: [metric.reduce(run) for run in runs[metric.run]] for key, metric in METRICS.items()
    }
    return {
        key: [value for value in values if value is not None]
        for key, values in found.items()
        if values and None not in values
    }
