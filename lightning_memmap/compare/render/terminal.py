"""What a comparison shows in the terminal: its progress, and its tables."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_memmap.compare.render.tables import (
    figure_tables,
    missing_table,
    parity_table,
    regression_table,
    scaling_table,
)
from lightning_memmap.compare.report.report import Regression, Report
from lightning_memmap.tables import Table, print_table


class TerminalProgress:
    """A progress bar for the run that is under way, and a line for each run that is over.

    Args:
        console: Where to print. If it is not a terminal, only the lines are printed.
    """

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def run(self, title: str, total_steps: int) -> Iterator["_RunBar"]:
        """Show a run while it is under way.

        Args:
            title: What is run.
            total_steps: Steps of the run.

        Yields:
            Where the run shows its progress. If the context ends without an outcome, the run counts
            as interrupted.
        """
        bar = Progress(
            TextColumn("  {task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        started_s = monotonic()
        outcome = _RunBar(bar, escape(title), total_steps)
        with bar:
            yield outcome
        seconds = monotonic() - started_s
        self.note(f"{escape(title):<42} {outcome.text}  [dim]{seconds:.1f} s[/]")

    def note(self, text: str) -> None:
        """Print a line that stays.

        Args:
            text: The line, in rich's markup.
        """
        self._console.print(text, soft_wrap=True, highlight=False)


class _RunBar:
    def __init__(self, bar: Progress, title: str, total_steps: int) -> None:
        self.text = "[red]interrupted[/]"
        self._bar = bar
        self._task = bar.add_task(title, total=total_steps)

    def steps(self, done: int) -> None:
        self._bar.update(self._task, completed=done)

    def end(self, text: str) -> None:
        self.text = text


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


def print_regression(regression: Regression, console: Console) -> None:
    """Print what changed since a baseline.

    Args:
        regression: The changes.
        console: Where to print.
    """
    print_table(regression_table(regression), console)
