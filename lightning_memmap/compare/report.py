"""The report of a comparison: ``report.json``, its tables, and its page."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from textwrap import shorten
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.text import Text

from lightning_memmap.compare.figures import FIGURES, NO_LOAD, SPEED, TABLES, Figure
from lightning_memmap.compare.folder import REPORT_SCHEMA
from lightning_memmap.compare.parity import Parity
from lightning_memmap.integers import evenly_spaced
from lightning_memmap.tables import (
    BAD,
    GOOD,
    UNSURE,
    TitledTable,
    make_table,
    render_page,
    text,
    write_atomically,
)

Status = Literal["ok", "refused", "failed", "pending"]


@dataclass
class VariantResult:
    """The results of a variant so far."""

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
    """A comparison, finished or interrupted."""

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
    #: Increases when a field changes its meaning or is removed.
    schema_version: int = 4

    @property
    def timed_variants(self) -> list[VariantResult]:
        """The variants that were timed, the fastest first."""
        timed = (result for result in self.variants if result.rates)
        return sorted(timed, key=lambda result: -median(result.rates))

    @property
    def parities(self) -> dict[str, Parity]:
        """The difference of each checked variant from the reference."""
        return {result.variant: result.parity for result in self.variants if result.parity}

    @property
    def parity_holds(self) -> bool:
        """Whether all variants that were checked agree with the reference."""
        return all(parity.holds for parity in self.parities.values())

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        if self.interrupted:
            return 130
        if not self.parity_holds:
            return 1
        statuses = {result.status for result in self.variants}
        if "ok" not in statuses or statuses & {"failed", "pending"}:
            return 3
        return 0

    def write(self, path: Path) -> None:
        """Replace a file by the report as JSON, in which NaN is null."""
        values = {
            "parity_holds": self.parity_holds,
            "exit_code": self.exit_code,
            "metrics": {
                key: f"{figure.label}: {figure.meaning}" for key, figure in FIGURES.items()
            },
            **asdict(self),
        }
        write_atomically(path, msgspec.json.format(msgspec.json.encode(values), indent=1))


_UNKNOWN = text("-")
#: Above these values figures are reported as noisy: a fraction of the upper bound, and the ratio of
#: the highest to the lowest speed among runs of one variant.
_NOISY_FRACTION = 1.05
_NOISY_SPREAD = 1.2
#: Losses of a check run are shown in this many steps at most.
_NUM_LOSSES = 6
#: Columns of the parity table.
_PARITY = {
    "variant": "",
    "rows": "steps that had the rows of their global batch, as the store has them",
    "losses": "maximum difference, relative to the largest loss",
    "weights": "distance after the last step, relative to how far training moved them",
    "": "",
}
#: The meanings of all columns, by label.
MEANINGS = {label: meaning for label, meaning in _PARITY.items() if meaning} | {
    figure.label: figure.meaning for figure in FIGURES.values()
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
    """List all tables: parity, losses, figures, and the variants without a result."""
    return [
        parity_table(report),
        loss_table(report),
        *(figure_table(report, key) for key in TABLES),
        no_result_table(report),
    ]


#: The transforms of check runs, if the training transform is random.
IN_PLACE = "check runs have eval_transform, or without one no transform, in place of the random one"


def parity_table(report: Report) -> TitledTable:
    """Make a table of the differences from the reference, with problems and notes below."""
    tolerance = report.settings["tolerance"]
    rows = [
        [
            text(variant),
            text(
                "{}/{}".format(*parity.steps_with_equal_rows),
                "" if len({*parity.steps_with_equal_rows}) == 1 else BAD,
            ),
            _difference(parity.loss_difference, tolerance),
            _difference(parity.weight_difference, tolerance),
            text("equal", GOOD) if parity.holds else text("DIFFERS", BAD),
        ]
        for variant, parity in report.parities.items()
    ]
    notes = [
        text(f"{variant}: {note}", style)
        for style, attribute in ((BAD, "problems"), (UNSURE, "notes"))
        for variant, parity in report.parities.items()
        for note in getattr(parity, attribute)
    ]
    if report.data.get("transform_is_random"):
        notes.append(text(IN_PLACE))
    return TitledTable(
        f"Parity with {report.reference or 'a reference'}",
        make_table([*_PARITY], rows),
        notes,
    )


def _difference(value: float | None, tolerance: float) -> Text:
    if value is None:
        return _UNKNOWN
    return text("0" if value == 0 else f"{value:.1e}", "" if value <= tolerance else BAD)


def loss_table(report: Report) -> TitledTable:
    """Make a table of the losses of check runs in evenly spaced steps."""
    losses = {result.variant: result.check_losses for result in report.variants}
    steps = evenly_spaced(max(map(len, losses.values()), default=0), _NUM_LOSSES)
    rows = [
        [variant, *(_loss(values[step : step + 1]) for step in steps)]
        for variant, values in losses.items()
        if values
    ]
    labels = ["variant", *(f"step {step}" for step in steps)]
    return TitledTable("Losses of the check runs", make_table(labels, rows))


def _loss(values: list[float | None]) -> Text:
    return _UNKNOWN if not values or values[0] is None else text(f"{values[0]:.4g}")


def figure_table(report: Report, key: str) -> TitledTable:
    """Make one of `TABLES`, with the measured variants and the figures that any of them has."""
    keys = {name for result in report.timed_variants for name in result.figures}
    figures = [figure for figure in FIGURES.values() if figure.table == key and figure.key in keys]
    rows = [
        [result.variant, *(_cell(figure, result) for figure in figures)]
        for result in report.timed_variants
    ]
    notes = [text(note, UNSURE) for note in _noise(report)] if key == FIGURES[SPEED].table else ()
    labels = ["variant", *(figure.label for figure in figures)]
    return TitledTable(TABLES[key], make_table(labels, rows if figures else []), notes)


def _noise(report: Report) -> Iterator[str]:
    """Yield reasons why the speeds of this report are noisy."""
    load = report.environment["load_before"]
    cores = report.environment["cores"]
    if load > cores:
        yield (
            f"The machine was busy, with a load of {load:.1f} on {cores} cores before the runs, so"
            " these speeds are unreliable. Repeat when it is idle"
        )
    spread = max(
        (max(result.rates) / min(result.rates) for result in report.timed_variants), default=1.0
    )
    if spread > _NOISY_SPREAD:
        yield (
            f"runs of the same variant differ by up to {spread - 1:.0%}, so smaller differences"
            " between variants are noise"
        )
    for result in report.timed_variants:
        fraction = median(result.figures.get(NO_LOAD, [0.0]))
        if fraction > _NOISY_FRACTION:
            yield (
                f"{result.variant}: {fraction:.0%} of its upper bound. Values above 100% are"
                f" run-to-run noise, so differences of {fraction - 1:.0%} are noise here. Repeat"
                " with more --steps and --repeats"
            )


def _cell(figure: Figure, result: VariantResult) -> Text:
    values = result.figures.get(figure.key)
    if not values:
        return _UNKNOWN
    spread = ""
    if figure.key == SPEED and len(values) > 1:
        spread = f" ({figure.format(min(values))}..{figure.format(max(values))})"
    return text(figure.format(median(values)) + spread)


def no_result_table(report: Report) -> TitledTable:
    """Make a table of the variants without a result, with the reasons."""
    rows = [
        [result.variant, _STATUS[result.status], shorten(result.reason, 500, placeholder="…")]
        for result in report.variants
        if result.status != "ok"
    ]
    labels = ("variant", "", "reason")
    return TitledTable("Variants without a result", make_table(labels, rows, labels[1:]))


def render_html(report: Report) -> str:
    """Render the report as one page of HTML. Needs jinja2."""
    parity, *further = _tables(report)
    # The notes of the parity table stand below the verdict instead.
    tables = [replace(parity, notes=()), *further]
    return render_page(
        "report.html",
        report=report,
        verdict=_verdict(report),
        parity_notes=parity.notes,
        tables=[table for table in tables if table.table.row_count],
        meanings=MEANINGS,
    )


def _verdict(report: Report) -> Text:
    if different := [name for name, parity in report.parities.items() if not parity.holds]:
        return text(f"Parity does not hold: {', '.join(different)} differ from the reference.", BAD)
    if report.exit_code:
        return text("No difference was found, but not every variant could be compared.", UNSURE)
    if (count := len(report.parities)) > 1:
        return text(f"Parity holds: {count} variants train the same.", GOOD)
    return text("Only one variant could be checked.", UNSURE)
