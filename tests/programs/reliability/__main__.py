"""The program's options, its table on the terminal, and its exit code."""

import argparse
import os
import shlex
import sys
import tempfile
from concurrent.futures import as_completed
from dataclasses import replace
from itertools import islice
from pathlib import Path
from time import monotonic

# Many processes on few cores. Before torch is imported, here and in all that is started.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.programs.reliability.blows import can_trace
from tests.programs.reliability.kinds import KINDS, QUICK, Case, Scale, cases, prepare, run_case
from tests.programs.reliability.outcome import Subject
from tests.programs.reliability.report import Log, Report
from tests.programs.reliability.runner import runners


def main(arguments: list[str] | None = None) -> int:
    """Run the program. Returns 1 where anything went wrong, else 0."""
    options = _parser().parse_args(arguments)
    scale = QUICK if options.quick else Scale()
    given = {
        name: getattr(options, name)
        for name in ("kills", "flips", "resizes", "manifests", "plants", "strangers")
    }
    scale = replace(scale, **{name: value for name, value in given.items() if value is not None})
    ends = monotonic() + 60 * options.minutes
    with (
        tempfile.TemporaryDirectory(dir=options.scratch, prefix="reliability-") as scratch,
        runners(options.jobs) as pool,
    ):
        beginnings = Path(scratch) / "beginnings"
        pool.submit(prepare, beginnings).result()
        if not can_trace():
            print("kills and failures at system calls are left out: strace is missing")
        todo = options.case or cases(scale, options.seed, beginnings, options.only or list(KINDS))
        log = Log(options.log)
        report = Report(log.outcomes(todo))
        left = (case for case in todo if case not in report)
        while monotonic() < ends and (some := list(islice(left, 4 * options.jobs))):
            futures = {pool.submit(run_case, Subject(), beginnings, case): case for case in some}
            for future in as_completed(futures):
                case, outcome = futures[future], future.result()
                log.add(case, outcome)
                report.add(case, outcome)
                for fault, text in outcome.faults:
                    print(f"{case}: {fault.value}: {text}")
                    print(f"repeat: python -m tests.programs.reliability --case {case}", flush=True)
    print(report.table())
    for name, count in sorted(report.notes().items()):
        print(f"{count:,} x {name}")
    if options.write:
        command = "python -m tests.programs.reliability " + shlex.join(arguments or sys.argv[1:])
        report.write(options.write, command)
    return 1 if report.num_faults else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.programs.reliability", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a little of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random (default 0)")
    parser.add_argument("--kills", type=int, help="kills of each kind, and failures")
    parser.add_argument("--strangers", type=int, help="cases of each kind of stranger")
    parser.add_argument("--flips", type=int, help="flipped bits")
    parser.add_argument("--resizes", type=int, help="files cut off or grown")
    parser.add_argument("--manifests", type=int, help="fuzzed manifests")
    parser.add_argument("--plants", type=int, help="planted things")
    parser.add_argument("--only", nargs="+", choices=KINDS, metavar="KIND", help="these kinds")
    parser.add_argument(
        "--case", nargs="+", type=Case.parse, help="these cases, as a failure prints them"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="cases at once (default: one per core)"
    )
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no case after so many"
    )
    parser.add_argument(
        "--log",
        type=Path,
        help="note each finished case in this file; a run that finds it leaves those cases out",
    )
    parser.add_argument("--scratch", type=Path, help="directory for the stores")
    parser.add_argument("--write", type=Path, help="write the table into this page")
    return parser


if __name__ == "__main__":
    sys.exit(main())
