"""Lets members take turns in this process: one member's whole stage after the other's.

Member 0 has what the program has made: its Trainer, its module, its data. Each other member has
copies of them, made before member 0 begins, and is told to do the same with them.
"""

import bdb
import gc
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_memmap._compat.modules import compile_as, is_compiled_in_place, uncompiled
from lightning_memmap._compat.processes import Launcher, TunerExit
from lightning_memmap._compat.randomness import RandomState
from lightning_memmap._compat.tensors import tree_leaves
from lightning_memmap.errors import UnsuitableModuleError
from lightning_memmap.strategies.members.copies import MemberCopies
from lightning_memmap.strategies.members.launcher import MemberLauncher, member_of_this_process
from lightning_memmap.strategies.members.results import (
    FAILED,
    MemberResult,
    MemberResults,
    forget_results,
    member_folder,
)

#: By these the user ends the program, and with it all members.
_END = (KeyboardInterrupt, SIGTERMException, bdb.BdbQuit)


class OneLauncher(MemberLauncher, Launcher):
    """Runs the stages of one member in this process, and knows nothing of the others."""

    #: Whether the user has ended the latest stage.
    is_ended = False

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        self.is_ended = False
        device = trainer.strategy.root_device
        rank_zero_info(f"Member {self.member} of {self._num_members} on {device}")
        try:
            return self._run_stage(trainer, function, *args, **kwargs)
        except _END:
            # Lightning makes another error of this one.
            self.is_ended = True
            raise

    def join(self, root: Path, stage: tuple[str, int]) -> None:
        """Take part in a stage of the program."""
        self._root, self._stage = root, stage

    def fail(self, trainer: L.Trainer, error: BaseException) -> None:
        """Record that the stage has failed, also where that was before or after its run."""
        recorded = self._recorded(self.member)
        if recorded is None or recorded.status != FAILED:
            self._record(trainer, FAILED, 0.0, error)

    @override
    def kill(self, signum: Any) -> None:
        """There is no other process."""

    @override
    def on_exception(self, exception: BaseException) -> None:
        """There is nobody to tell."""


@dataclass(frozen=True)
class _Turn:
    """What a member is to do in a stage."""

    launcher: OneLauncher
    trainer: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def given(self) -> list[Any]:
        """What the Trainer's method was given: as much for each member."""
        return tree_leaves((self.args, self.kwargs))

    def parts(self) -> list[Any]:
        """The Trainer, and what it was made of: as much for each member where it is new."""
        return [self.trainer, *self.trainer.callbacks, *self.trainer.loggers]

    def modules(self) -> dict[str, Any]:
        """All modules by name; a member may have others than another one."""
        return dict(self.trainer.lightning_module.named_modules())


class TurnLauncher(OneLauncher):
    """Runs the stages of member 0, and lets each other member have its turn after that.

    Args:
        num_members: Members of the run.
        raise_on_failure: Whether a failure of another member is an error of member 0.
    """

    # A program has one set of members, however many Trainers it makes.
    _copies: ClassVar[defaultdict[int, MemberCopies]] = defaultdict(MemberCopies)
    _random: ClassVar[dict[int, RandomState]] = {}
    _directories: ClassVar[set[Path]] = set()

    def __init__(self, num_members: int, raise_on_failure: bool) -> None:
        given = member_of_this_process()
        super().__init__(given or 0, num_members, raise_on_failure)
        self._is_alone = given is not None
        self._others = range(1, num_members)
        self._trainers: dict[int, L.Trainer] = {}
        self._reasons: dict[int, str] = {}

    @property
    @override
    def trainers(self) -> dict[int, L.Trainer]:
        return dict(self._trainers)

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        self._root = self._root or self._find_root(trainer)
        self._count_stage(trainer)
        if self._is_alone:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        if self._root not in self._directories:
            self._directories.add(self._root)
            forget_results(self._root)
        own = _Turn(self, trainer, args, kwargs)
        turns = self._copy(own)
        self._trainers = {0: trainer} | {member: turn.trainer for member, turn in turns.items()}
        starts = self._starts()
        returned = failure = None
        try:
            returned = super().launch(function, *args, trainer=trainer, **kwargs)
        except _END:
            raise
        except BaseException as error:
            failure = error
            if not isinstance(error, TunerExit):
                del self._trainers[0]
        results = self._let_others(own, turns, starts)
        if failure is not None:
            try:
                raise failure
            finally:
                # It knows this function, and would be kept by it.
                del failure
        if self._raise_on_failure:
            results.check()
        return returned

    def _copy(self, own: _Turn) -> dict[int, _Turn]:
        """What each other member is to do that has not failed before.

        Raises:
            UnsuitableModuleError: Something cannot be copied as it is.
            ValueError: A checkpoint is that of member 0, the module is of another number of
                members, or a logger cannot tell members apart.
        """
        loggers = own.trainer.loggers
        if self._others and any(isinstance(logger, WandbLogger) for logger in loggers):
            raise ValueError(
                "WandbLogger with processes=False: it has one run in a process, to which all"
                " members would write; leave out processes=False, or take a CSVLogger"
            )
        for given in own.given():
            if isinstance(given, (str, Path)) and member_folder(0) in Path(given).parts:
                raise ValueError(
                    f"{str(given)!r} is of member 0, and all members would load it: write"
                    " {member} for the number in it, or ckpt_path='best'"
                )
        module = own.trainer.lightning_module
        knowing = [m for m, copies in self._copies.items() if copies.knows(module)]
        if knowing and sorted(knowing) != list(self._others):
            raise ValueError(
                f"num_members={self._num_members}: this {type(module).__name__} was trained by"
                f" {max(knowing) + 1} members; train it by as many, or make a new one"
            )
        if not knowing and self._others and any(map(is_compiled_in_place, module.modules())):
            raise UnsuitableModuleError(
                f"processes=False: {type(module).__name__} has a part of which compile() was"
                " called, and the copies of the other members would not be compiled: use"
                " torch.compile(part) or torch.compile(module)"
            )
        assert self._root is not None
        turns = {}
        self._reasons = {}
        for member in self._others:
            copies = self._copies[member]
            reason = copies.failure((own.trainer, module))
            if reason is not None:
                self._reasons[member] = reason
                continue
            launcher = OneLauncher(member, self._num_members, raise_on_failure=False)
            with uncompiled(module):
                found = copies.copy((own.trainer, own.args, own.kwargs), {id(self): launcher})
            # Of a Trainer that it knows the member has a launcher.
            turns[member] = _Turn(found[0].strategy.launcher, *found)
        for member, turn in turns.items():
            compile_as(turn.trainer.lightning_module, module)
            turn.launcher.join(self._root, self._stage)
            copies = self._copies[member]
            copies.keep(zip(own.given(), turn.given(), strict=True))
            if not copies.knows(own.trainer):
                copies.keep(zip(own.parts(), turn.parts(), strict=True))
        return turns

    def _starts(self) -> dict[int, RandomState]:
        """The random state that each other member begins with.

        That of the program, as in a process of its own. Its own goes on from stage to stage as
        long as the program's does.
        """
        now = RandomState.now()
        before = self._random.get(0)
        goes_on = before is not None and now.is_as(before)
        return {m: self._random.get(m, now) if goes_on else now for m in self._others}

    def _let_others(
        self, own: _Turn, turns: dict[int, _Turn], starts: dict[int, RandomState]
    ) -> MemberResults:
        """Let the others have their turns, and show how all have ended."""
        after = {0: RandomState.now()}
        try:
            for member in list(turns):
                starts[member].restore()
                self._let(own, turns.pop(member))
                after[member] = RandomState.now()
                if member not in self._trainers:
                    # Its Trainer and its module hold each other, and memory of a device.
                    gc.collect()
        finally:
            after[0].restore()
        self._random.clear()
        self._random.update(after)
        return self._show()

    def _let(self, own: _Turn, turn: _Turn) -> None:
        """Let a member have its turn."""
        copies = self._copies[turn.launcher.member]
        try:
            getattr(turn.trainer, self._stage[0])(*turn.args, **turn.kwargs)
        except BaseException as error:
            if isinstance(error, _END) or turn.launcher.is_ended:
                raise
            turn.launcher.fail(turn.trainer, error)
            self._let_go(own, turn.launcher.member, traceback.format_exc())
        else:
            # Also those that were made in configure_model.
            modules = own.modules()
            copies.keep((modules[n], m) for n, m in turn.modules().items() if n in modules)

    def _let_go(self, own: _Turn, member: int, text: str) -> None:
        """Tell why a member has failed, and let go of what it has."""
        self._output(member).write_text(text)
        print(text, file=sys.stderr)
        copies, recorded = self._copies[member], self._recorded(member)
        assert recorded is not None
        copies.forget([*own.given(), *own.parts(), *own.modules().values()])
        copies.fail((own.trainer, own.trainer.lightning_module), recorded.error or "")
        del self._trainers[member]

    @override
    def _result_of(self, member: int) -> MemberResult:
        result = super()._result_of(member)
        if member in self._reasons:
            result = replace(result, status=FAILED, error=self._reasons[member])
        if member and result.status == FAILED:
            result = replace(result, output=str(self._output(member)))
        return result
