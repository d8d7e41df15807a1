"""Starts the processes of independent members, and waits for them.

The process that the user started is member 0. It runs the program again for each other member,
with the member's number in an environment variable. The processes do not communicate: each records
its results in a file, and member 0 reads the files and polls the processes.
"""

import atexit
import math
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter, sleep
from types import FrameType
from typing import Any, ClassVar

from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_memmap._compat.processes import ScriptLauncher
from lightning_memmap.errors import MemberError
from lightning_memmap.strategies.members.launcher import (
    DIRECTORY_VARIABLE,
    MEMBER_VARIABLE,
    MemberLauncher,
    member_of_this_process,
)
from lightning_memmap.strategies.members.results import (
    ABSENT,
    DONE,
    FAILED,
    RUNNING,
    MemberResult,
    forget_results,
)

_POLL_S = 0.1
_PATIENCE_S = 5.0


class ProcessLauncher(MemberLauncher, ScriptLauncher):
    """Runs the stages of one member; in the process of member 0, first starts the others.

    Args:
        num_members: Members of the run.
        raise_on_failure: Whether member 0 raises an error where another member failed.
    """

    # One set of processes for the whole program, however many Trainers it makes.
    _others: ClassVar[dict[int, "subprocess.Popen[Any]"]] = {}
    _directory: ClassVar[Path | None] = None

    def __init__(self, num_members: int, raise_on_failure: bool) -> None:
        super().__init__(member_of_this_process() or 0, num_members, raise_on_failure)

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return self._num_members == 1 or not self._is_first

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        # Only once, since the Trainer's own directory becomes a member's folder afterwards. All
        # Trainers use the directory of the program's first one.
        known = self._directory if self._call is None else self._call.root
        self._begin(trainer, known or self._find_root(trainer))
        if self._num_members > 1:
            self.limit_threads(self._num_members)
            if self._is_first:
                self._start(self.call.root)
        returned = self._run_stage(trainer, function, *args, **kwargs)
        if self._is_first:
            self._wait(self._has_ended)
            self._conclude()
        return returned

    @override
    def move_outputs(self, trainer: Any) -> None:
        super().move_outputs(trainer)
        bar = trainer.progress_bar_callback
        if self.member and bar is not None:
            bar.disable()

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Where member 0 failed, wait until the others have ended, and show the table."""
        if isinstance(exception, (KeyboardInterrupt, MemberError)) or self._call is None:
            return
        if self._is_first:
            self._wait_for_end()
            self._show()

    @property
    def _is_first(self) -> bool:
        """Whether this is the process that the others are started from."""
        return member_of_this_process() is None

    def _start(self, directory: Path) -> None:
        """Start the other members, unless this program has done so."""
        if self._others:
            if len(self._others) + 1 != self._num_members:
                raise ValueError(
                    f"num_members={self._num_members}: this program already trains"
                    f" {len(self._others) + 1} members; all of its Trainers must have as many"
                )
            self.procs = list(self._others.values())
            return
        ProcessLauncher._directory = directory
        forget_results(directory)
        for member in range(1, self._num_members):
            output_path = self._output(member)
            output_path.parent.mkdir(parents=True, exist_ok=True)
            variables = {MEMBER_VARIABLE: str(member), DIRECTORY_VARIABLE: str(directory)}
            with output_path.open("wb") as output:
                self._others[member] = self.run_again(variables, output)
        # The program ends after the other members.
        atexit.register(self._wait_for_end)

    def _has_ended(self, member: int) -> bool:
        result = self._recorded(member)
        return result is not None and result.status in (DONE, FAILED)

    def _wait_for_end(self) -> None:
        self._wait(lambda member: False)

    def _wait(self, is_ready: Callable[[int], bool]) -> None:
        """Wait until each other member is ready, or its process has ended."""
        notice_s = perf_counter() + _PATIENCE_S
        pending = set(self._others)
        with _on_sigterm(self._stop):
            while pending := {
                member
                for member in pending
                if self._others[member].poll() is None and not is_ready(member)
            }:
                if perf_counter() > notice_s:
                    names = ", ".join(map(str, sorted(pending)))
                    rank_zero_info(
                        f"Waiting for members {names}, which print to {self._output('*')}"
                    )
                    notice_s = math.inf
                sleep(_POLL_S)

    def _stop(self, signum: int, frame: object) -> None:
        # In a stage the Trainer forwards the signal; between stages nothing else does.
        for process in self._others.values():
            process.send_signal(signum)
        sys.exit(128 + signum)

    def _conclude(self) -> None:
        results = self._show()
        if results.failed and self._raise_on_failure:
            # This error may end the program, which must not leave the others running.
            self._wait_for_end()
            results.check()

    @override
    def _result_of(self, member: int) -> MemberResult:
        """What a member recorded of this stage, completed by the state of its process."""
        process = self._others.get(member)
        # Polled before the file is read: a member that has ended records nothing afterwards.
        code = None if process is None else process.poll()
        recorded = self._recorded(member)
        result = recorded or self._running(member)
        if process is not None:
            result = replace(result, output=str(self._output(member)))
        if result.status != RUNNING or code is None:
            return result
        if code or recorded is not None:
            return replace(result, status=FAILED, error=self._reason(member, code))
        return replace(result, status=ABSENT)

    def _reason(self, member: int, code: int) -> str:
        if code < 0:
            names = {known.value: known.name for known in signal.Signals}
            return f"killed by {names.get(-code, f'signal {-code}')}"
        lines = self._output(member).read_text(errors="replace").strip().splitlines()
        return f"exit code {code}" + (f": {lines[-1]}" if lines else "")


@contextmanager
def _on_sigterm(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Handle SIGTERM within the context. Python allows that in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
