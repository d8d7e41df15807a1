"""The report as one HTML page that needs nothing else. Needs jinja2."""

from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

from rich.text import Text

from lightning_memmap.compare.metrics import METRICS, PARTS, SPEED, STATE
from lightning_memmap.compare.report import MEANINGS, Report, all_tables, parity_table
from lightning_memmap.pages import templates
from lightning_memmap.tables import BAD, GOOD, UNSURE, text

#: The figures whose bars a picture stacks.
_PICTURES = {
    "Samples per second": [SPEED],
    "Where a step goes": [f"{part}_s" for part in PARTS],
    "Model state per device": [f"{kind}_bytes" for kind in STATE],
}


def render_html(report: Report) -> str:
    """Make the page."""
    parity = parity_table(report)
    first = parity.title
    return (
        templates()
        .get_template("report.html")
        .render(
            report=report,
            verdict=_verdict(report),
            parity_notes=parity.notes,
            # Its notes stand beside the verdict.
            tables=[
                replace(each, notes=()) if each.title == first else each
                for each in all_tables(report)
            ],
            meanings=MEANINGS,
            pictures=[*_pictures(report)],
            losses=_losses(report),
        )
    )


def _verdict(report: Report) -> Text:
    checked = {each.variant: each.parity.holds for each in report.variants if each.parity}
    if wrong := [name for name, holds in checked.items() if holds is False]:
        return text(f"Parity does not hold: {', '.join(wrong)} differ from the reference.", BAD)
    if report.exit_code not in (0, 4):
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
                (metric.heading, metric.unit.write(size), size / most)
                for metric, size in zip(metrics, found, strict=True)
            ]
            for variant, found in sizes.items()
        }
        if bars:
            yield {"title": title, "labels": [metric.label for metric in metrics], "bars": bars}


def _losses(report: Report) -> dict[str, Any] | None:
    """The curves of the check runs in a square of 100 by 100, with the losses that bound it."""
    curves = {
        each.variant: {
            step: loss for step, loss in enumerate(each.check_losses) if loss is not None
        }
        for each in report.variants
    }
    every = [loss for curve in curves.values() for loss in curve.values()]
    if not every:
        return None
    low, high = min(every), max(every)
    steps = max(max(curve, default=0) for curve in curves.values()) or 1
    points = {
        variant: " ".join(
            f"{100 * step / steps:.1f},{100 * (high - loss) / ((high - low) or 1):.1f}"
            for step, loss in curve.items()
        )
        for variant, curve in curves.items()
        if curve
    }
    return {"low": f"{low:.4g}", "high": f"{high:.4g}", "steps": steps + 1, "points": points}
