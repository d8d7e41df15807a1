"""The processes of ``memmap_independent``: the first one starts all others."""

import atexit
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter, sleep
from types import FrameType
from typing import Any, ClassVar

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info
from rich import get_console
from typing_extensions import override

from lightning_memmap._compat.independent import (
    BEGAN_IN,
    ScriptLauncher,
    TunerExit,
    move_outputs,
    script_command,
)
from lightning_memmap.errors import describe_error
from lightning_memmap.logged_process import LoggedProcess, on_sigterm
from lightning_memmap.strategies.members.results import (
    ABSENT,
    DONE,
    FAILED,
    OUTPUT_HEAD,
    OUTPUT_NAME,
    RUNNING,
    MemberResult,
    MemberResults,
    folder_of,
    old_results,
    read_result,
    result_path,
    write_result,
)

#: The member that a process trains. A user who sets it trains only this one.
MEMBER_VARIABLE = "LIGHTNING_MEMMAP_MEMBER"
_DIRECTORY_VARIABLE = "LIGHTNING_MEMMAP_MEMBERS_DIRECTORY"
_POLL_S = 0.1


class MemberLauncher(ScriptLauncher):  # type: ignore[misc]
    """Runs the stages of one member; as member 0, starts the processes of all others first.

    It is a launcher because the Trainer forwards signals to a launcher's ``procs``.
    """

    # Shared by all Trainers of the program.
    _others: ClassVar[dict[int, LoggedProcess]] = {}
    _first_root: ClassVar[Path | None] = None
    _calls: ClassVar[Counter[str]] = Counter()

    def __init__(self, member: int, num_members: int, raise_on_failure: bool) -> None:
        super().__init__(LightningEnvironment(), num_processes=1, num_nodes=1)
        self.member = member
        self._num_members = num_members
        self._raise_on_failure = raise_on_failure
        self.results: MemberResults | None = None
        #: The directory in which members record their results; None before the first stage.
        self.root: Path | None = None
        self.is_first = member_of_this_process() is None
        self._stage = ""
        self._call = 0

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        # Other members cannot run a notebook again.
        return self._num_members == 1 or not self.is_first

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        # Only once, because the Trainer's own directory becomes a member's folder afterwards. All
        # Trainers use the directory of the program's first one.
        self.root = self.root or self._first_root or _root_directory(trainer)
        self._stage = trainer.state.fn.value
        self._calls[self._stage] += 1
        self._call = self._calls[self._stage]
        if self._num_members > 1:
            _share_threads(self._num_members)
            if self.is_first:
                self._start(self.root)
        returned = self._run_stage(trainer, function, *args, **kwargs)
        if self.is_first:
            results = self.show_results(self._has_ended)
            if results.failed and self._raise_on_failure:
                # This error may end the program, which must not leave the others running.
                self._wait()
                results.check()
        return returned

    def _run_stage(
        self, trainer: Any, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a stage of this member in its Trainer, and record how it ends."""
        move_outputs(trainer, folder_of(self.member))
        bar = trainer.progress_bar_callback
        if self.member and bar is not None:
            bar.disable()
        started = perf_counter()
        device = str(trainer.strategy.root_device)
        result = MemberResult(self.member, self._stage, self._call, RUNNING, device=device)
        path = self._result_path(self.member)
        write_result(path, result)
        result = replace(result, status=DONE)
        try:
            return function(*args, **kwargs)
        except TunerExit:
            # A Tuner ends the fit of a trial.
            raise
        except BaseException as error:
            result = replace(result, status=FAILED, error=describe_error(error))
            raise
        finally:
            logged = trainer.callback_metrics if result.status == DONE else {}
            saver = trainer.checkpoint_callback
            result = replace(
                result,
                epochs=trainer.current_epoch,
                steps=trainer.global_step,
                seconds=perf_counter() - started,
                metrics={name: float(value) for name, value in logged.items()},
                checkpoint=(isinstance(saver, ModelCheckpoint) and saver.best_model_path) or None,
            )
            write_result(path, result)

    def _start(self, root: Path) -> None:
        """Start the other members, unless this program has done so."""
        if not self._others:
            MemberLauncher._first_root = root
            for path in old_results(root, self._num_members):
                path.unlink()
            for member in range(1, self._num_members):
                variables = {MEMBER_VARIABLE: str(member), _DIRECTORY_VARIABLE: str(root)}
                self._others[member] = LoggedProcess(
                    script_command(),
                    self._output_path(member),
                    head=OUTPUT_HEAD,
                    cwd=BEGAN_IN,
                    env={**os.environ, **variables},
                    # Ctrl-C reaches all members.
                    start_new_session=False,
                )
            rank_zero_info(f"The other members print to {self._output_path('*')}")
            # The program ends after them.
            atexit.register(self._wait)
        elif len(self._others) + 1 != self._num_members:
            raise ValueError(
                f"num_members={self._num_members}: this program already trains"
                f" {len(self._others) + 1} members; all of its Trainers must have the same number"
            )
        self.procs = list(self._others.values())

    def _has_ended(self, member: int) -> bool:
        result = read_result(self._result_path(member))
        return result is not None and result.status in (DONE, FAILED)

    def _wait(self, is_ready: Callable[[int], bool] = lambda member: False) -> None:
        """Wait until each other member is ready, or its process has ended."""
        with on_sigterm(self._stop):
            while any(
                process.poll() is None and not is_ready(member)
                for member, process in self._others.items()
            ):
                sleep(_POLL_S)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        # In a stage the Trainer forwards the signal; between stages nothing else does.
        self.kill(signum)
        sys.exit(128 + signum)

    def show_results(self, is_ready: Callable[[int], bool] = lambda member: False) -> MemberResults:
        """Wait for the other members to be ready or to end, and print one table."""
        self._wait(is_ready)
        members = tuple(self._result_of(member) for member in range(self._num_members))
        self.results = MemberResults(self._stage, members)
        if self._num_members > 1:
            get_console().print(self.results.table())
        return self.results

    def _result_of(self, member: int) -> MemberResult:
        """Return what a member recorded of this stage, updated by the state of its process."""
        process = self._others.get(member)
        # Poll before reading the file: a member that has ended records nothing afterwards.
        code = None if process is None else process.poll()
        recorded = read_result(self._result_path(member))
        result = recorded or MemberResult(member, self._stage, self._call, RUNNING)
        if process is None:
            return result
        result = replace(result, output=str(process.output))
        if result.status != RUNNING or code is None:
            return result
        if code or recorded is not None:
            return replace(result, status=FAILED, error=process.describe_exit())
        return replace(result, status=ABSENT)

    def _result_path(self, member: int) -> Path:
        assert self.root is not None
        return result_path(self.root, member, self._stage, self._call)

    def _output_path(self, member: int | str) -> Path:
        assert self.root is not None
        return self.root / folder_of(member) / OUTPUT_NAME


def member_of_this_process() -> int | None:
    """Return the member that this process was started for; None in the one that starts others."""
    value = os.environ.get(MEMBER_VARIABLE)
    if value is None:
        return None
    if not value.isdecimal():
        raise ValueError(
            f"{MEMBER_VARIABLE}={value!r}: set it to the number of a member, counted from 0"
        )
    return int(value)


def _share_threads(num_processes: int) -> None:
    """Limit torch to this process's fraction of the CPU, unless OMP_NUM_THREADS is set."""
    if "OMP_NUM_THREADS" not in os.environ:
        num_threads = max(1, len(os.sched_getaffinity(0)) // num_processes)
        torch.set_num_threads(num_threads)
        os.environ["OMP_NUM_THREADS"] = str(num_threads)


def _root_directory(trainer: Any) -> Path:
    """Return the directory in which the members record their results."""
    inherited = os.environ.get(_DIRECTORY_VARIABLE)
    root = trainer.default_root_dir
    if inherited is None and "://" in root:
        raise ValueError(
            f"default_root_dir={root!r}: choose a local directory, in which members record their"
            " results, and a remote one for checkpoints with ModelCheckpoint(dirpath=...)"
        )
    return Path(inherited or root).absolute()
