"""Starts, watches and ends programs: the members of an ensemble, the runs of a comparison."""

import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import current_thread, main_thread
from time import monotonic, sleep
from types import FrameType
from typing import Any

_POLL_S = 0.01
#: Variables of the launchers of distributed processes, which programs must not inherit.
_LAUNCHERS = {
    "RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
}  # fmt: skip


class LoggedProcess(subprocess.Popen[bytes]):
    """A process whose output goes to a file."""

    def __init__(
        self,
        command: Sequence[str],
        output: Path,
        *,
        head: bytes = b"",
        env: Mapping[str, str] = os.environ,
        cwd: str | None = None,
        start_new_session: bool = True,
    ) -> None:
        self.output = output
        self._head_bytes = len(head)
        self._has_group = start_new_session
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("wb", buffering=0) as file:
            file.write(head)
            super().__init__(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={name: env[name] for name in env.keys() - _LAUNCHERS},
                cwd=cwd,
                start_new_session=start_new_session,
            )

    def tail(self, num_lines: int = 12) -> list[str]:
        """Return the last lines of its output, without empty ones."""
        with self.output.open(encoding="utf-8", errors="replace") as file:
            file.seek(self._head_bytes)
            return list(deque((line.strip() for line in file if line.strip()), num_lines))

    def describe_exit(self, num_lines: int = 1) -> str:
        """Describe how the program ended: its signal, or its exit code and last lines of output."""
        code = self.returncode
        if code < 0:
            names = {number.value: number.name for number in signal.Signals}
            return f"killed by {names.get(-code, f'signal {-code}')}"
        return ": ".join([f"exit code {code}", " | ".join(self.tail(num_lines))]).rstrip(": ")

    def kill_group(self, patience_s: float = 5.0) -> None:
        """End the program and all its descendants: SIGTERM, then SIGKILL."""
        assert self._has_group, "this process is in the same group"
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                break
            deadline = monotonic() + patience_s
            while self._group_is_alive() and number == signal.SIGTERM and monotonic() < deadline:
                sleep(_POLL_S)
        self.wait()

    def _group_is_alive(self) -> bool:
        self.poll()
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        return True


@contextmanager
def on_sigterm(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Handle SIGTERM within the context. Python allows that in the main thread only."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
