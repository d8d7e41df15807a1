"""What the launchers of independent members have in common: one member's stages, and one table.

A launcher runs the stages of one member and records how they end. That of member 0 sees to the
others, too: in processes of their own, or in turn in this one.
"""

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
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
    """The member that this process was started for; None in the process that the others are
    started from, or take turns in.

    Raises:
        ValueError: The environment variable is no number.
    """
    text = os.environ.get(MEMBER_VARIABLE)
    if text is None:
        return None
    if not text.isdecimal():
        raise ValueError(f"{MEMBER_VARIABLE}={text!r}: the number of a member, counted from 0")
    return int(text)


class MemberLauncher(ABC):
    """Runs the stages of one member, and records how they end.

    Args:
        member: The member.
        num_members: Members of the run.
        raise_on_failure: Whether a failure of another member is an error of member 0.
    """

    # A program has one count of its stages, however many Trainers it makes.
    _calls: ClassVar[Counter[str]] = Counter()

    def __init__(self, member: int, num_members: int, raise_on_failure: bool) -> None:
        super().__init__()
        self.member = member
        self.results: MemberResults | None = None
        self._num_members = num_members
        self._raise_on_failure = raise_on_failure
        self._root: Path | None = None
        self._stage = ("", 0)

    @property
    def folder(self) -> Path | None:
        """Where this member's results are, from its first stage on."""
        return None if self._root is None else self._root / member_folder(self.member)

    @property
    def trainers(self) -> dict[int, L.Trainer]:
        """The Trainers of the members that this launcher has in this process, by member."""
        return {}

    def move_outputs(self, trainer: Any) -> None:
        """Let all that the Trainer writes go to folders of this member. Again does no harm."""
        folder = member_folder(self.member)
        move_trainer(trainer, folder)
        for callback in trainer.callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
                callback.dirpath = folder_below(callback.dirpath, folder)

    @abstractmethod
    def on_exception(self, exception: BaseException) -> None:
        """The Trainer ends by this error."""

    def _count_stage(self, trainer: L.Trainer) -> None:
        assert trainer.state.fn is not None
        name = trainer.state.fn.value
        self._calls[name] += 1
        self._stage = (name, self._calls[name])

    def _run_stage(
        self, trainer: L.Trainer, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a stage of this member, in the Trainer that it has."""
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
        """Where the members record their results."""
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
        self.results = MemberResults(self._stage[0], members)
        if self._num_members > 1:
            get_console().print(self.results.table())
        return self.results

    def _result_of(self, member: int) -> MemberResult:
        """How a member has ended this stage, or that it runs."""
        return self._recorded(member) or MemberResult(member, *self._stage, RUNNING)

    def _recorded(self, member: int) -> MemberResult | None:
        """What a member has recorded of this stage."""
        assert self._root is not None
        known = {
            (result.stage, result.call): result
            for result in read_member(self._root / member_folder(member))
        }
        return known.get(self._stage)

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
            self.member,
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
