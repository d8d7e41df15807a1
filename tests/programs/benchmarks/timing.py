"""What the benchmark programs share: timing in turn, medians with their range, the machine."""

import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from resource import RUSAGE_CHILDREN, getrusage
from time import perf_counter, process_time

import torch


def cpu_time() -> float:
    """Seconds that this process was given, and those of its processes that have ended."""
    ended = getrusage(RUSAGE_CHILDREN)
    return process_time() + ended.ru_utime + ended.ru_stime


#: "cpu" is the time that the process was given, with its workers once they have ended. Other work
#: on the machine disturbs it less, and on an idle machine it is the same for one thread.
CLOCKS: dict[str, Callable[[], float]] = {"wall": perf_counter, "cpu": cpu_time}


def in_turn(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    clock: str = "wall",
    least_s: float = 0.0,
) -> dict[str, list[float]]:
    """Seconds of each run in each round, after one round that is not counted.

    The runs take turns, and each round begins with another one, so that all see the same noise.
    One that is over before ``least_s`` is repeated for so long, and its first time is not counted:
    that would tell how much of the processor's caches the run before it has used.
    """
    now = CLOCKS[clock]
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for index in range(rounds + 1):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            took = _turn(runs[name], now, least_s)
            if index:
                seconds[name].append(took)
    return seconds


def _turn(run: Callable[[], object], now: Callable[[], float], least_s: float) -> float:
    start = now()
    run()
    took = now() - start
    if took >= least_s:
        return took
    start, count = now(), 0
    while (took := now() - start) < least_s:
        run()
        count += 1
    return took / count


def pairwise_ratios(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """The ratio in each round."""
    return [first / second for first, second in zip(one, other, strict=True)]


def spread(values: Sequence[float], form: str = "{:.2f}") -> str:
    """Median and range."""
    low, middle, high = (
        form.format(value) for value in (min(values), statistics.median(values), max(values))
    )
    return f"{middle} ({low}..{high})"


def machine() -> str:
    """Describe in one line what this runs on."""
    count = torch.get_num_threads()
    return (
        f"{platform.processor() or platform.machine()}, {count} thread{'s' * (count > 1)},"
        f" Python {platform.python_version()}, torch {torch.__version__}"
    )
