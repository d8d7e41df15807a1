"""Real processes that build stores, to be killed.

`BuildServer` starts one process, which imports everything once and then forks a builder for each
request. It speaks in lines: ``start <json>`` answers the builder's process id, ``wait <id>`` its
exit status (negative: the signal). A builder is not reaped before it is waited for, so that its
id cannot come to mean another process.
"""

import json
import os
import signal
import subprocess
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from time import sleep
from types import TracebackType
from typing import Any

from lightning_memmap.store import build_store, ranges, workers, writer
from tests.datasets import Logged, Numbered, Slow, Wrapped, holds

REPOSITORY = Path(__file__).parents[3]


@dataclass(frozen=True)
class Build:
    """One build of a `Numbered` dataset.

    Args:
        path: Where the store goes.
        num_rows: Rows of the dataset.
        version: Version of the dataset: all values of all rows depend on it.
        num_shards: Shards of the store.
        num_workers: Processes that read the dataset.
        overwrite: Replace a store of another version.
        fresh: Do not resume.
        range_rows: Rows that are written at once.
        delay_s: Pause before every 16th row.
        log: File in which each row that is read is noted; none where empty.
        gate: The process that reads row ``gate_row`` writes its id to the file ``<gate>.pid`` and
            goes on only when there is a file ``gate``.
        gate_row: See ``gate``.
        kill_at_event: The builder kills itself just before the change number so-and-so to the
            file system, counted from 0. -1: never.
        kill_at_row: The builder kills itself when it reads this row. -1: never.
        times: Build so often, with the number of shards going up by one each time.
        outlived: The workers do not end with the builder, as where the system has no such signal
            and they are busy with a row.
    """

    path: str
    num_rows: int
    version: int = 0
    num_shards: int = 3
    num_workers: int = 0
    overwrite: bool = False
    fresh: bool = False
    range_rows: int = 64
    delay_s: float = 0.0
    log: str = ""
    gate: str = ""
    gate_row: int = -1
    kill_at_event: int = -1
    kill_at_row: int = -1
    times: int = 1
    outlived: bool = False


class BuildServer:
    """The test's end of the line."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.store.build_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=REPOSITORY,
        )
        self._running: set[int] = set()

    def start(self, build: Build) -> int:
        """Start a builder, in a process group of its own.

        Returns:
            The id of its process.
        """
        pid = self._ask(f"start {json.dumps(asdict(build))}")
        self._running.add(pid)
        return pid

    def wait(self, pid: int) -> int:
        """Wait for a builder's end and return its exit status, or minus the signal."""
        status = self._ask(f"wait {pid}")
        self._running.discard(pid)
        return status

    def run(self, build: Build) -> int:
        """Start a builder and wait for its end."""
        return self.wait(self.start(build))

    def _ask(self, line: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the build server ended: {self._process.wait()}")
        return int(answer)

    def __enter__(self) -> "BuildServer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            for pid in list(self._running):
                os.kill(pid, signal.SIGKILL)
                self.wait(pid)
        self._process.communicate()


def killed(status: int) -> bool:
    return status == -signal.SIGKILL


# The server's end


def serve() -> None:
    for line in sys.stdin:
        command, _, text = line.partition(" ")
        if command == "start":
            answer = fork(Build(**json.loads(text)))
        else:
            answer = os.waitstatus_to_exitcode(os.waitpid(int(text), 0)[1])
        print(answer, flush=True)


def fork(build: Build) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        # What a builder prints must not be read as an answer.
        os.dup2(2, 1)
        build_and_check(build)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def build_and_check(build: Build) -> None:
    write_ranges_of(build.range_rows)
    if build.outlived:
        workers.end_with_starter = let_go
    numbered = Numbered(build.num_rows, build.version)
    dataset: Any = numbered
    if build.delay_s:
        dataset = Slow(dataset, build.delay_s)
    if build.log:
        dataset = Logged(dataset, build.log)
    if build.kill_at_row >= 0:
        dataset = Deadly(dataset, build.kill_at_row)
    if build.gate:
        dataset = Gated(dataset, build.gate, build.gate_row)
    if build.kill_at_event >= 0:
        kill_before_change(build.kill_at_event)
    for index in range(build.times):
        store = build_store(
            dataset,
            build.path,
            num_shards=build.num_shards + index,
            num_workers=build.num_workers,
            overwrite=build.overwrite,
            fresh=build.fresh,
            progress=False,
            # The wrappers, and the files that they name, differ from build to build.
            fingerprint=f"version {build.version}",
        )
        if not holds(store, numbered):
            raise RuntimeError(f"{store} does not hold the rows that were stored")


def write_ranges_of(num_rows: int) -> None:
    """Let builds of this process write ranges of one size, each noted as soon as it is written, so
    that a short build has many of them."""
    writer._MAX_RANGE_ROWS = num_rows
    ranges._RANGE_S = ranges._MIN_RANGE_S = 1e9
    writer._JOURNAL_INTERVAL_S = -1.0


def let_go(worker_id: int) -> None:
    """A worker that nothing ends but its own work."""


class Deadly(Wrapped):
    """Kills the process that reads a row. The row must be none of the probes, which are read
    before anything is written."""

    def __init__(self, dataset: Any, row: int) -> None:
        super().__init__(dataset)
        self.row = row

    def __getitem__(self, row: int) -> Any:
        if row == self.row:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(row)


class Gated(Wrapped):
    """Holds the process that reads a row until somebody opens the gate."""

    def __init__(self, dataset: Any, gate: str, row: int) -> None:
        super().__init__(dataset)
        self.gate = Path(gate)
        self.row = row

    def __getitem__(self, row: int) -> Any:
        if row == self.row:
            # Under another name first: who finds the file finds the whole number in it.
            started = self.gate.with_suffix(".started")
            started.write_text(str(os.getpid()))
            started.rename(self.gate.with_suffix(".pid"))
            while not self.gate.exists():
                sleep(0.001)
        return super().__getitem__(row)


def kill_before_change(event: int) -> None:
    """Kill this process just before its change number ``event`` to the file system."""
    left = event
    builder = os.getpid()

    def watch(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if name == "open":
            flags = arguments[2]
            changes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
        else:
            changes = name in CHANGES
        if not changes or os.getpid() != builder:
            return
        if left == 0:
            os.kill(builder, signal.SIGKILL)
        left -= 1

    sys.addaudithook(watch)


CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link"}


if __name__ == "__main__":
    serve()
