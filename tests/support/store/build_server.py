"""Real processes that build stores, to be killed.

`BuildServer` starts one process, which forks a builder for each request: ``start`` answers the
builder's process id, ``wait`` its exit status (negative: the signal). A builder is not reaped
before it is waited for, so that its id cannot come to mean another process.
"""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from time import sleep
from types import TracebackType
from typing import Any

from lightning_memmap.store import build_part, build_store, workers, writing
from tests.programs.reliability.forks import Ending, Forked, Raised
from tests.programs.reliability.runner import fork_from_here, fork_server
from tests.support.datasets import Wrapped, holds


class BuildServer:
    """The test's end of the line."""

    def __init__(self) -> None:
        context = fork_server()
        self._connection, far = context.Pipe()
        self._process = context.Process(target=serve, args=(far,))
        self._process.start()
        far.close()
        self._running: set[int] = set()

    def start(self, build: Callable[..., None], *arguments: Any, **options: Any) -> int:
        """Start a builder, in a process group of its own.

        Returns:
            The id of its process.
        """
        pid = self._ask("start", partial(build, *arguments, **options))
        self._running.add(pid)
        return pid

    def wait(self, pid: int) -> int:
        """Wait for a builder's end and return its exit status, or minus the signal."""
        status = self._ask("wait", pid)
        self._running.discard(pid)
        return status

    def run(self, build: Callable[..., None], *arguments: Any, **options: Any) -> int:
        """Start a builder and wait for its end."""
        return self.wait(self.start(build, *arguments, **options))

    def _ask(self, command: str, value: Callable[[], None] | int) -> int:
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
                builder = Forked(value)
                running[builder.pid] = builder
                connection.send(builder.pid)
            else:
                connection.send(status_of(running.pop(value).end()))


def status_of(ending: Ending) -> int | None:
    if isinstance(ending.value, Raised):
        print(ending.value.text, file=sys.stderr)
        return 1
    return ending.status


def build_and_check(dataset: Any, path: Path, *, range_rows: int = 64, **options: Any) -> None:
    """Build a store of `Numbered` rows in 3 shards, or a part of it, and compare all of them."""
    write_ranges_of(range_rows)
    numbered = dataset
    while isinstance(numbered, Wrapped):
        numbered = numbered.dataset
    # The wrappers, and the files that they name, differ from build to build.
    identity = f"version {numbered.version}"
    options = {"num_shards": 3, "progress": False, "fingerprint": identity, **options}
    if "part" in options:
        build_part(dataset, path, **options)
        return
    store = build_store(dataset, path, **options)
    if not holds(store, numbered):
        raise RuntimeError(f"{store} does not hold the rows that were stored")


def write_ranges_of(num_rows: int) -> None:
    """Let builds of this process write ranges of one size, and mark each in the journal as soon as
    it is written, so that a short build has many of them."""
    writing._MAX_BLOCK_ROWS, writing._MAX_BLOCKS = num_rows, 1
    workers._RANGE_S = workers._MIN_RANGE_S = 1e9
    writing.JOURNAL_INTERVAL_S = -1.0


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
    """Holds the process that reads a row until there is a file ``gate``; ``<gate>.pid`` tells its
    id."""

    def __init__(self, dataset: Any, gate: Path, row: int) -> None:
        super().__init__(dataset)
        self.gate, self.row = gate, row

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
