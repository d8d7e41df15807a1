"""The report as one HTML page that needs nothing else."""

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_memmap.compare.render import plots
from lightning_memmap.compare.render.tables import (
    figure_tables,
    missing_table,
    parity_table,
    regression_table,
    scaling_table,
)
from lightning_memmap.compare.report.report import Report
from lightning_memmap.pages import templates
from lightning_memmap.tables import Cell, Column, Table


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Args:
        title: Its heading.
        tables: Its tables. A section without tables is left out.
        pictures: Its pictures, each as SVG and with its caption.
    """

    title: str
    tables: list[Table]
    pictures: list[tuple[str, str]]


def render_html(report: Report) -> str:
    """Make the page. Needs matplotlib and jinja2."""
    return (
        templates(__package__)
        .get_template("report.html")
        .render(
            report=report,
            verdict=_verdict(report),
            parity_notes=parity_table(report).notes,
            sections=[section for section in _sections(report) if section.tables],
        )
    )


def _verdict(report: Report) -> Cell:
    compared = [each for each in report.variants if each.parity is not None]
    if not report.parity_holds:
        wrong = [each.variant for each in compared if each.parity and each.parity.holds is False]
        return Cell(f"Parity does not hold: {', '.join(wrong)} differ from the reference.", "bad")
    if report.exit_code not in (0, 4):
        return Cell("No difference was found, but not every variant could be compared.", "unsure")
    if len(compared) > 1:
        return Cell(f"Parity holds: {len(compared)} variants train the same.", "good")
    return Cell("Only one variant could be checked.", "unsure")


def _sections(report: Report) -> Iterator[Section]:
    tables = list(figure_tables(report))
    parity = parity_table(report)
    # Its notes stand beside the verdict.
    yield Section(
        "Parity",
        [Table(parity.title, parity.columns, parity.rows)],
        plots.draw(
            report,
            {
                plots.draw_check_losses: "Dropout off, and the evaluation transform in place of a"
                " random one.",
                plots.draw_timed_losses: "As configured: what is random differs between variants.",
            },
        ),
    )
    yield Section(
        "Speed",
        [table for each, table in tables if each.section == "Speed"]
        + ([scaling_table(report)] if report.scaling else []),
        plots.draw(
            report,
            {
                plots.draw_throughput: "Bar: median. Dots: runs. Line: lowest to highest.",
                plots.draw_parts: "Means over steps and processes; the median of the runs.",
                plots.draw_scaling: "Rows per device are the same at every number of devices.",
            },
        ),
    )
    yield Section(
        "Memory and movement",
        [table for each, table in tables if each.section == "Memory and movement"],
        plots.draw(
            report,
            {
                plots.draw_state: "From the check runs, at the optimizer's second step.",
                plots.draw_memory: "After the last step. Solid: pages of only one process (orange:"
                " workers). Hatched: the shared pages of the process that has most of them. Of"
                " devices: the peak in the timed steps, allocated (blue) and reserved (grey).",
                plots.draw_traces: "Two steps of the check runs on rank 0, from one allocation or"
                " release to the next. Activations: all that operators return, except for the"
                " other kinds.",
                plots.draw_movement: "Solid: between devices or processes, the least that a ring"
                " needs. Dashed: within one memory, between logical devices.",
            },
        ),
    )
    missing = missing_table(report)
    yield Section(missing.title, [missing] if missing.rows else [], [])
    if report.regression is not None:
        regression = regression_table(report.regression)
        yield Section(regression.title, [regression], [])
    described = [[Cell(each.variant), Cell(each.description)] for each in report.variants]
    columns = [Column("variant"), Column("what it is", is_text=True)]
    yield Section("The variants", [Table("The variants", columns, described)], [])
