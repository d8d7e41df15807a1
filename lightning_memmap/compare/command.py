"""``lightning-memmap compare``."""

import shlex
import signal
from pathlib import Path

from rich.console import Console

from lightning_memmap.arguments import BriefParser, print_error, reject_overrides
from lightning_memmap.compare.config import ComparisonOptions
from lightning_memmap.compare.folder import PAGE, REPORT
from lightning_memmap.compare.report import print_report, render_html
from lightning_memmap.compare.runner import Comparison
from lightning_memmap.errors import MemmapError
from lightning_memmap.logged_process import on_sigterm
from lightning_memmap.tables import write_atomically

_DESCRIPTION = """Train the same model on the same rows in several variants, check that the results
agree, and measure what each one costs. A variant is a strategy and a loader of its rows. Exit
code: 0 if all variants that ran agree, 1 if one differs, 3 if one failed, 130 after Ctrl-C, 2 for a
wrong argument or a folder that can't be written."""


def compare(args: list[str]) -> int:
    """Run the command with these arguments."""
    parser = BriefParser(prog="lightning-memmap compare", description=_DESCRIPTION)
    parser.add_class_arguments(ComparisonOptions, as_group=False)
    console = Console(highlight=False)
    try:
        reject_overrides(args)
        options = ComparisonOptions(**parser.parse_args(args).as_dict())
        command = shlex.join(["lightning-memmap", "compare", *args])
        # A scheduler's SIGTERM is an interrupt: finished runs are kept, and no process is left.
        with on_sigterm(signal.default_int_handler):
            report = Comparison(options, console, command).run()
    except (MemmapError, OSError, ValueError) as error:
        print_error(error)
        return 2
    code = report.exit_code
    out = Path(options.out)
    written = ""
    try:
        # Written first, so that a later error cannot lose hours of work.
        report.write(out / REPORT)
        written = f"\n{out / REPORT}"
    except OSError as error:
        print_error(error)
        code = 2
    print_report(report, console)
    console.print(written, soft_wrap=True)
    try:
        write_atomically(out / PAGE, render_html(report).encode())
        console.print(str(out / PAGE), soft_wrap=True)
    except (OSError, ValueError) as error:
        console.print(f"no report.html: {error}", soft_wrap=True, markup=False)
    return code
