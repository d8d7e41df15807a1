"""A Python that has imported this project, and what it needs, for tests that start programs.

Importing them takes seconds of a core, each time, in each of the hundreds of processes that the
tests start. `python` gives the path of a command that is used like ``sys.executable``. It hands
its arguments, environment, working directory and open files to a server, which forks a process
that runs the program, and ends as the program ends: with its exit status, or by its signal. Signals
are passed on to the program; it dies with the command. The program's own ``sys.executable`` is the
same command, so that a launcher's processes start as quickly.

What differs from a new interpreter: the program is no child of the command and has a session of
its own, modules are imported before the environment is set, and are not taken apart at the end,
unless the variable `END_WHOLLY` is in the environment.
"""

import atexit
import functools
import multiprocessing
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import spawn
from pathlib import Path

_HERE = Path(__file__).parent
#: Has a program take its modules apart when it ends, as an interpreter does.
END_WHOLLY = "PRELOADED_END_WHOLLY"


@functools.cache
def python() -> str:
    """The path of the command; the first call starts the server, which ends with this process."""
    directory = tempfile.TemporaryDirectory(prefix="preloaded")
    command, address = Path(directory.name, "python"), Path(directory.name, "socket")
    client = [sys.executable, "-I", "-S", str(_HERE / "client.py"), str(address)]
    command.write_text(f'#!/bin/sh\nexec {shlex.join(client)} "$@"\n', encoding="utf-8")
    command.chmod(0o700)
    server = subprocess.Popen(
        [sys.executable, str(_HERE / "server.py"), str(address), str(command)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )

    def end() -> None:
        server.communicate()
        directory.cleanup()

    atexit.register(end)
    assert server.stdout is not None
    if server.stdout.readline() != b"ready\n":
        raise RuntimeError(f"the server of programs ended: {server.wait()}")
    return str(command)


def run(
    *arguments: object, cwd: Path | None = None, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Run the command to its end, with this project on its path and more environment variables."""
    return subprocess.run(
        [python(), *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(_HERE.parents[2]), **variables},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@contextmanager
def preloaded_processes() -> Iterator[None]:
    """Within, what multiprocessing spawns is this Python. Its process is no child of the one that
    asks for it."""
    usual = spawn.get_executable()
    multiprocessing.set_executable(python())
    try:
        yield
    finally:
        multiprocessing.set_executable(usual)
