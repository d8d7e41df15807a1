"""The report of a comparison: ``report.json``, its tables, and its page."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from textwrap import shorten
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.text import Text

from lightning_memmap.compare.folder import REPORT_SCHEMA
from lightning_memmap.compare.metrics import METRICS, NO_LOAD, PARTS, SPEED, STATE, TABLES, Metric
from lightning_memmap.compare.parity import Parity
from lightning_memmap.tables import (
    BAD,
    GOOD,
    UNSURE,
    TitledTable,
    make_table,
    render_page,
    text,
    write_at_once,
)

Status = Literal["ok", "refused", "failed", "pending"]


@dataclass
class VariantResult:
    """What is known of a variant so far."""

    variant: str
    status: Status = "pending"
    reason: str = ""
    parity: Parity | None = None
    figures: dict[str, list[float]] = field(default_factory=dict)
    check_losses: list[float | None] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Rows per second of each timed run."""
        return self.figures.get(SPEED, [])

    def add(self, figures: Mapping[str, float]) -> None:
        """Add the figures of one more run."""
        for key, value in figures.items():
            self.figures.setdefault(key, []).append(value)


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
    schema: str = REPORT_SCHEMA
    #: Goes up when a field changes its meaning or goes away. See docs/compare.md.
    schema_version: int = 2

    @property
    def measured(self) -> list[VariantResult]:
        """The variants that were timed, the fastest first."""
        timed = (each for each in self.variants if each.rates)
        return sorted(timed, key=lambda each: -median(each.rates))

    @property
    def parity_holds(self) -> bool:
        """Whether no variant was found to differ."""
        return all(each.parity.holds for each in self.variants if each.parity)

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        if self.interrupted:
            return 130
        if not self.parity_holds:
            return 1
        ran = [each for each in self.variants if each.status == "ok"]
        if not ran or any(v.status in ("failed", "pending") for v in self.variants):
            return 3
        return 0

    def write(self, path: Path) -> None:
        """Write the report as JSON, in which NaN is null. The file is replaced as a whole."""
        values = {
            "parity_holds": self.parity_holds,
            "exit_code": self.exit_code,
            "metrics": {key: f"{each.label}: {each.meaning}" for key, each in METRICS.items()},
            **asdict(self),
        }
        write_at_once(path, msgspec.json.format(msgspec.json.encode(values), indent=1))


_UNKNOWN = text("-")
#: Beyond its upper bound a figure is noise, and from here on it is said; and so it is of speeds in
#: runs of one variant, the highest beside the lowest.
_NOISY_SHARE, _NOISY_SPREAD = 1.05, 1.2
#: Columns of the table of parity.
_PARITY = {
    "variant": "",
    "rows": "steps that had the rows of their global batch, as the store has them",
    "losses": "maximum difference, relative to the largest loss",
    "weights": "distance after the last step, relative to how far training moved them",
    "": "",
}
#: What the columns of all tables show, by label.
MEANINGS = {label: meaning for label, meaning in _PARITY.items() if meaning} | {
    each.label: each.meaning for each in METRICS.values() if each.table
}
_STATUS = {
    "refused": text("not supported", UNSURE),
    "failed": text("FAILED", BAD),
    "pending": text("not finished", UNSURE),
}


def print_report(report: Report, console: Console) -> None:
    """Print the tables that have rows."""
    for table in _tables(report):
        if table.table.row_count:
            console.print(table)


def _tables(report: Report) -> list[TitledTable]:
    """Parity first, then figures, and what did not run."""
    figures = (figure_table(report, key) for key in TABLES)
    return [parity_table(report), *figures, missing_table(report)]


#: What a check run changes, where the training transform is random.
IN_PLACE = "check runs have eval_transform, or without one no transform, in place of the random one"


def parity_table(report: Report) -> TitledTable:
    """Whether variants train the same; as notes, what differs and what to know."""
    compared = [(each.variant, each.parity) for each in report.variants if each.parity is not None]
    tolerance = report.settings["tolerance"]
    rows = [
        [
            text(name),
            text("{}/{}".format(*parity.rows), "" if len({*parity.rows}) == 1 else BAD),
            _difference(parity.loss_difference, tolerance),
            _difference(parity.weight_difference, tolerance),
            text("equal", GOOD) if parity.holds else text("DIFFERS", BAD),
        ]
        for name, parity in compared
    ]
    return TitledTable(
        f"Parity with {report.reference or 'a reference'}",
        make_table([*_PARITY], rows),
        [
            *(text(f"{name}: {each}", BAD) for name, found in compared for each in found.problems),
            *(text(f"{name}: {each}", UNSURE) for name, found in compared for each in found.notes),
            *([text(IN_PLACE)] if report.data.get("transform_is_random") else []),
        ],
    )


def _difference(value: float | None, tolerance: float) -> Text:
    if value is None:
        return _UNKNOWN
    return text("0" if value == 0 else f"{value:.1e}", "" if value <= tolerance else BAD)


def figure_table(report: Report, key: str) -> TitledTable:
    """One of `TABLES`, with a row for each measured variant and no figure that none of them has."""
    known = {name for each in report.measured for name in each.figures}
    metrics = [each for each in METRICS.values() if each.table == key and each.key in known]
    rows = [[text(each.variant), *(_cell(m, each) for m in metrics)] for each in report.measured]
    notes = [text(note, UNSURE) for note in _noise(report)] if key == METRICS[SPEED].table else ()
    labels = ["variant", *(metric.label for metric in metrics)]
    return TitledTable(TABLES[key], make_table(labels, rows if metrics else []), notes)


def _noise(report: Report) -> Iterator[str]:
    """What says that speeds of this report are not to be compared."""
    load, cores = report.environment["load_before"], report.environment["cores"]
    if load > cores:
        yield (
            f"the machine was busy, with a load of {load:.1f} on {cores} cores before the runs:"
            " these speeds say little. Repeat when it is idle"
        )
    spread = max((max(each.rates) / min(each.rates) for each in report.measured), default=1.0)
    if spread > _NOISY_SPREAD:
        yield (
            f"runs of the same variant differ by up to {spread - 1:.0%}: between variants, smaller"
            " differences say nothing"
        )
    for each in report.measured:
        if (share := median(each.figures.get(NO_LOAD, [0.0]))) > _NOISY_SHARE:
            yield (
                f"{each.variant}: {share:.0%} of its upper bound. No loader is faster than none:"
                " the machine was slower in some runs than in others, and differences of"
                f" {share - 1:.0%} are noise here. Repeat with more --steps and --repeats"
            )


def _cell(metric: Metric, variant: VariantResult) -> Text:
    values, write = variant.figures.get(metric.key), metric.write
    if not values:
        return _UNKNOWN
    has_spread = metric.key == SPEED and len(values) > 1
    spread = f" ({write(min(values))}..{write(max(values))})" if has_spread else ""
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


#: The figures whose bars a picture stacks.
_PICTURES = {
    "Samples per second": [SPEED],
    "Where a step goes": [f"{part}_s" for part in PARTS],
    "Model state per device": [f"{kind}_bytes" for kind in STATE],
}


def render_html(report: Report) -> str:
    """The report as one page of HTML. Needs jinja2."""
    parity, *others = _tables(report)
    # What parity has to note stands beside the verdict.
    tables = [replace(parity, notes=()), *others]
    return render_page(
        "report.html",
        report=report,
        verdict=_verdict(report),
        parity_notes=parity.notes,
        tables=[each for each in tables if each.table.row_count],
        meanings=MEANINGS,
        pictures=[*_pictures(report)],
        losses=_losses(report),
    )


def _verdict(report: Report) -> Text:
    checked = {each.variant: each.parity.holds for each in report.variants if each.parity}
    if wrong := [name for name, holds in checked.items() if not holds]:
        return text(f"Parity does not hold: {', '.join(wrong)} differ from the reference.", BAD)
    if report.exit_code:
        return text("No difference was found, but not every variant could be compared.", UNSURE)
    if len(checked) > 1:
        return text(f"Parity holds: {len(checked)} variants train the same.", GOOD)
    return text("Only one variant could be checked.", UNSURE)


def _pictures(report: Report) -> Iterator[dict[str, Any]]:
    """For each variant with these figures, its bars: their label, text, and share of the most."""
    for title, keys in _PICTURES.items():
        sizes = {
            each.variant: [median(each.figures[key]) for key in keys]
            for each in report.measured
            if all(key in each.figures for key in keys)
        }
        metrics = [METRICS[key] for key in keys]
        most = max(map(sum, sizes.values()), default=0) or 1
        bars = {
            variant: [
                (metric.label, metric.write(size), size / most)
                for metric, size in zip(metrics, found, strict=True)
            ]
            for variant, found in sizes.items()
        }
        if bars:
            yield {"title": title, "labels": [metric.label for metric in metrics], "bars": bars}


def _losses(report: Report) -> dict[str, Any] | None:
    """The curves of the check runs in a square of 100 by 100, with the losses that bound it."""
    losses = [
        (each.variant, step, loss)
        for each in report.variants
        for step, loss in enumerate(each.check_losses)
        if loss is not None
    ]
    if not losses:
        return None
    low, high = (extreme(loss for *_, loss in losses) for extreme in (min, max))
    steps = max(step for _, step, _ in losses) or 1
    points: dict[str, str] = defaultdict(str)
    for variant, step, loss in losses:
        y = 100 * (high - loss) / ((high - low) or 1)
        points[variant] += f"{100 * step / steps:.1f},{y:.1f} "
    return {"low": f"{low:.4g}", "high": f"{high:.4g}", "steps": steps + 1, "points": points}
