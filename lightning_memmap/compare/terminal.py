"""What a comparison shows in the terminal: how far it is, and its tables."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from rich import box
from rich.console import Console, Group
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from lightning_memmap.compare.against import MEASURES, Difference
from lightning_memmap.compare.clock import PARTS
from lightning_memmap.compare.report import Report
from lightning_memmap.compare.results import ArmResult, Spread
from lightning_memmap.placement import format_bytes


class TerminalProgress:
    """A bar for the run that is under way, and a line for each one that is over.

    Args:
        console: Where to print. Where it is no terminal, only the lines are printed.
    """

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def run(self, title: str, total_steps: int) -> Iterator["_RunBar"]:
        """A run begins."""
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
        """A line that stays."""
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
    """Print parity, then speed, then memory and movement, then what did not run."""
    console.print(Group(*_parts(report)), soft_wrap=False)


def _parts(report: Report) -> Iterator[Table | Text]:
    settings = report.settings
    yield Text()
    yield Text.from_markup(
        f"[bold]{settings['global_batch']} rows a step[/], {settings['devices']}"
        f" {settings['accelerator']} devices, {settings['steps']} steps after"
        f" {settings['warmup_steps']} of warm-up, {settings['repeats']} runs of each arm"
    )
    if any(arm.parity is not None for arm in report.arms):
        yield from _apart(_parity_table(report))
        yield from _problems(report)
    if any(arm.cost is not None for arm in report.arms):
        yield from _apart(_speed_table(report))
        yield from _apart(_parts_table(report))
        yield from _apart(_memory_table(report))
    if report.scaling:
        yield from _apart(_scaling_table(report))
    missing = [arm for arm in report.arms if arm.status != "ok"]
    if missing:
        yield from _apart(_missing_table(missing))
    if report.against is not None:
        yield from _difference_parts(report.against)


def _apart(table: Table) -> Iterator[Table | Text]:
    yield Text()
    yield table


def print_difference(difference: Difference, console: Console) -> None:
    """Print what changed between two reports."""
    console.print(Group(*_difference_parts(difference)), soft_wrap=False)


def _difference_parts(difference: Difference) -> Iterator[Table | Text]:
    titles = {measure.name: measure.title for measure in MEASURES}
    colors = {"better": "green", "worse": "bold red", "same": "dim", "unclear": "yellow"}
    table = make_table(f"Against {difference.old}", ["arm", "figure"], ["old", "new", "change", ""])
    for change in difference.changes:
        texts = (_figure(change.measure, value) for value in (change.old, change.new))
        color = colors[change.verdict]
        table.add_row(
            change.arm,
            titles[change.measure],
            *texts,
            f"{change.ratio - 1:+.1%}",
            f"[{color}]{change.verdict}[/]",
        )
    yield from _apart(table)
    for warning in difference.warnings:
        yield Text(f"not the same: {warning}", style="yellow")
    for names, words in (
        (difference.only_old, "only in the old report"),
        (difference.only_new, "only in the new report"),
    ):
        if names:
            yield Text(f"{words}: {', '.join(names)}", style="yellow")


def _figure(measure: str, value: float) -> str:
    if measure == "own_bytes":
        return format_bytes(int(value))
    return f"{value:,.0f}" if measure == "samples_per_s" else f"{value:.2f} s"


def make_table(title: str, left: list[str], right: list[str]) -> Table:
    """A table with columns that are flush left, of which the first is never broken, and right."""
    # Narrow, so that eighty columns hold it.
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=0,
        collapse_padding=True,
    )
    for name in left:
        table.add_column(name, no_wrap=name in left[:1], overflow="fold")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _parity_table(report: Report) -> Table:
    title = f"Parity with {report.reference}"
    table = make_table(title, ["arm"], ["rows", "batches", "losses", "weights", "within", ""])
    for arm in report.arms:
        parity = arm.parity
        if parity is None:
            if arm.holding is not None:
                table.add_row(arm.arm, "-", "-", "-", "-", "-", "[dim]apart[/]")
            continue
        right, steps = parity.rows
        verdicts = {True: "[green]equal[/]", False: "[bold red]DIFFERS[/]", None: "[yellow]?[/]"}
        table.add_row(
            arm.arm,
            f"{right}/{steps}" if right == steps else f"[red]{right}/{steps}[/]",
            "same bytes" if parity.same_content else "other bytes",
            _difference(parity.loss_difference, parity.tolerance),
            _difference(parity.weight_difference, parity.tolerance),
            f"{parity.tolerance:.0e}",
            verdicts[parity.held],
        )
    return table


def _difference(value: float | None, tolerance: float) -> str:
    if value is None:
        return "-"
    if value == 0:
        return "0"
    return f"{value:.1e}" if value <= tolerance else f"[bold red]{value:.1e}[/]"


def _problems(report: Report) -> Iterator[Text]:
    for arm in report.arms:
        if arm.parity is not None:
            for problem in arm.parity.problems:
                yield Text(f"{arm.arm}: {problem}", style="red")
            for note in arm.parity.notes:
                yield Text(f"{arm.arm}: {note}", style="yellow")


def _speed_table(report: Report) -> Table:
    table = make_table(
        "Speed: the median of the runs, and lowest..highest",
        ["arm"],
        ["samples/s", "range", "of ideal", "step ms", "1st batch s"],
    )
    for arm in _costed(report):
        cost = arm.cost
        assert cost is not None
        rate = cost.samples_per_s
        table.add_row(
            arm.arm,
            f"{rate.median:,.0f}",
            f"{rate.low:,.0f}..{rate.high:,.0f}",
            "-" if cost.ideal_share is None else f"{cost.ideal_share:.0%}",
            f"{cost.step_s.median * 1e3:.2f}",
            f"{cost.first_batch_s.median:.2f}",
        )
    return table


def _parts_table(report: Report) -> Table:
    table = make_table("Where a step goes: means in ms", ["arm"], list(PARTS))
    for arm in _costed(report):
        if arm.cost is not None:
            parts = arm.cost.parts_s
            table.add_row(arm.arm, *(f"{parts[part] * 1e3:.2f}" for part in PARTS))
    return table


def _memory_table(report: Report) -> Table:
    on_gpu = any(arm.cost is not None and arm.cost.device_peaks for arm in report.arms)
    more = ["device peak", "reserved"] if on_gpu else []
    energy = any(arm.cost is not None and arm.cost.joules_per_sample for arm in report.arms)
    table = make_table(
        "Memory, and what moves in a step",
        ["arm"],
        ["procs", "own", "shared", *more, "state/device", "moved/step"]
        + (["mJ/sample"] if energy else []),
    )
    for arm in _costed(report):
        cost, holding = arm.cost, arm.holding
        assert cost is not None
        peaks = cost.device_peaks.values()
        cells = [
            str(len(cost.processes)),
            format_bytes(int(cost.own_bytes.median)),
            format_bytes(int(cost.max_shared_bytes.median)),
        ]
        if on_gpu:
            cells += [
                format_bytes(max((peak[name] for peak in peaks), default=0))
                for name in ("allocated", "reserved")
            ]
        cells += [
            format_bytes(holding.state_bytes_per_device) if holding is not None else "-",
            format_bytes(holding.moved_bytes) if holding is not None else "-",
        ]
        if energy:
            joules = cost.joules_per_sample
            cells.append(f"{joules.median * 1e3:.2f}" if joules is not None else "-")
        table.add_row(arm.arm, *cells)
    return table


def _scaling_table(report: Report) -> Table:
    counts = sorted({point.devices for point in report.scaling})
    table = make_table(
        "Scaling: samples/s per device, with the rows per device held the same",
        ["arm"],
        [f"{count} devices" for count in counts],
    )
    for name in dict.fromkeys(point.arm for point in report.scaling):
        cells = []
        for count in counts:
            rates = [
                value / count
                for point in report.scaling
                if (point.arm, point.devices) == (name, count)
                for value in point.samples_per_s
            ]
            cells.append(f"{Spread.of(rates).median:,.0f}" if rates else "-")
        table.add_row(name, *cells)
    return table


def _missing_table(missing: list[ArmResult]) -> Table:
    words = {
        "unavailable": "[yellow]cannot run here[/]",
        "refused": "[yellow]refused[/]",
        "failed": "[bold red]FAILED[/]",
        "pending": "[yellow]not finished[/]",
    }
    table = make_table("Arms without a result", ["arm", "", "reason"], [])
    for arm in missing:
        reason = " ".join(arm.reason.split())
        table.add_row(
            arm.arm, words[arm.status], escape(reason if len(reason) < 500 else reason[:500] + "…")
        )
    return table


def _costed(report: Report) -> list[ArmResult]:
    """Arms with figures, the fastest first."""
    found = [arm for arm in report.arms if arm.cost is not None]
    return sorted(found, key=lambda arm: -(arm.cost.samples_per_s.median if arm.cost else 0))
