"""Calls in processes of their own: forked, bounded in time and memory, and never left behind.

A process that uses this becomes the parent of whatever its forks leave behind (a "subreaper"), so
that no orphan escapes by moving to another session.
"""

import ctypes
import faulthandler
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Thread
from time import monotonic, sleep
from typing import Any, BinaryIO

import psutil

from lightning_memmap.errors import MemmapError

#: After this the call hangs. Far above what any of them needs, on a busy machine too.
LIMIT_S = 60.0
_PR_SET_CHILD_SUBREAPER, _PR_SET_PTRACER = 36, 0x59616D61
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Raised:
    """An exception that ended a call."""

    name: str
    ours: bool
    is_os_error: bool
    text: str


@dataclass(frozen=True)
class Ending:
    """How a call in a process of its own came to its end."""

    status: int | None
    value: Any
    output: str

    @property
    def hung(self) -> bool:
        """Whether the call did not end by itself in time."""
        return self.status is None

    @property
    def crashed(self) -> bool:
        """Whether the process was ended by a signal: SIGKILL, or a SIGBUS or SIGSEGV of its own."""
        return self.status is not None and self.status < 0


class Forked:
    """A call under way in a forked process."""

    def __init__(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        memory_bytes: int | None = None,
        trace: Sequence[str] | None = None,
    ) -> None:
        adopt_orphans()
        gate, self._open_gate = os.pipe()
        self._result: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes both
        self._output: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._open_gate)
            _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1))
            os.read(gate, 1)
            self._run(function, arguments, memory_bytes)
        os.close(gate)
        self._pidfd = os.pidfd_open(self.pid)
        self._tracer = None if trace is None else self._traced(trace)
        os.close(self._open_gate)

    def _traced(self, options: Sequence[str]) -> "subprocess.Popen[str]":
        command = ["strace", "-f", "-p", str(self.pid), *options]
        tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert tracer.stderr is not None
        line = tracer.stderr.readline()
        if "attached" not in line:
            self.kill()
            raise RuntimeError(f"strace cannot trace: {line}{tracer.communicate()[1]}")
        # Nobody reads what it says from now on.
        Thread(target=tracer.stderr.read, daemon=True).start()
        return tracer

    def _run(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], memory_bytes: int | None
    ) -> None:
        status = 1
        try:
            os.setsid()
            os.dup2(self._output.fileno(), 1)
            os.dup2(self._output.fileno(), 2)
            faulthandler.enable(file=2)
            # A crash that a check provokes shall not fill the disk.
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if memory_bytes is not None:
                limit = psutil.Process().memory_info().vms + memory_bytes
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            try:
                value = function(*arguments)
            except BaseException as error:
                text = traceback.format_exc()
                name = type(error).__qualname__
                is_ours = isinstance(error, MemmapError)
                value = Raised(name, is_ours, isinstance(error, OSError), text)
            pickle.dump(value, self._result)
            self._result.flush()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def workers(self) -> list[int]:
        """The processes that the call has started and that are still there."""
        try:
            return [child.pid for child in psutil.Process(self.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def ended_within(self, limit_s: float) -> bool:
        """Wait for the process for at most so long. It is not reaped before `end`."""
        return bool(select.select([self._pidfd], [], [], max(0.0, limit_s))[0])

    def kill(self) -> None:
        """Kill the process, and none of its workers."""
        os.kill(self.pid, signal.SIGKILL)

    def end(self, limit_s: float = LIMIT_S) -> Ending:
        """Wait for the end of the call; what hangs is killed."""
        ended = self.ended_within(limit_s)
        if not ended:
            # It tells what it was about, in what it prints.
            os.kill(self.pid, signal.SIGABRT)
            if not self.ended_within(1.0):
                self.kill()
        _, code = os.waitpid(self.pid, 0)
        os.close(self._pidfd)
        if self._tracer is not None:
            # It ends with the last process that it sees; workers that are left go on without it.
            self._tracer.terminate()
            self._tracer.wait()
        status = os.waitstatus_to_exitcode(code) if ended else None
        with self._result, self._output:
            self._result.seek(0)
            self._output.seek(0)
            output = self._output.read().decode(errors="replace")
            value = pickle.load(self._result) if status == 0 else None
        return Ending(status, value, output)


def call(
    function: Callable[..., Any],
    *arguments: Any,
    memory_bytes: int | None = None,
    limit_s: float = LIMIT_S,
) -> Ending:
    """Call a function in a process of its own and wait for its end."""
    return Forked(function, *arguments, memory_bytes=memory_bytes).end(limit_s)


def adopt_orphans() -> None:
    """Make this process the parent of all processes that its descendants leave behind."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def wait_for_orphans(limit_s: float) -> list[int]:
    """Wait until no process is left of the calls that have ended."""
    deadline = monotonic() + limit_s
    while left := orphans():
        if monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            while orphans():
                sleep(0.01)
            return left
        sleep(0.01)
    return []


def orphans() -> list[int]:
    """The processes that calls have left behind. No call may be under way."""
    living = []
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                living.append(child.pid)
            elif child.ppid() == os.getpid():
                os.waitpid(child.pid, os.WNOHANG)
        except psutil.NoSuchProcess:
            continue
    return living
