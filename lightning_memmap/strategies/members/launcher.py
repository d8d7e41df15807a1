"""What the launchers of independent members have in common.

A launcher runs the stages of one member and records how they end. That of member 0 also runs the
others, in other processes or sequentially in this one, and prints one table.
"""

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from rich import get_console

from lightning_memmap._compat.processes import TunerExit, folder_below, move_trainer
from lightning_memmap.strategies.members.results import (
    DONE,
    FAILED,
    RUNNING,
    MemberResult,
    MemberResults,
    member_folder,
    read_member,
    record,
)

#: Which member a process trains. A user who sets it trains this one alone.
MEMBER_VARIABLE = "LIGHTNING_MEMMAP_MEMBER"
DIRECTORY_VARIABLE = "LIGHTNING_MEMMAP_MEMBERS_DIRECTORY"
_OUTPUT = "output.log"


def member_of_this_process() -> int | None:
    """The member that this process was started for.

    Returns:
        The member, from 0; None in the process that runs the others.

    Raises:
        ValueError: The environment variable ``LIGHTNING_MEMMAP_MEMBER`` is not a number.
    """
    text = os.environ.get(MEMBER_VARIABLE)
    if text is None:
        return None
    if not text.isdecimal():
        raise ValueError(f"{MEMBER_VARIABLE}={text!r}: give the number of a member, counted from 0")
    return int(text)


@dataclass(frozen=True)
class StageCall:
    """One call of ``fit``, ``validate``, ``test`` or ``predict``.

    Args:
        root: Where the members record how it ends.
        name: Name of the stage.
        number: How many stages of this name the program has called so far, this one included.
    """

    root: Path
    name: str
    number: int


class MemberLauncher(ABC):
    """Runs the stages of one member, and records how they end.

    Args:
        member: The member, from 0.
        num_members: Members of the run.
        raise_on_failure: Whether member 0 raises an error where another member failed.

    Attributes:
        member: The member.
        results: How the latest stage ended for all members; None except in the process that shows
            them.
    """

    # One count for the whole program, however many Trainers it makes.
    _counts: ClassVar[Counter[str]] = Counter()

    def __init__(self, member: int, num_members: int, raise_on_failure: bool) -> None:
        super().__init__()
        self.member = member
        self.results: MemberResults | None = None
        self._num_members = num_members
        self._raise_on_failure = raise_on_failure
        self._call: StageCall | None = None

    @property
    def call(self) -> StageCall:
        """The latest stage.

        Raises:
            RuntimeError: No stage has begun.
        """
        if self._call is None:
            raise RuntimeError("the Trainer has not begun a stage yet")
        return self._call

    @property
    def folder(self) -> Path | None:
        """Where this member's results are; None before its first stage."""
        return None if self._call is None else self._call.root / member_folder(self.member)

    @property
    def trainers(self) -> dict[int, L.Trainer]:
        """By member, the Trainers of all members in this process, where there are several."""
        return {}

    def move_outputs(self, trainer: Any) -> None:
        """Redirect everything that the Trainer writes to folders of this member. Idempotent.

        Args:
            trainer: The member's Trainer, with its callbacks and loggers.
        """
        folder = member_folder(self.member)
        move_trainer(trainer, folder)
        for callback in trainer.callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
                callback.dirpath = folder_below(callback.dirpath, folder)

    @abstractmethod
    def on_exception(self, exception: BaseException) -> None:
        """Called by the Trainer when an error ends it.

        Args:
            exception: The error.
        """

    def _begin(self, trainer: Any, root: Path) -> None:
        name = trainer.state.fn.value
        self._counts[name] += 1
        self._call = StageCall(root, name, self._counts[name])

    def _run_stage(
        self, trainer: L.Trainer, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a stage of this member in its Trainer."""
        self.move_outputs(trainer)
        began = perf_counter()
        self._record(trainer, RUNNING, 0.0)
        try:
            returned = function(*args, **kwargs)
        except TunerExit:
            self._record(trainer, DONE, perf_counter() - began)
            raise
        except BaseException as error:
            self._record(trainer, FAILED, perf_counter() - began, error)
            raise
        self._record(trainer, DONE, perf_counter() - began)
        return returned

    def _find_root(self, trainer: L.Trainer) -> Path:
        """Where the members record their results.

        Raises:
            ValueError: The Trainer's directory is not local.
        """
        given = os.environ.get(DIRECTORY_VARIABLE)
        root = trainer.default_root_dir
        if given is None and "://" in root:
            raise ValueError(
                f"default_root_dir={root!r}: memmap_independent records the results of its members"
                " there; choose a local directory, and a remote one for checkpoints with"
                " ModelCheckpoint(dirpath=...)"
            )
        return Path(given or root).absolute()

    def _show(self) -> MemberResults:
        members = tuple(self._result_of(member) for member in range(self._num_members))
        self.results = MemberResults(self.call.name, members)
        if self._num_members > 1:
            get_console().print(self.results.table())
        return self.results

    def _result_of(self, member: int) -> MemberResult:
        """How a member ended this stage, or that it is running."""
        return self._recorded(member) or self._running(member)

    def _running(self, member: int) -> MemberResult:
        return MemberResult(member, self.call.name, self.call.number, RUNNING)

    def _recorded(self, member: int) -> MemberResult | None:
        """What a member recorded of this stage."""
        call = self.call
        known = {
            (result.stage, result.call): result
            for result in read_member(call.root / member_folder(member))
        }
        return known.get((call.name, call.number))

    def _output(self, member: int | str) -> Path:
        return self.call.root / member_folder(member) / _OUTPUT

    def _record(
        self, trainer: Any, status: str, seconds: float, error: BaseException | None = None
    ) -> None:
        logged = trainer.callback_metrics if status == DONE else {}
        saver = trainer.checkpoint_callback
        saved = saver.best_model_path if isinstance(saver, ModelCheckpoint) else None
        call = self.call
        result = MemberResult(
            self.member,
            call.name,
            call.number,
            status,
            error=None if error is None else f"{type(error).__name__}: {error}",
            device=str(trainer.strategy.root_device),
            epochs=trainer.current_epoch,
            steps=trainer.global_step,
            seconds=seconds,
            metrics={name: float(value) for name, value in logged.items()},
            checkpoint=saved or None,
        )
        record(call.root / member_folder(self.member), result)
