"""The tables of a report, for the terminal and for the page alike."""

from collections.abc import Iterator
from statistics import median
from textwrap import shorten

from lightning_memmap.compare.report.figures import FIGURES, TABLES, Figure, FigureTable
from lightning_memmap.compare.report.report import Regression, Report, VariantResult
from lightning_memmap.tables import Cell, Column, Mood, Table

_VARIANT = Column("variant")
_UNKNOWN = Cell("-")


def parity_table(report: Report) -> Table:
    """Make the table of whether variants train the same.

    Returns:
        A row for each variant with a check run; as notes, what differs and what to know.
    """
    verdicts = {True: Cell("equal", "good"), False: Cell("DIFFERS", "bad")}
    rows = []
    for each in report.variants:
        parity = each.parity
        if parity is None:
            if each.footprint is not None:
                rows.append([Cell(each.variant), *[_UNKNOWN] * 5, Cell("not compared", "soft")])
            continue
        right, steps = parity.rows
        rows.append(
            [
                Cell(each.variant),
                Cell(f"{right}/{steps}", "" if right == steps else "bad"),
                Cell("same bytes" if parity.same_content else "other bytes"),
                _difference(parity.loss_difference, parity.tolerance),
                _difference(parity.weight_difference, parity.tolerance),
                Cell(f"{parity.tolerance:.0e}"),
                Cell("open", "unsure") if parity.holds is None else verdicts[parity.holds],
            ]
        )
    columns = [
        _VARIANT,
        Column("rows", "steps that had the rows of their global batch, as the store has them"),
        Column("batches", "whether the model was given the same bytes after transform and casts"),
        Column("losses", "largest difference, relative to the largest loss"),
        Column("weights", "distance after the last step, relative to how far training moved them"),
        Column("within", "how far losses and weights may differ"),
        Column(""),
    ]
    compared = [(each.variant, each.parity) for each in report.variants if each.parity is not None]
    notes = [
        Cell(f"{name}: {text}", "bad") for name, parity in compared for text in parity.problems
    ]
    notes += [
        Cell(f"{name}: {text}", "unsure") for name, parity in compared for text in parity.notes
    ]
    return Table(f"Parity with {report.reference or 'a reference'}", columns, rows, notes)


def _difference(value: float | None, tolerance: float) -> Cell:
    if value is None:
        return _UNKNOWN
    return Cell("0" if value == 0 else f"{value:.1e}", "" if value <= tolerance else "bad")


def figure_tables(report: Report) -> Iterator[tuple[FigureTable, Table]]:
    """Make the tables of figures.

    Yields:
        Each of `TABLES` for which there is a figure, with a row for each measured variant. A figure
        that no variant has is left out.
    """
    for key, table in TABLES.items():
        figures = [
            figure
            for figure in FIGURES.values()
            if figure.table == key and any(figure.key in v.figures for v in report.measured)
        ]
        if figures:
            columns = [column for figure in figures for column in _columns(figure, table)]
            rows = [
                [Cell(each.variant), *(cell for f in figures for cell in _cells(f, each))]
                for each in report.measured
            ]
            yield table, Table(table.title, [_VARIANT, *columns], rows)


def _columns(figure: Figure, table: FigureTable) -> Iterator[Column]:
    unit = "" if figure.unit is table.unit else f" {figure.unit.name}"
    yield Column(f"{figure.label}{unit}".strip(), figure.meaning)
    if figure.shows_range:
        yield Column("range", "the lowest and the highest run")


def _cells(figure: Figure, variant: VariantResult) -> Iterator[Cell]:
    values, write = variant.figures.get(figure.key), figure.unit.write
    yield Cell(write(median(values))) if values else _UNKNOWN
    if figure.shows_range:
        yield Cell(f"{write(min(values))}..{write(max(values))}") if values else _UNKNOWN


def scaling_table(report: Report) -> Table:
    """Make the table of samples per second and device on several numbers of devices.

    Returns:
        The table: a row for each variant, a column for each number of devices; a dash where nothing
        was measured.
    """
    counts = sorted({point.devices for point in report.scaling})
    rates = {(each.variant, each.devices): each.samples_per_s for each in report.scaling}
    rows = []
    for name in dict.fromkeys(point.variant for point in report.scaling):
        found = [(count, rates.get((name, count))) for count in counts]
        texts = [f"{median(values) / count:,.0f}" if values else "-" for count, values in found]
        rows.append([Cell(name), *map(Cell, texts)])
    columns = [_VARIANT, *(Column(f"{count} devices") for count in counts)]
    return Table("Scaling: samples/s per device, with the same rows per device", columns, rows)


def missing_table(report: Report) -> Table:
    """Make the table of the variants without a result, and why they have none.

    Returns:
        The table: a row for each variant that is not ``ok``; without rows where all are.
    """
    words = {
        "unavailable": Cell("cannot run here", "unsure"),
        "refused": Cell("refused", "unsure"),
        "failed": Cell("FAILED", "bad"),
        "pending": Cell("not finished", "unsure"),
    }
    rows = [
        [Cell(each.variant), words[each.status], Cell(shorten(each.reason, 500, placeholder="…"))]
        for each in report.variants
        if each.status != "ok"
    ]
    columns = [_VARIANT, Column("", is_text=True), Column("reason", is_text=True)]
    return Table("Variants without a result", columns, rows)


def regression_table(regression: Regression) -> Table:
    """Make the table of what changed since a baseline.

    Args:
        regression: The changes.

    Returns:
        A row for each figure of each variant; as notes, what else differs between the two reports.
    """
    moods: dict[str, Mood] = {"better": "good", "worse": "bad", "same": "soft", "unclear": "unsure"}
    rows = []
    for change in regression.changes:
        figure = FIGURES[change.figure]
        texts = (figure.unit.write(value) for value in (change.old, change.new))
        rows.append(
            [
                Cell(change.variant),
                Cell(f"{figure.label} {figure.unit.name}".strip()),
                *map(Cell, texts),
                Cell(f"{change.ratio - 1:+.1%}"),
                Cell(change.verdict, moods[change.verdict]),
            ]
        )
    columns = [_VARIANT, Column("figure", is_text=True)]
    columns += [Column(label) for label in ("old", "new", "change", "")]
    notes = [f"not the same: {warning}" for warning in regression.warnings]
    for names, words in (
        (regression.only_baseline, "only in the baseline"),
        (regression.only_new, "only in the new report"),
    ):
        notes += [f"{words}: {', '.join(names)}"] if names else []
    title = f"Compared with {regression.baseline}"
    return Table(title, columns, rows, [Cell(note, "unsure") for note in notes])
