"""Starts the processes of independent members, records how their stages end, and waits for them.

The process that the user started is member 0. It runs the program again for each other member,
with the member's number in an environment variable. The processes say nothing to each other: each
records its results in a file, and member 0 reads the files and watches the processes.
"""

import atexit
import math
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter, sleep
from types import FrameType
from typing import Any, ClassVar

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info
from rich import get_console
from typing_extensions import override

from lightning_memmap._compat.processes import ScriptLauncher, folder_below, move_trainer
from lightning_memmap.errors import MemberError
from lightning_memmap.strategies.members.results import (
    ABSENT,
    DONE,
    FAILED,
    RUNNING,
    MemberResult,
    MemberResults,
    forget_results,
    member_folder,
    read_member,
    record,
)

#: Which member a process trains. A user who sets it trains this one alone.
MEMBER_VARIABLE = "LIGHTNING_MEMMAP_MEMBER"
_DIRECTORY_VARIABLE = "LIGHTNING_MEMMAP_MEMBERS_DIRECTORY"
_OUTPUT = "output.log"
_POLL_S = 0.1
_PATIENCE_S = 5.0


def member_of_this_process() -> int | None:
    """The member that this process was started for; None in the process that starts the others.

    Raises:
        ValueError: The environment variable is no number.
    """
    text = os.environ.get(MEMBER_VARIABLE)
    if text is None:
        return None
    if not text.isdecimal():
        raise ValueError(f"{MEMBER_VARIABLE}={text!r}: the number of a member, counted from 0")
    return int(text)


class MemberLauncher(ScriptLauncher):
    """Runs the stages of one member; in the process of member 0, starts the others before.

    Args:
        num_members: Members of the run.
        raise_on_failure: Whether a failure of another member is an error of member 0.
    """

    # A program has one set of processes, however many Trainers it makes.
    _others: ClassVar[dict[int, "subprocess.Popen[Any]"]] = {}
    _directory: ClassVar[Path | None] = None
    _calls: ClassVar[Counter[str]] = Counter()

    def __init__(self, num_members: int, raise_on_failure: bool) -> None:
        super().__init__()
        self.results: MemberResults | None = None
        self._num_members = num_members
        self._raise_on_failure = raise_on_failure
        self._member = member_of_this_process() or 0
        self._root: Path | None = None
        self._stage = ("", 0)

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return self._num_members == 1

    @property
    def folder(self) -> Path | None:
        """Where this member's results are, from its first stage on."""
        return None if self._root is None else self._root / member_folder(self._member)

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        # Once: what the Trainer writes is then moved below.
        self._root = self._root or self._find_root(trainer)
        if self._num_members > 1:
            self.share_threads(self._num_members)
            if self._is_first:
                self._start(self._root)
        self.move_outputs(trainer)
        name = trainer.state.fn.value
        self._calls[name] += 1
        self._stage = (name, self._calls[name])
        began = perf_counter()
        self._record(trainer, RUNNING, 0.0)
        try:
            returned = function(*args, **kwargs)
        except BaseException as error:
            self._record(trainer, FAILED, perf_counter() - began, error)
            raise
        self._record(trainer, DONE, perf_counter() - began)
        if self._is_first:
            self._wait(lambda member: self._recorded(member).status in (DONE, FAILED))
            self._conclude()
        return returned

    def move_outputs(self, trainer: Any) -> None:
        """Let all that the Trainer writes go to folders of this member. Again does no harm."""
        folder = member_folder(self._member)
        move_trainer(trainer, folder)
        for callback in trainer.callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
                callback.dirpath = folder_below(callback.dirpath, folder)
        bar = trainer.progress_bar_callback
        if self._member and bar is not None:
            bar.disable()

    def on_exception(self, exception: BaseException) -> None:
        """Member 0 has failed: wait until the others have come to their end, and show the table."""
        if self._is_first and not isinstance(exception, (KeyboardInterrupt, MemberError)):
            self._wait_for_end()
            self._show()

    @property
    def _is_first(self) -> bool:
        """Whether this is the process that the others are started from."""
        return member_of_this_process() is None

    def _find_root(self, trainer: L.Trainer) -> Path:
        """Where the members record their results: that of the program's first Trainer."""
        if self._directory is not None:
            return self._directory
        given = os.environ.get(_DIRECTORY_VARIABLE)
        root = trainer.default_root_dir
        if given is None and "://" in root:
            raise ValueError(
                f"default_root_dir={root!r}: memmap_independent records the results of its members"
                " there; choose a local directory, and a remote one for checkpoints with"
                " ModelCheckpoint(dirpath=...)"
            )
        return Path(given or root).absolute()

    def _start(self, directory: Path) -> None:
        """Start the other members, once a program."""
        if self._others:
            if len(self._others) + 1 != self._num_members:
                raise ValueError(
                    f"num_members={self._num_members}: this program already trains"
                    f" {len(self._others) + 1} members; all of its Trainers must have as many"
                )
            self.procs = list(self._others.values())
            return
        MemberLauncher._directory = directory
        forget_results(directory)
        for member in range(1, self._num_members):
            folder = directory / member_folder(member)
            folder.mkdir(parents=True, exist_ok=True)
            variables = {MEMBER_VARIABLE: str(member), _DIRECTORY_VARIABLE: str(directory)}
            with (folder / _OUTPUT).open("wb") as output:
                self._others[member] = self.run_again(variables, output)
        # The others belong to this program: it ends after them.
        atexit.register(self._wait_for_end)

    def _wait_for_end(self) -> None:
        self._wait(lambda member: False)

    def _wait(self, is_ready: Callable[[int], bool]) -> None:
        """Wait until each other member is ready, or its process has ended."""
        told_s = perf_counter() + _PATIENCE_S
        pending = set(self._others)
        with _on_sigterm(self._stop):
            while pending := {
                member
                for member in pending
                if self._others[member].poll() is None and not is_ready(member)
            }:
                if perf_counter() > told_s:
                    names = ", ".join(map(str, sorted(pending)))
                    rank_zero_info(
                        f"Waiting for members {names}, which print to {self._output('*')}"
                    )
                    told_s = math.inf
                sleep(_POLL_S)

    def _stop(self, signum: int, frame: object) -> None:
        # What the Trainer does in a stage; between stages nobody else would tell the others.
        for process in self._others.values():
            process.send_signal(signum)
        sys.exit(128 + signum)

    def _conclude(self) -> None:
        results = self._show()
        if results.failed and self._raise_on_failure:
            # The program may end by this error. It does not leave the others behind.
            self._wait_for_end()
            results.check()

    def _show(self) -> MemberResults:
        members = tuple(self._recorded(member) for member in range(self._num_members))
        self.results = MemberResults(self._stage[0], members)
        if self._others:
            get_console().print(self.results.table())
        return self.results

    def _recorded(self, member: int) -> MemberResult:
        """What a member has recorded of this stage, and what its process tells besides."""
        assert self._root is not None
        process = self._others.get(member)
        # Asked before the file is read: a member that has ended records nothing any more.
        code = None if process is None else process.poll()
        known = {
            (result.stage, result.call): result
            for result in read_member(self._root / member_folder(member))
        }
        result = known.get(self._stage, MemberResult(member, *self._stage, RUNNING))
        if process is not None:
            result = replace(result, output=str(self._output(member)))
        if result.status != RUNNING or code is None:
            return result
        if code or self._stage in known:
            return replace(result, status=FAILED, error=self._reason(member, code))
        return replace(result, status=ABSENT)

    def _reason(self, member: int, code: int) -> str:
        if code < 0:
            names = {known.value: known.name for known in signal.Signals}
            return f"killed by {names.get(-code, f'signal {-code}')}"
        lines = self._output(member).read_text(errors="replace").strip().splitlines()
        return f"exit code {code}" + (f": {lines[-1]}" if lines else "")

    def _output(self, member: int | str) -> Path:
        assert self._root is not None
        return self._root / member_folder(member) / _OUTPUT

    def _record(
        self, trainer: Any, status: str, seconds: float, error: BaseException | None = None
    ) -> None:
        metrics = {}
        if status == DONE:
            for name, value in trainer.callback_metrics.items():
                metrics[name] = float(value)
        saver = trainer.checkpoint_callback
        saved = saver.best_model_path if isinstance(saver, ModelCheckpoint) else None
        name, call = self._stage
        assert self.folder is not None
        result = MemberResult(
            self._member,
            name,
            call,
            status,
            error=None if error is None else f"{type(error).__name__}: {error}",
            device=str(trainer.strategy.root_device),
            epochs=trainer.current_epoch,
            steps=trainer.global_step,
            seconds=seconds,
            metrics=metrics,
            checkpoint=saved or None,
        )
        record(self.folder, result)


@contextmanager
def _on_sigterm(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Handle SIGTERM so; Python lets the main thread alone do it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
