"""The report as one HTML page that needs nothing else. Needs jinja2 and matplotlib.

Pictures are narrow, so that a phone shows them at nearly their size; a wide screen shows several
side by side.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_memmap.compare.metrics import METRICS, PARTS, SPEED, STATE
from lightning_memmap.compare.report import Report, VariantResult, all_tables, parity_table
from lightning_memmap.pages import templates
from lightning_memmap.tables import Cell, Column, Table

_BAR_IN, _BAR_HEIGHT = 0.42, 0.66
#: Okabe and Ito's colours, which people with any colour vision can tell apart.
_COLORS = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7F6A00", "#555555",
)  # fmt: skip
_PART_COLORS = ("#D55E00", "#E69F00", "#0072B2", "#56B4E9", "#009E73", "#BBBBBB")
_STYLE: Any = {
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 8,
    # Text stays text: small files that can be searched and read aloud.
    "svg.fonttype": "none",
}


def render_html(report: Report) -> str:
    """Make the page."""
    described = [[Cell(each.variant), Cell(each.description)] for each in report.variants]
    columns = [Column("variant"), Column("what it is", is_text=True)]
    parity = parity_table(report)
    # Its notes stand beside the verdict.
    tables = [replace(each, notes=()) if each == parity else each for each in all_tables(report)]
    return (
        templates(__package__)
        .get_template("report.html")
        .render(
            report=report,
            verdict=_verdict(report),
            parity_notes=parity.notes,
            tables=[*tables, Table("The variants", columns, described)],
            pictures=_pictures(report),
        )
    )


def _verdict(report: Report) -> Cell:
    checked = {each.variant: each.parity.holds for each in report.variants if each.parity}
    if wrong := [name for name, holds in checked.items() if holds is False]:
        return Cell(f"Parity does not hold: {', '.join(wrong)} differ from the reference.", "bad")
    if report.exit_code not in (0, 4):
        return Cell("No difference was found, but not every variant could be compared.", "unsure")
    if len(checked) > 1:
        return Cell(f"Parity holds: {len(checked)} variants train the same.", "good")
    return Cell("Only one variant could be checked.", "unsure")


def _pictures(report: Report) -> list[tuple[str, str]]:
    """An SVG element and its caption for each picture for which the report has data."""
    pictures: dict[Callable[[Report], Figure | None], str] = {
        _throughput: "Bar: median. Dots: runs. Line: lowest to highest.",
        _parts: "Means over steps and processes; the median of the runs.",
        _losses: "Dropout off, and the evaluation transform in place of a random one.",
        _state: "From the check runs, at the optimizer's second step.",
    }
    with mpl.rc_context(_STYLE):
        drawn = [(function(report), caption) for function, caption in pictures.items()]
        return [(_svg(figure), caption) for figure, caption in drawn if figure is not None]


def _svg(figure: Figure) -> str:
    """The picture as an element of a page, without a script."""
    buffer = io.StringIO()
    # Without a date the same report gives the same page.
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _losses(report: Report) -> Figure | None:
    curves = {each.variant: each.check_losses for each in report.variants if each.check_losses}
    if not curves:
        return None
    figure, axes = _axes(2.6, "Loss of the check runs")
    for index, (name, losses) in enumerate(curves.items()):
        # Curves may coincide: each is thinner than the one below it.
        width = 1 + 5 * (len(curves) - 1 - index) / len(curves)
        known = [float("nan") if loss is None else loss for loss in losses]
        color = _COLORS[index % len(_COLORS)]
        axes.plot(range(1, len(known) + 1), known, color=color, linewidth=width, label=name)
    axes.set_xlabel("step")
    axes.grid(alpha=0.25)
    axes.legend()
    return figure


def _throughput(report: Report) -> Figure | None:
    if not report.measured:
        return None
    figure, axes = _bars("Samples per second", report.measured, 0.9)
    for at, variant in enumerate(report.measured):
        rates = variant.figures[SPEED]
        axes.barh(at, variant.rate, color=_COLORS[0], alpha=0.55, height=_BAR_HEIGHT)
        axes.plot([min(rates), max(rates)], [at, at], color="black", linewidth=1)
        axes.plot(rates, [at] * len(rates), "o", color="black", markersize=3)
        axes.text(0, at, f" {variant.rate:,.0f}", va="center", fontsize=8)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.locator_params(axis="x", nbins=5)
    return figure


def _parts(report: Report) -> Figure | None:
    keys = [f"{part}_s" for part in PARTS]
    return _stacked("Where a step goes, ms", report, keys, 1e-3, _PART_COLORS)


def _state(report: Report) -> Figure | None:
    keys = [f"{kind}_bytes" for kind in STATE]
    return _stacked("Model state per device, MiB", report, keys, 2**20, _COLORS)


def _stacked(
    title: str, report: Report, keys: Sequence[str], unit: float, colors: Sequence[str]
) -> Figure | None:
    """A bar for each variant that has these figures, one after the other; None without any."""
    variants = [each for each in report.measured if all(key in each.figures for key in keys)]
    if not variants:
        return None
    figure, axes = _bars(title, variants, 1.3)
    left = [0.0] * len(variants)
    for key, color in zip(keys, colors, strict=False):
        sizes = [median(each.figures[key]) / unit for each in variants]
        label = METRICS[key].label
        axes.barh(range(len(variants)), sizes, _BAR_HEIGHT, left, color=color, label=label)
        left = [sum(pair) for pair in zip(left, sizes, strict=True)]
    # matplotlib takes a thin last part for an edge, and would leave no margin there.
    axes.set_xlim(0, max(left) * 1.05 or 1.0)
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3)
    return figure


def _axes(height_in: float, title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(4.4, height_in), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title)
    return figure, axes


def _bars(title: str, variants: Sequence[VariantResult], edge_in: float) -> tuple[Figure, Axes]:
    """A picture with room for a bar for each variant, and for what is around the bars."""
    figure, axes = _axes(edge_in + _BAR_IN * len(variants), title)
    axes.set_yticks(range(len(variants)), [each.variant for each in variants])
    axes.set_ylim(len(variants) - 0.5, -0.5)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure, axes
