"""What a comparison shows in the terminal while it runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class ComparisonProgress:
    """A progress bar for the run that is under way, and a line for each run that is over.

    Args:
        console: Where to print. If it is not a terminal, only the lines are printed.
    """

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def run(self, title: str, total_steps: int) -> Iterator["RunProgress"]:
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
        outcome = RunProgress(bar, escape(title), total_steps)
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


class RunProgress:
    """Where a run shows its progress."""

    def __init__(self, bar: Progress, title: str, total_steps: int) -> None:
        self.text = "[red]interrupted[/]"
        self._bar = bar
        self._task = bar.add_task(title, total=total_steps)

    def steps(self, done: int) -> None:
        """Show how many steps are done."""
        self._bar.update(self._task, completed=done)

    def end(self, text: str) -> None:
        """Show the outcome: a few words, in rich's markup."""
        self.text = text
