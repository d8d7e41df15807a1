"""``lightning-memmap compare``."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from lightning_memmap.arguments import BriefParser, refuse_several_configs
from lightning_memmap.compare.against import compare_reports
from lightning_memmap.compare.comparison import Comparison, Settings
from lightning_memmap.compare.report import Report, read_report
from lightning_memmap.compare.terminal import TerminalProgress, print_difference, print_report
from lightning_memmap.errors import MemmapError

_DESCRIPTION = """Train the same model on the same rows under several strategies and feeds, see
that the results agree, and tell what each one costs. Exit code: 0 where all arms that ran agree,
1 where one differs, 3 where one failed or could not be judged, 130 after Ctrl-C, 2 for a wrong
argument, 4 where all is well and an arm is slower than in the report given by --against."""


def compare(args: list[str]) -> int:
    """Run the command with these arguments.

    Returns:
        The exit code.
    """
    parser = BriefParser(prog="lightning-memmap compare", description=_DESCRIPTION)
    parser.add_class_arguments(Settings, as_group=False)
    parser.add_argument("--against", type=str | None, help="a report.json to compare with")
    parser.add_argument(
        "--report",
        type=str | None,
        help="a report.json that is there: it is compared with the one of --against, nothing runs",
    )
    given = parser.parse_args(args).as_dict()
    against, finished = given.pop("against"), given.pop("report")
    console = Console()
    try:
        refuse_several_configs(args)
        old = read_report(against) if against is not None else None
        if finished is not None:
            if old is None:
                raise ValueError("--report: name the report to compare it with by --against")
            difference = compare_reports(old, read_report(finished), against)
            print_difference(difference, console)
            return 4 if difference.is_slower else 0
        settings = Settings(**given)
        command = shlex.join(["lightning-memmap", "compare", *args])
        comparison = Comparison(settings, TerminalProgress(console), command)
        report = comparison.run()
        out = Path(settings.out)
        # At once: whatever comes next, hours of work are kept.
        report.write(out / "report.json")
        if old is not None:
            difference = compare_reports(old, report.to_json(), against)
            report = replace(report, against=difference)
            report.write(out / "report.json")
    except (MemmapError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_report(report, console)
    console.print(f"\n{out / 'report.json'}", soft_wrap=True, highlight=False)
    _write_html(report, out / "report.html", console)
    return report.exit_code


def _write_html(report: Report, path: Path, console: Console) -> None:
    try:
        from lightning_memmap.compare.html import render_html
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        console.print(
            "no report.html: it needs matplotlib; pip install 'lightning_memmap\\[compare]'",
            soft_wrap=True,
        )
        return
    path.write_text(render_html(report), encoding="utf-8")
    console.print(str(path), soft_wrap=True, highlight=False)
