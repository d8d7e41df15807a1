"""The regression check: two reports side by side, and which changes are more than noise."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from msgspec import to_builtins

from lightning_memmap.compare.report.figures import FIGURES
from lightning_memmap.compare.report.report import Change, Regression, Report, Verdict

#: A change of less than this share counts as none, however narrow the ranges are: two starts of
#: one program differ by as much, depending on where its memory happens to lie.
LEAST_CHANGE = 0.02
#: Of three runs before and three now that differ by noise alone (normal, simulated 20,000 times),
#: 4 % are taken for a change; of four and four 1 %; of two and two it would be 20 %.
LEAST_RUNS = 3
#: What must be equal for figures to be comparable, by section of the report.
_CONDITIONS = {
    "environment": ("processor", "cores", "omp_num_threads", "devices", "packages"),
    "settings": ("accelerator", "devices", "global_batch", "precision", "steps", "warmup_steps"),
    "model": ("model_class", "num_parameters"),
    "data": ("num_rows", "row_bytes"),
}


def verdict_on(old: Sequence[float], new: Sequence[float], more_is_better: bool) -> Verdict:
    """Whether runs are better or worse than others, or the same within their noise.

    Args:
        old: The figure in each run before, at least one.
        new: The figure in each run now, at least one.
        more_is_better: Whether a larger figure is the better one.

    Returns:
        ``better`` or ``worse`` where each run now lies on that side of each run before, and the
        medians are further apart than the runs of either report, and than `LEAST_CHANGE`; else
        ``same``. ``unclear`` where a report has fewer than `LEAST_RUNS` runs, too few to know the
        noise.
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


def check_regression(old: Report, new: Report, baseline: str) -> Regression:
    """Compare a report with a baseline, in all figures for which more or less is better.

    Args:
        old: The baseline.
        new: The new report.
        baseline: Path of the baseline, as shown to the user.

    Returns:
        The changes of variants and figures that both reports have, and what else differs.
    """
    before, now = ({v.variant: v.figures for v in report.measured} for report in (old, new))
    compared = [figure for figure in FIGURES.values() if figure.better is not None]
    changes = [
        Change(
            variant,
            figure.key,
            median(then[figure.key]),
            median(figures[figure.key]),
            verdict_on(then[figure.key], figures[figure.key], figure.better == "more"),
        )
        for variant, figures in now.items()
        if (then := before.get(variant)) is not None
        for figure in compared
        if figure.key in then and figure.key in figures
    ]
    return Regression(
        baseline=baseline,
        changes=tuple(changes),
        only_baseline=tuple(name for name in before if name not in now),
        only_new=tuple(name for name in now if name not in before),
        warnings=tuple(_warnings(to_builtins(old), to_builtins(new))),
    )


def _warnings(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for section, names in _CONDITIONS.items():
        for name in names:
            before, now = old[section][name], new[section][name]
            if isinstance(before, dict):
                for key in sorted({*before, *now}):
                    if before.get(key) != now.get(key):
                        yield f"{key} was {before.get(key)} and is {now.get(key)}"
            elif before != now:
                yield f"{name} was {before} and is {now}"
