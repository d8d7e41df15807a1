"""What a comparison shows in the terminal at its end: its tables."""

from collections.abc import Iterator

from rich.console import Console

from lightning_memmap.compare.render.tables import (
    figure_tables,
    missing_table,
    parity_table,
    regression_table,
    scaling_table,
)
from lightning_memmap.compare.report.report import Report
from lightning_memmap.tables import Table, print_table


def print_report(report: Report, console: Console) -> None:
    """Print parity, then speed, then memory and movement, then what did not run.

    Args:
        report: The report of a comparison.
        console: Where to print.
    """
    settings = report.settings
    console.print(
        f"\n[bold]{settings.global_batch} rows a step[/], {settings.devices}"
        f" {settings.accelerator} devices, {settings.steps} steps after {settings.warmup_steps} of"
        f" warm-up, {settings.repeats} runs of each variant",
        highlight=False,
    )
    for table in _tables(report):
        print_table(table, console)


def _tables(report: Report) -> Iterator[Table]:
    if any(each.parity is not None for each in report.variants):
        yield parity_table(report)
    yield from (table for _, table in figure_tables(report))
    if report.scaling:
        yield scaling_table(report)
    if any(each.status != "ok" for each in report.variants):
        yield missing_table(report)
    if report.regression is not None:
        yield regression_table(report.regression)
