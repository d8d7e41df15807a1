"""Programs that are started, watched and ended."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

import pytest

from lightning_memmap.logged_process import LoggedProcess

#: Prints, starts a process that ignores SIGTERM, and ends or not.
PROGRAM = """
import signal, subprocess, sys, time
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-S", "-c", code])
print(child.pid, flush=True)
time.sleep(float(sys.argv[1]))
print("so be it\\n", file=sys.stderr)
sys.exit(int(sys.argv[2]))
"""


def is_running(pid: int) -> bool:
    """Whether a process runs, and is not a zombie that nobody has waited for."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def start(tmp_path: Path, seconds: float, code: int) -> tuple[LoggedProcess, int]:
    command = [sys.executable, "-S", "-c", PROGRAM, str(seconds), str(code)]
    program = LoggedProcess(command, tmp_path / "logs" / "output.log")
    deadline = monotonic() + 30
    while not program.tail() and monotonic() < deadline:
        sleep(0.01)
    return program, int(program.tail()[0])


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0, 60])
def test_group_ends_with_all_that_it_started(tmp_path: Path, seconds: float) -> None:
    program, child = start(tmp_path, seconds, 3)
    with suppress(subprocess.TimeoutExpired):
        program.wait(0.01 if seconds else 30)
    assert (program.poll() is None) == bool(seconds)
    assert is_running(child)
    program.kill_group(patience_s=0.2)
    assert program.poll() is not None
    deadline = monotonic() + 10
    while is_running(child) and monotonic() < deadline:
        sleep(0.01)
    assert not is_running(child)
    expected = "killed by SIGTERM" if seconds else "exit code 3: so be it"
    assert program.describe_exit() == expected
    program.kill_group()


def test_program_does_not_see_what_started_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    command = [sys.executable, "-S", "-c", "import os; print(*os.environ)"]
    program = LoggedProcess(command, tmp_path / "seen.log")
    assert program.wait(30) == 0
    seen = program.tail()[0].split()
    assert "PATH" in seen
    assert not {"LOCAL_RANK", "WORLD_SIZE"} & {*seen}


def test_program_without_output_ends_by_its_code_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", "import os; print(os.getpgid(0) == os.getpid())"]
    program = LoggedProcess(command, tmp_path / "alone.log", env={**os.environ, "A": "1"})
    assert program.wait(30) == 0
    assert program.tail() == ["True"]
    silent = LoggedProcess([sys.executable, "-S", "-c", ""], tmp_path / "silent.log")
    assert silent.wait(30) == 0
    assert silent.describe_exit() == "exit code 0"
