"""The tables of a report, for the terminal and for the page alike."""

from collections.abc import Iterator
from statistics import median
from textwrap import shorten

from lightning_memmap.compare.metrics import METRICS, TABLES, Metric, Unit
from lightning_memmap.compare.report import Regression, Report, VariantResult
from lightning_memmap.tables import Cell, Column, Mood, Table

_VARIANT = Column("variant")
_UNKNOWN = Cell("-")
_BOUND = "no_load_share"
#: Beyond its upper bound a figure is noise, and from here on it is said.
_NOISY_SHARE = 1.05


def all_tables(report: Report) -> Iterator[Table]:
    """The tables of a report: parity, then figures, then what did not run and what changed.

    Those without rows are left out.
    """
    yield from (
        table
        for table in (
            parity_table(report),
            *(figure_table(report, key) for key in TABLES),
            missing_table(report),
            *([regression_table(report.regression)] if report.regression else []),
        )
        if table.rows
    )


def parity_table(report: Report) -> Table:
    """Whether variants train the same; as notes, what differs and what to know."""
    verdicts = {
        True: Cell("equal", "good"),
        False: Cell("DIFFERS", "bad"),
        None: Cell("open", "unsure"),
    }
    compared = [(each.variant, each.parity) for each in report.variants if each.parity is not None]
    rows = [
        [
            Cell(name),
            Cell("{}/{}".format(*parity.rows), "" if len({*parity.rows}) == 1 else "bad"),
            Cell("same bytes" if parity.same_content else "other bytes"),
            _difference(parity.loss_difference, parity.tolerance),
            _difference(parity.weight_difference, parity.tolerance),
            Cell(f"{parity.tolerance:.0e}"),
            verdicts[parity.holds],
        ]
        for name, parity in compared
    ]
    columns = [
        _VARIANT,
        Column("rows", "steps that had the rows of their global batch, as the store has them"),
        Column("batches", "whether the model was given the same bytes after transform and casts"),
        Column("losses", "maximum difference, relative to the largest loss"),
        Column("weights", "distance after the last step, relative to how far training moved them"),
        Column("tolerance", "how far losses and weights may differ"),
        Column(""),
    ]
    notes = [
        *(Cell(f"{name}: {text}", "bad") for name, found in compared for text in found.problems),
        *(Cell(f"{name}: {text}", "unsure") for name, found in compared for text in found.notes),
    ]
    return Table(f"Parity with {report.reference or 'a reference'}", columns, rows, notes)


def _difference(value: float | None, tolerance: float) -> Cell:
    if value is None:
        return _UNKNOWN
    return Cell("0" if value == 0 else f"{value:.1e}", "" if value <= tolerance else "bad")


def figure_table(report: Report, key: str) -> Table:
    """One of `TABLES`, with a row for each measured variant and no figure that none of them has."""
    title, unit = TABLES[key]
    metrics = [
        metric
        for metric in METRICS.values()
        if metric.table == key and any(metric.key in each.figures for each in report.measured)
    ]
    columns = [_VARIANT, *(column for metric in metrics for column in _columns(metric, unit))]
    rows = [
        [Cell(each.variant), *(cell for metric in metrics for cell in _cells(metric, each))]
        for each in report.measured
    ]
    shares = {each.variant: median(each.figures.get(_BOUND, [0.0])) for each in report.measured}
    notes = [
        f"{name}: {share:.0%} of its upper bound. No loader is faster than none: the machine was"
        f" slower in some runs than in others, and differences of {share - 1:.0%} are noise here."
        " Repeat on an idle machine, with more --steps and --repeats"
        for name, share in shares.items()
        if key == METRICS[_BOUND].table and share > _NOISY_SHARE
    ]
    return Table(title, columns, rows if metrics else [], [Cell(note, "unsure") for note in notes])


def _columns(metric: Metric, unit: Unit | None) -> Iterator[Column]:
    name = "" if metric.unit is unit else f" {metric.unit.name}"
    yield Column(f"{metric.label}{name}".strip(), metric.meaning)
    if metric.shows_range:
        yield Column("range", "the lowest and the highest run")


def _cells(metric: Metric, variant: VariantResult) -> Iterator[Cell]:
    values, write = variant.figures.get(metric.key), metric.unit.write
    yield Cell(write(median(values))) if values else _UNKNOWN
    if metric.shows_range:
        yield Cell(f"{write(min(values))}..{write(max(values))}") if values else _UNKNOWN


def missing_table(report: Report) -> Table:
    """The variants without a result, and why they have none."""
    words: dict[str, tuple[str, Mood]] = {
        "unavailable": ("cannot run here", "unsure"),
        "refused": ("not supported", "unsure"),
        "failed": ("FAILED", "bad"),
        "pending": ("not finished", "unsure"),
    }
    rows = [
        [
            Cell(each.variant),
            Cell(*words[each.status]),
            Cell(shorten(each.reason, 500, placeholder="…")),
        ]
        for each in report.variants
        if each.status != "ok"
    ]
    columns = [_VARIANT, Column("", is_text=True), Column("reason", is_text=True)]
    return Table("Variants without a result", columns, rows)


def regression_table(regression: Regression) -> Table:
    """What changed since a baseline; as notes, what else differs between the two reports."""
    moods: dict[str, Mood] = {"better": "good", "worse": "bad", "same": "soft", "unclear": "unsure"}
    rows = []
    for each in regression.changes:
        metric = METRICS[each.figure]
        texts = (
            each.variant,
            f"{metric.label} {metric.unit.name}".strip(),
            metric.unit.write(each.old),
            metric.unit.write(each.new),
            f"{each.new / each.old - 1:+.1%}" if each.old else "new",
        )
        rows.append([*map(Cell, texts), Cell(each.verdict, moods[each.verdict])])
    columns = [_VARIANT, Column("figure", is_text=True)]
    columns += [Column(label) for label in ("old", "new", "change", "")]
    notes = [f"not the same: {warning}" for warning in regression.warnings]
    for words, names in (
        ("only in the baseline", regression.only_baseline),
        ("only in the new report", regression.only_new),
    ):
        notes += [f"{words}: {', '.join(names)}"] if names else []
    title = f"Compared with {regression.baseline}"
    return Table(title, columns, rows, [Cell(note, "unsure") for note in notes])
