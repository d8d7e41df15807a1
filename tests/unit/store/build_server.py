"""Real processes that build stores, to be killed.

`BuildServer` starts one process, which forks a builder for each request: ``start`` answers the
builder's process id, ``wait`` its exit status (negative: the signal). A builder is not reaped
before it is waited for, so that its id cannot come to mean another process.
"""

import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from time import sleep
from types import TracebackType
from typing import Any

from lightning_memmap.store import build_part, build_store, open_store, workers, writing
from lightning_memmap.store.remote.cache import DIRECTORY
from tests.datasets import Logged, Numbered, Slow, Wrapped, holds
from tests.reliability.forks import Ending, Forked, Raised
from tests.reliability.runner import fork_from_here, fork_server


@dataclass(frozen=True)
class Build:
    """One build of a `Numbered` dataset, all values of which depend on its version."""

    path: str
    num_rows: int
    version: int = 0
    num_shards: int = 3
    num_workers: int = 0
    overwrite: bool = False
    # In place of a build: one part of it, and a URL that is read by a cache.
    part: tuple[int, int] | None = None
    fetch: str = ""
    cache: str = ""
    # Rows that are written at once, and the pause before every 16th.
    range_rows: int = 64
    delay_s: float = 0.0
    # A file in which each row that is read is noted.
    log: str = ""
    # The process that reads row ``gate_row`` writes its id to ``<gate>.pid``, and goes on only when
    # there is a file ``gate``.
    gate: str = ""
    gate_row: int = -1
    # The builder kills itself just before its n-th change of the file system, or at a row.
    kill_at_event: int = -1
    kill_at_row: int = -1
    # Builds, each with one shard more than the one before.
    times: int = 1
    # The workers do not end with the builder.
    outlived: bool = False


class BuildServer:
    """The test's end of the line."""

    def __init__(self) -> None:
        context = fork_server()
        self._connection, far = context.Pipe()
        self._process = context.Process(target=serve, args=(far,))
        self._process.start()
        far.close()
        self._running: set[int] = set()

    def start(self, build: Build) -> int:
        """Start a builder, in a process group of its own.

        Returns:
            The id of its process.
        """
        pid = self._ask("start", build)
        self._running.add(pid)
        return pid

    def wait(self, pid: int) -> int:
        """Wait for a builder's end and return its exit status, or minus the signal."""
        status = self._ask("wait", pid)
        self._running.discard(pid)
        return status

    def run(self, build: Build) -> int:
        """Start a builder and wait for its end."""
        return self.wait(self.start(build))

    def _ask(self, command: str, value: Build | int) -> int:
        self._connection.send((command, value))
        return int(self._connection.recv())

    def __enter__(self) -> "BuildServer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.is_alive():
            for pid in list(self._running):
                os.kill(pid, signal.SIGKILL)
                self.wait(pid)
        self._connection.close()
        self._process.join()


def killed(status: int) -> bool:
    return status == -signal.SIGKILL


# The server's end


def serve(connection: Connection) -> None:
    fork_from_here()
    running: dict[int, Forked] = {}
    with suppress(EOFError):
        while True:
            command, value = connection.recv()
            if command == "start":
                builder = Forked(build_and_check, value)
                running[builder.pid] = builder
                connection.send(builder.pid)
            else:
                connection.send(status_of(running.pop(value).end()))


def status_of(ending: Ending) -> int | None:
    if isinstance(ending.value, Raised):
        print(ending.value.text, file=sys.stderr)
        return 1
    return ending.status


def build_and_check(build: Build) -> None:
    write_ranges_of(build.range_rows)
    if build.outlived:
        workers.end_with_starter = lambda: None
        workers._work = work_and_end
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
    common: dict[str, Any] = {"overwrite": build.overwrite, "progress": False}
    # The wrappers, and the files that they name, differ from build to build.
    identity = f"version {build.version}"
    if build.part is not None:
        build_part(
            dataset,
            build.path,
            build.part,
            num_shards=build.num_shards,
            num_workers=build.num_workers,
            fingerprint=identity,
            **common,
        )
        return
    if build.fetch:
        os.environ[DIRECTORY] = build.cache
        if not holds(open_store(build.fetch), numbered):
            raise RuntimeError(f"{build.fetch} does not hold the rows that were stored")
        return
    for index in range(build.times):
        store = build_store(
            dataset,
            build.path,
            num_shards=build.num_shards + index,
            num_workers=build.num_workers,
            fingerprint=identity,
            **common,
        )
        if not holds(store, numbered):
            raise RuntimeError(f"{store} does not hold the rows that were stored")


def write_ranges_of(num_rows: int) -> None:
    """Let builds of this process write ranges of one size, and mark each in the journal as soon as
    it is written, so that a short build has many of them."""
    writing._MAX_BLOCK_ROWS, writing._MAX_BLOCKS = num_rows, 1
    workers._RANGE_S = workers._MIN_RANGE_S = 1e9
    writing.JOURNAL_INTERVAL_S = -1.0


work = workers._work


def work_and_end(make: bytes, task: Any) -> Any:
    """A worker that ends when its task is done, if its builder is gone."""
    builder = os.getpgid(0)
    try:
        return work(make, task)
    finally:
        if os.getppid() != builder:
            os.kill(os.getpid(), signal.SIGKILL)


class Deadly(Wrapped):
    """Kills the process that reads a row. The row must not be a probe row: these are read
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
            # Renamed when complete: whoever finds the file finds the whole number in it.
            started = self.gate.with_suffix(".started")
            started.write_text(str(os.getpid()))
            started.rename(self.gate.with_suffix(".pid"))
            while not self.gate.exists():
                sleep(0.001)
        return super().__getitem__(row)


def kill_before_change(event: int) -> None:
    """Kill this process just before it changes the file system for the n-th time, ``event`` = n."""
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
