"""Plant each fault in a copy of the repository, and run the tests that should find it.

    python -m tests.programs.mutation                          # all faults
    python -m tests.programs.mutation --rooms '[sampling]'
    python -m tests.programs.mutation --part 2/4 > second.txt  # each fourth fault
    python -m tests.programs.mutation --only epoch             # faults whose name has this text

A fault that no test finds needs a test, or belongs to code that is not needed.
"""

import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

# Set before torch is imported, as in tests/conftest.py.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Imported once, for all processes that run tests, because they are forked.
import lightning  # noqa: F401
import pytest
from jsonargparse import auto_cli

from tests.programs.mutation.faults import FAULTS, PACKAGE, ROOT, Fault

_IGNORED = shutil.ignore_patterns(".venv", ".git", "build", "runs", "stores", "__pycache__")


def main(
    rooms: list[str] | None = None,
    part: str = "1/1",
    only: str = "",
    timeout_s: float = 900.0,
) -> None:
    """Plant the faults, and print for each of them whether a test fails.

    Args:
        rooms: Folders of the package; all by default.
        part: ``i/n`` for each n-th fault, beginning with the i-th.
        only: A text in the names of the faults.
        timeout_s: Tests that take longer hang because of the fault.
    """
    index, num_parts = map(int, part.split("/"))
    faults = [f for f in FAULTS if rooms is None or f.room in rooms]
    faults = [f for f in faults if only in f.name][index - 1 :: num_parts]
    failures = dict[Fault, str]()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=_IGNORED)
        for fault in faults:
            path = copy / PACKAGE / fault.path
            text = path.read_text(encoding="utf-8")
            path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
            failed = run_tests(copy, [*fault.tests, "-x"], timeout_s)
            path.write_text(text, encoding="utf-8")
            failures[fault] = failed[0] if failed else ""
            outcome = "found" if failed else "NOT FOUND"
            print(f"| {outcome} | {fault.name} | {failures[fault]} |", flush=True)
        # Names of parameters may have spaces, which end a name in pytest's summary.
        tests = {test.partition("[")[0] for test in failures.values() if "::" in test}
        failed = run_tests(copy, sorted(tests), timeout_s) if tests else []
    for test in {test.partition("[")[0] for test in failed}:
        print(f"fails without a fault: {test}")
    print("\n| room | faults | found |\n|---|---|---|")
    for room in [*dict.fromkeys(fault.room for fault in faults), "all"]:
        results = [bool(failures[fault]) for fault in faults if room in (fault.room, "all")]
        print(f"| {room} | {len(results)} | {sum(results)} |")


def run_tests(copy: Path, tests: list[str], timeout_s: float) -> list[str]:
    """Run tests in a forked process, and return those that fail."""
    output = copy / "output.txt"
    child = os.fork()
    if not child:
        os.setsid()
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(copy)
        # Programs that tests start import the copy too.
        os.environ["PYTHONPATH"] = str(copy)
        sys.argv = ["pytest"]
        sys.path.insert(0, str(copy))
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        options = ["-q", "-p", "no:cacheprovider", "--timeout=120"]
        try:
            code = int(pytest.main([*options, *tests]))
        except BaseException:
            code = 1
        sys.stdout.flush()
        os._exit(code)
    deadline = time.monotonic() + timeout_s
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return ["hangs"]
        time.sleep(0.1)
    code = os.waitstatus_to_exitcode(ended[1])
    text = output.read_text(errors="replace")
    if code == 0:
        return []
    if code in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"pytest {' '.join(tests)}\n{text}")
    failures = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    return failures or ["crashes"]


if __name__ == "__main__":
    auto_cli(main)
