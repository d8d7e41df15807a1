"""The figures of a comparison, each declared once.

The tables in the terminal and on the page, the regression check and the list in docs/compare.md
all follow from `FIGURES`. A figure that needs a new measurement also needs a field in `records`
and the line in ``compare/run/measure.py`` that fills it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Literal, TypeAlias

from lightning_memmap.compare.report.footprint import Footprint
from lightning_memmap.compare.report.records import PARTS, TimedRank, by_data_rank
from lightning_memmap.sizes import format_bytes

#: The records of all processes of one timed run.
Run: TypeAlias = Sequence[TimedRank]
#: The figure whose regression has its own exit code.
SPEED = "samples_per_s"


@dataclass(frozen=True)
class Unit:
    """How a figure is written.

    Args:
        name: What stands beside the label; empty where the number says it.
        write: Makes the text of a number, which is in SI base units.
    """

    name: str
    write: Callable[[float], str]


COUNT = Unit("", "{:,.0f}".format)
SHARE = Unit("", "{:.0%}".format)
BYTES = Unit("", lambda value: format_bytes(int(value)))
SECONDS = Unit("s", "{:.2f}".format)
MILLISECONDS = Unit("ms", lambda value: f"{value * 1e3:.2f}")


@dataclass(frozen=True)
class Measured:
    """What the figures of a variant are computed from.

    Args:
        runs: Its timed runs.
        footprint: From its check run; None where there was none.
        global_batch: Rows of a step.
        steps: Steps that were measured in each run.
        ideal_rate: Rows per second of the same strategy replaying one batch; None where that was
            not measured.
        flops_per_row: Floating point operations for a row, counted in the reference; None where
            there is no reference.
    """

    runs: Sequence[Run]
    footprint: Footprint | None
    global_batch: int
    steps: int
    ideal_rate: float | None = None
    flops_per_row: float | None = None

    @property
    def rate(self) -> float:
        """Rows per second, the median of the runs."""
        return median(map(rate_of, self.runs))


@dataclass(frozen=True)
class Figure:
    """One figure.

    Args:
        key: Its name in ``report.json``.
        label: Its name in tables.
        unit: How it is written.
        meaning: What it is, in a sentence.
        measure: Computes it: one value for each timed run, or one in all. None or nothing where
            it is not known.
        better: Whether ``more`` or ``less`` is better. The regression check compares the figures
            that say so.
        table: The table that shows it, of `TABLES`; empty for none.
        shows_range: Whether the table shows the lowest and the highest run too.
    """

    key: str
    label: str
    unit: Unit
    meaning: str
    measure: Callable[[Measured], Iterable[float | None]]
    better: Literal["more", "less"] | None = None
    table: str = ""
    shows_range: bool = False


@dataclass(frozen=True)
class FigureTable:
    """A table of figures.

    Args:
        section: Section of the page.
        title: Its title.
        unit: The unit of all its columns, where the title names it.
    """

    section: Literal["Speed", "Memory and movement"]
    title: str
    unit: Unit | None = None


TABLES = {
    "speed": FigureTable("Speed", "Speed: the median of the runs, and lowest..highest"),
    "parts": FigureTable("Speed", "Where a step goes: means in ms", MILLISECONDS),
    "memory": FigureTable("Memory and movement", "Memory, and what moves in a step"),
    "devices": FigureTable("Memory and movement", "GPUs: peak in the measured steps"),
}


def each_run(value: Callable[[Run], float | None]) -> Callable[[Measured], list[float | None]]:
    """Make a measurement that gives one value for each timed run.

    Args:
        value: Computes the value of one run; None where it is not known.

    Returns:
        A function to use as `Figure.measure`.
    """
    return lambda measured: [value(run) for run in measured.runs]


def rate_of(run: Run) -> float:
    """Return the rows per second of a run, over all processes.

    Of processes that have the same rows, the slowest counts.

    Args:
        run: The records of all processes of the run.
    """
    return sum(min(rank.samples_per_s for rank in share) for share in by_data_rank(run))


def _part_s(run: Run, part: str) -> float:
    return fmean(step[part] for rank in run for step in rank.parts_s)


def _data_share(run: Run) -> float:
    step_s = sum(_part_s(run, part) for part in PARTS)
    return _part_s(run, "data") / step_s if step_s else 0.0


def _own_bytes(run: Run) -> float | None:
    # Ranks see their own child processes, and rank 0 also the ranks that it started.
    own = {process.pid: process.own for rank in reversed(run) for process in rank.memory}.values()
    known = [size for size in own if size is not None]
    return sum(known) if len(known) == len(own) else None


def _shared_bytes(run: Run) -> float | None:
    found = [process.shared for rank in run for process in rank.memory]
    return max((size for size in found if size is not None), default=None)


def _num_processes(run: Run) -> int:
    return len({process.pid for rank in run for process in rank.memory})


def _peak(kind: Literal["allocated", "reserved"]) -> Callable[[Run], float | None]:
    def peak(run: Run) -> float | None:
        """Of the fullest device. Processes on one device add up."""
        sums: dict[str, int] = {}
        for rank in run:
            for device, found in rank.device_peaks.items():
                sums[device] = sums.get(device, 0) + getattr(found, kind)
        return max(sums.values(), default=None)

    return peak


def _of_footprint(value: Callable[[Footprint], int]) -> Callable[[Measured], list[float | None]]:
    return lambda measured: [value(measured.footprint) if measured.footprint else None]


_PART_MEANINGS = {
    "data": "waiting for the loader; where super-batches are assembled in the loader, as under"
    " `memmap_superbatch`, this includes bringing them to the root device",
    "transfer": "the strategy's `batch_to_device`",
    "forward": "`training_step`; with the optimizer, in manual optimization",
    "backward": "the backward pass, with the collectives that it waits for",
    "optimizer": "`optimizer_step`: clearing gradients, clipping, the step itself",
    "other": "the Trainer's own work, callbacks, logging, and the stop signal that Lightning"
    " broadcasts in each step of several processes",
}

FIGURES = {
    figure.key: figure
    for figure in (
        Figure(
            SPEED, "samples/s", COUNT,
            "rows per second over all processes",
            each_run(rate_of), better="more", table="speed", shows_range=True,
        ),
        Figure(
            "ideal_share", "of ideal", SHARE,
            "samples/s relative to the same strategy with `+ideal`",
            lambda measured: [measured.rate / measured.ideal_rate if measured.ideal_rate else None],
            table="speed",
        ),
        Figure(
            "step_s", "step", MILLISECONDS, "the median step on rank 0",
            each_run(lambda run: median(run[0].step_s)), table="speed",
        ),
        Figure(
            "data_share", "waiting", SHARE, "share of a step that waits for data",
            each_run(_data_share), table="speed",
        ),
        Figure(
            "first_batch_s", "start", SECONDS,
            "from `Trainer.fit` until the first batch is on its device, in the slowest process:"
            " processes and workers started, store opened, shards placed",
            each_run(lambda run: max(rank.first_batch_s for rank in run)),
            better="less", table="speed",
        ),
        Figure(
            "process_to_first_batch_s", "process to 1st batch", SECONDS,
            "the same from the start of the process, with its imports",
            each_run(lambda run: max(rank.process_to_first_batch_s for rank in run)),
        ),
        *(
            Figure(
                f"{part}_s", part, MILLISECONDS, meaning,
                each_run(partial(_part_s, part=part)),
                table="parts",
            )
            for part, meaning in _PART_MEANINGS.items()
        ),
        Figure(
            "num_processes", "processes", COUNT, "training processes and their workers",
            each_run(_num_processes), table="memory",
        ),
        Figure(
            "own_bytes", "own", BYTES,
            "pages that belong to only one process, added up over all processes after the last"
            " step, as Linux accounts for them",
            each_run(_own_bytes), better="less", table="memory",
        ),
        Figure(
            "max_shared_bytes", "shared", BYTES,
            "the most shared pages in one process, such as those of a mapped store",
            each_run(_shared_bytes), table="memory",
        ),
        Figure(
            "state_bytes_per_device", "state/device", BYTES,
            "parameters, gradients and optimizer state of one process on one device, where they"
            " are largest; the buckets of DDP, a second copy of the gradients, are not seen",
            _of_footprint(lambda footprint: footprint.state_bytes), table="memory",
        ),
        Figure(
            "moved_bytes", "moved/step", BYTES,
            "what each process sends in collectives, the least that a ring needs, and copies"
            " between devices, as torch's dispatcher sees them in the main thread; between logical"
            " devices of one memory nothing moves",
            _of_footprint(lambda footprint: footprint.moved_bytes), table="memory",
        ),
        Figure(
            "device_peak_bytes", "peak", BYTES,
            "CUDA's peak of allocated memory on the fullest device in the measured steps",
            each_run(_peak("allocated")), better="less", table="devices",
        ),
        Figure(
            "device_reserved_bytes", "reserved", BYTES,
            "the same of reserved memory", each_run(_peak("reserved")), table="devices",
        ),
        Figure(
            "flops_per_s", "FLOP/s", COUNT,
            "floating point operations per second, as torch counts them in the reference",
            lambda measured: [
                measured.flops_per_row * measured.rate if measured.flops_per_row else None
            ],
        ),
        Figure(
            "threads", "threads", COUNT, "threads that torch uses in each process",
            each_run(lambda run: run[0].threads),
        ),
    )
}  # fmt: skip


def figures_of(measured: Measured) -> dict[str, tuple[float, ...]]:
    """Compute the figures of a variant.

    Args:
        measured: What they are computed from.

    Returns:
        The figures that are known, by key, with a value for each run or one in all; nothing where
        there are no timed runs.
    """
    if not measured.runs:
        return {}
    found = {figure.key: tuple(figure.measure(measured)) for figure in FIGURES.values()}
    return {
        key: tuple(value for value in values if value is not None)
        for key, values in found.items()
        if values and None not in values
    }
