"""Two reports side by side: what became better or worse, and what is within the noise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

Verdict = Literal["better", "same", "worse", "unclear"]

#: A change of less than this share is the same, however narrow the ranges are: so much differs
#: between two starts of one program by where its memory happens to lie.
LEAST_CHANGE = 0.02
#: Of three runs before and three now that differ by noise alone (normal, simulated 20,000 times),
#: 4 % are taken for a change; of four and four 1 %; of two and two it would be 20 %.
LEAST_RUNS = 3


@dataclass(frozen=True)
class Measure:
    """A figure that two reports are compared by.

    Args:
        name: Its name in `Cost`.
        title: What people call it.
        more_is_better: Whether a larger figure is the better one.
    """

    name: str
    title: str
    more_is_better: bool


MEASURES = (
    Measure("samples_per_s", "samples/s", more_is_better=True),
    Measure("own_bytes", "own memory", more_is_better=False),
    Measure("first_batch_s", "time to first batch", more_is_better=False),
)


@dataclass(frozen=True)
class Change:
    """How one figure of one arm changed.

    Args:
        arm: The arm.
        measure: Name of the figure.
        old: The median before.
        new: The median now.
        verdict: ``better`` or ``worse`` where each run now lies on that side of each run before,
            and the medians are further apart than the runs of either report, and than
            `LEAST_CHANGE`; else ``same``. ``unclear`` where a report has fewer than `LEAST_RUNS`
            runs, which tell too little of the noise.
    """

    arm: str
    measure: str
    old: float
    new: float
    verdict: Verdict

    @property
    def ratio(self) -> float:
        """New over old."""
        return self.new / self.old if self.old else float("inf")


@dataclass(frozen=True)
class Difference:
    """A comparison of two reports.

    Args:
        old: Path of the old report.
        changes: Of the arms that both have.
        only_old: Arms that the old one alone has figures of.
        only_new: Arms that the new one alone has figures of.
        warnings: What else differs, so that figures may not be comparable.
    """

    old: str
    changes: tuple[Change, ...]
    only_old: tuple[str, ...]
    only_new: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def is_slower(self) -> bool:
        """Whether the speed of an arm became worse."""
        return any(
            change.measure == "samples_per_s" and change.verdict == "worse"
            for change in self.changes
        )


def judge_change(old: Sequence[float], new: Sequence[float], more_is_better: bool) -> Verdict:
    """Whether runs are better or worse than others, or the same within their noise.

    Args:
        old: The figure in each run before, one at least.
        new: The figure in each run now, one at least.
        more_is_better: Whether a larger figure is the better one.
    """
    before, now = median(old), median(new)
    if abs(now - before) <= LEAST_CHANGE * abs(before):
        return "same"
    if min(len(old), len(new)) < LEAST_RUNS:
        return "unclear"
    noise = max(max(old) - min(old), max(new) - min(new))
    are_apart = min(new) > max(old) or max(new) < min(old)
    if not are_apart or abs(now - before) <= noise:
        return "same"
    return "better" if (now > before) == more_is_better else "worse"


def compare_reports(old: Mapping[str, Any], new: Mapping[str, Any], path: str) -> Difference:
    """Compare two reports.

    Args:
        old: The values of the old ``report.json``.
        new: Those of the new one.
        path: Where the old one is.
    """
    costs = [
        {arm["arm"]: arm["cost"] for arm in report["arms"] if arm["cost"] is not None}
        for report in (old, new)
    ]
    before, now = costs
    changes = [
        Change(
            arm,
            measure.name,
            before[arm][measure.name]["median"],
            now[arm][measure.name]["median"],
            judge_change(
                before[arm][measure.name]["values"],
                now[arm][measure.name]["values"],
                measure.more_is_better,
            ),
        )
        for arm in now
        if arm in before
        for measure in MEASURES
        if _is_known(before[arm][measure.name]) and _is_known(now[arm][measure.name])
    ]
    return Difference(
        old=path,
        changes=tuple(changes),
        only_old=tuple(arm for arm in before if arm not in now),
        only_new=tuple(arm for arm in now if arm not in before),
        warnings=tuple(_warnings(old, new)),
    )


def _is_known(spread: Mapping[str, Any]) -> bool:
    values = spread["values"]
    return bool(values) and None not in (spread["median"], *values)


#: What must be equal for figures to be comparable, as section and name.
_CONDITIONS = (
    ("environment", "processor"),
    ("environment", "cores"),
    ("environment", "omp_num_threads"),
    ("environment", "devices"),
    ("environment", "packages"),
    ("settings", "accelerator"),
    ("settings", "devices"),
    ("settings", "global_batch"),
    ("settings", "precision"),
    ("settings", "steps"),
    ("settings", "warmup_steps"),
    ("model", "model_class"),
    ("model", "num_parameters"),
    ("data", "num_rows"),
    ("data", "row_bytes"),
)


def _warnings(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    found = []
    for section, name in _CONDITIONS:
        before, now = old[section].get(name), new[section].get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            found += [
                f"{key} was {before.get(key)} and is {now.get(key)}"
                for key in sorted({*before, *now})
                if before.get(key) != now.get(key)
            ]
        elif before != now:
            found.append(f"{name} was {before} and is {now}")
    return found
