"""The report of a comparison: ``report.json``, what changed since an earlier one, and tables."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from textwrap import shorten
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from rich.text import Text

from lightning_memmap.compare.metrics import METRICS, NO_LOAD, SPEED, TABLES, Metric
from lightning_memmap.compare.parity import Parity
from lightning_memmap.tables import BAD, GOOD, SOFT, UNSURE, TitledTable, make_table, text

#: A change of less than this share counts as none, however narrow the ranges are: two starts of
#: one program differ by as much, depending on where its memory happens to lie.
_LEAST_CHANGE = 0.02
#: Of three runs before and three now that differ by noise alone (normal, simulated 20,000 times),
#: 4 % are taken for a change; of four and four 1 %; of two and two it would be 20 %.
_LEAST_RUNS = 3
#: What must be equal for figures to be comparable, by section of the report.
_CONDITIONS = {
    "environment": ("processor", "cores", "omp_num_threads", "devices", "packages"),
    "settings": ("accelerator", "devices", "global_batch", "precision", "steps", "warmup_steps"),
    "model": ("model_class", "num_parameters"),
    "data": ("num_rows", "row_bytes"),
}

Status = Literal["ok", "unavailable", "refused", "failed", "pending"]
Verdict = Literal["better", "same", "worse", "unclear"]


@dataclass
class VariantResult:
    """What is known of a variant so far."""

    variant: str
    status: Status = "pending"
    reason: str = ""
    parity: Parity | None = None
    figures: dict[str, Annotated[list[float], Meta(min_length=1)]] = field(default_factory=dict)
    check_losses: list[float | None] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Rows per second of each timed run."""
        return self.figures.get(SPEED, [])

    def add(self, figures: Mapping[str, float]) -> None:
        """Add the figures of one more run."""
        for key, value in figures.items():
            self.figures.setdefault(key, []).append(value)


@dataclass(frozen=True)
class Change:
    """How the median of one figure of one variant changed since a baseline."""

    variant: str
    figure: str
    old: float
    new: float
    verdict: Verdict


@dataclass(frozen=True)
class Regression:
    """What changed since a baseline."""

    baseline: str
    changes: list[Change]
    warnings: list[str]

    @property
    def is_slower(self) -> bool:
        """Whether the speed of a variant became worse."""
        return any(each.figure == SPEED and each.verdict == "worse" for each in self.changes)


@dataclass
class Report:
    """A comparison, as far as it has come."""

    created: str
    command: str
    environment: dict[str, Any]
    settings: dict[str, Any]
    data: dict[str, Any]
    model: dict[str, Any]
    reference: str
    variants: list[VariantResult]
    left_out: list[str] = field(default_factory=list)
    interrupted: bool = False
    regression: Regression | None = None
    schema: Literal["lightning_memmap.compare"] = "lightning_memmap.compare"
    #: Goes up when a field changes its meaning or goes away. See docs/compare.md.
    schema_version: Literal[5] = 5

    @property
    def measured(self) -> list[VariantResult]:
        """The variants that were timed, the fastest first."""
        timed = (each for each in self.variants if each.rates)
        return sorted(timed, key=lambda each: -median(each.rates))

    @property
    def parity_holds(self) -> bool:
        """Whether no variant was found to differ."""
        return not any(each.parity and each.parity.holds is False for each in self.variants)

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        if self.interrupted:
            return 130
        if not self.parity_holds:
            return 1
        ran = [each for each in self.variants if each.status == "ok"]
        is_open = any(each.parity and each.parity.holds is None for each in ran)
        if is_open or not ran or any(v.status in ("failed", "pending") for v in self.variants):
            return 3
        return 4 if self.regression is not None and self.regression.is_slower else 0

    def write(self, path: Path) -> None:
        """Write the report as JSON, in which NaN is null. The file is replaced as a whole."""
        values = {
            "parity_holds": self.parity_holds,
            "exit_code": self.exit_code,
            "metrics": {key: f"{each.label}: {each.meaning}" for key, each in METRICS.items()},
            **asdict(self),
        }
        partial = path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(values), indent=1))
        partial.replace(path)


def read_report(path: str | Path) -> Report:
    """Read a ``report.json``."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Report)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is no report of this version, run the comparison again: {error}"
        ) from error


def verdict_on(old: Sequence[float], new: Sequence[float], more_is_better: bool) -> Verdict:
    """Whether runs are better or worse than others, or the same within their noise."""
    before, now = median(old), median(new)
    if abs(now - before) <= _LEAST_CHANGE * abs(before):
        return "same"
    if min(len(old), len(new)) < _LEAST_RUNS:
        return "unclear"
    noise = max(max(old) - min(old), max(new) - min(new))
    are_apart = min(new) > max(old) or max(new) < min(old)
    if not are_apart or abs(now - before) <= noise:
        return "same"
    return "better" if (now > before) == more_is_better else "worse"


def check_regression(old: Report, new: Report, baseline: str) -> Regression:
    """Compare a report with the one at ``baseline``, in all figures that can be better or worse."""
    before, now = ({v.variant: v.figures for v in report.measured} for report in (old, new))
    changes = [
        Change(
            variant,
            metric.key,
            median(then[metric.key]),
            median(figures[metric.key]),
            verdict_on(then[metric.key], figures[metric.key], metric.better == "more"),
        )
        for variant, figures in now.items()
        if (then := before.get(variant)) is not None
        for metric in METRICS.values()
        if metric.better and metric.key in then and metric.key in figures
    ]
    return Regression(baseline, changes, [*_warnings(old, new)])


def _warnings(old: Report, new: Report) -> Iterator[str]:
    before, now = ({each.variant for each in report.measured} for report in (old, new))
    for words, only in (("in the baseline", before - now), ("in the new report", now - before)):
        if only:
            yield f"only {words}: {', '.join(sorted(only))}"
    for section, names in _CONDITIONS.items():
        for name in names:
            was, is_now = (getattr(report, section).get(name) for report in (old, new))
            if not isinstance(was, dict) or not isinstance(is_now, dict):
                was, is_now = {name: was}, {name: is_now}
            for key in sorted({*was, *is_now}):
                if was.get(key) != is_now.get(key):
                    yield f"not the same: {key} was {was.get(key)} and is {is_now.get(key)}"


_UNKNOWN = text("-")
#: Beyond its upper bound a figure is noise, and from here on it is said.
_NOISY_SHARE = 1.05
#: Columns of the table of parity.
_PARITY = {
    "variant": "",
    "rows": "steps that had the rows of their global batch, as the store has them",
    "batches": "whether the model was given the same bytes after transform and casts",
    "losses": "maximum difference, relative to the largest loss",
    "weights": "distance after the last step, relative to how far training moved them",
    "tolerance": "how far losses and weights may differ",
    "": "",
}
#: What the columns of all tables show, by label.
MEANINGS = {label: meaning for label, meaning in _PARITY.items() if meaning} | {
    each.heading: each.meaning for each in METRICS.values() if each.table
}
_STATUS = {
    "unavailable": text("cannot run here", UNSURE),
    "refused": text("not supported", UNSURE),
    "failed": text("FAILED", BAD),
    "pending": text("not finished", UNSURE),
}


def all_tables(report: Report) -> Iterator[TitledTable]:
    """The tables that have rows: parity, then figures, what did not run and what changed."""
    tables = [
        parity_table(report),
        *(figure_table(report, key) for key in TABLES),
        missing_table(report),
        *([regression_table(report.regression)] if report.regression else []),
    ]
    return (each for each in tables if each.table.row_count)


def parity_table(report: Report) -> TitledTable:
    """Whether variants train the same; as notes, what differs and what to know."""
    verdicts = {True: text("equal", GOOD), False: text("DIFFERS", BAD), None: text("open", UNSURE)}
    compared = [(each.variant, each.parity) for each in report.variants if each.parity is not None]
    rows = [
        [
            text(name),
            text("{}/{}".format(*parity.rows), "" if len({*parity.rows}) == 1 else BAD),
            text("same bytes" if parity.same_content else "other bytes"),
            _difference(parity.loss_difference, parity.tolerance),
            _difference(parity.weight_difference, parity.tolerance),
            text(f"{parity.tolerance:.0e}"),
            verdicts[parity.holds],
        ]
        for name, parity in compared
    ]
    return TitledTable(
        f"Parity with {report.reference or 'a reference'}",
        make_table([*_PARITY], rows),
        [
            *(text(f"{name}: {each}", BAD) for name, found in compared for each in found.problems),
            *(text(f"{name}: {each}", UNSURE) for name, found in compared for each in found.notes),
        ],
    )


def _difference(value: float | None, tolerance: float) -> Text:
    if value is None:
        return _UNKNOWN
    return text("0" if value == 0 else f"{value:.1e}", "" if value <= tolerance else BAD)


def figure_table(report: Report, key: str) -> TitledTable:
    """One of `TABLES`, with a row for each measured variant and no figure that none of them has."""
    metrics = [
        metric
        for metric in METRICS.values()
        if metric.table == key and any(metric.key in each.figures for each in report.measured)
    ]
    rows = [
        [text(each.variant), *(_cell(metric, each) for metric in metrics)]
        for each in report.measured
    ]
    notes = [text(note, UNSURE) for note in _noise(report)] if key == METRICS[SPEED].table else ()
    labels = ["variant", *(metric.heading for metric in metrics)]
    return TitledTable(TABLES[key], make_table(labels, rows if metrics else []), notes)


def _noise(report: Report) -> Iterator[str]:
    """What says that speeds of this report are not to be compared."""
    load, cores = report.environment["load_before"], report.environment["cores"]
    if load > cores:
        yield (
            f"the machine was busy, with a load of {load:.1f} on {cores} cores before the runs:"
            " these speeds say little. Repeat when it is idle"
        )
    for each in report.measured:
        if (share := median(each.figures.get(NO_LOAD, [0.0]))) > _NOISY_SHARE:
            yield (
                f"{each.variant}: {share:.0%} of its upper bound. No loader is faster than none:"
                " the machine was slower in some runs than in others, and differences of"
                f" {share - 1:.0%} are noise here. Repeat with more --steps and --repeats"
            )


def _cell(metric: Metric, variant: VariantResult) -> Text:
    values, write = variant.figures.get(metric.key), metric.unit.write
    if not values:
        return _UNKNOWN
    spread = f" ({write(min(values))}..{write(max(values))})" if metric.key == SPEED else ""
    return text(write(median(values)) + spread)


def missing_table(report: Report) -> TitledTable:
    """The variants without a result, and why they have none."""
    rows = [
        [text(each.variant), _STATUS[each.status], text(shorten(each.reason, 500, placeholder="…"))]
        for each in report.variants
        if each.status != "ok"
    ]
    labels = ("variant", "", "reason")
    return TitledTable("Variants without a result", make_table(labels, rows, labels[1:]))


def regression_table(regression: Regression) -> TitledTable:
    """What changed since a baseline; as notes, what else differs between the two reports."""
    styles = {"better": GOOD, "worse": BAD, "same": SOFT, "unclear": UNSURE}
    rows = []
    for each in regression.changes:
        metric = METRICS[each.figure]
        change = f"{each.new / each.old - 1:+.1%}" if each.old else "new"
        old, new = map(metric.unit.write, (each.old, each.new))
        cells = map(text, (each.variant, metric.heading, old, new, change))
        rows.append([*cells, text(each.verdict, styles[each.verdict])])
    labels = ("variant", "figure", "old", "new", "change", "")
    notes = [text(warning, UNSURE) for warning in regression.warnings]
    title = f"Compared with {regression.baseline}"
    return TitledTable(title, make_table(labels, rows, ["figure"]), notes)
