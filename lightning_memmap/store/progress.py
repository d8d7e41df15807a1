"""The progress bar of long work on a store."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Advance = Callable[[int], None]
ShowProgress = Callable[..., AbstractContextManager[Advance]]


@contextmanager
def show_progress(
    what: str, total: int | None, item_bytes: int, done: int = 0, *, hidden: bool = False
) -> Iterator[Advance]:
    """Show speed, gigabytes and the time that is left, on standard error."""
    if hidden:
        yield lambda count: None
        return
    unit = "rows" if item_bytes != 1 else "B"
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,}" + ("" if total is None else f"/{total:,}") + f" {unit}"),
        TextColumn("{task.fields[speed]}"),
        TextColumn("{task.fields[gigabytes]}"),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total, completed=done, speed="", gigabytes="")

        def advance(count: int) -> None:
            progress.advance(task, count)
            state = progress.tasks[0]
            speed = state.speed or state.finished_speed or 0.0
            progress.update(
                task,
                speed=f"{speed:,.0f} {unit}/s" if speed else "",
                gigabytes=f"{state.completed * item_bytes / 1e9:.2f} GB" if item_bytes else "",
            )

        yield advance
