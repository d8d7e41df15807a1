"""Runs members sequentially in this process: one member's whole stage after the other's.

Member 0 has what the program made: its Trainer, its module, its data. Each other member has copies
of them, made before member 0 begins, and runs the same stage with them.
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
from lightning_memmap.strategies.members.launcher import (
    MemberLauncher,
    StageCall,
    member_of_this_process,
)
from lightning_memmap.strategies.members.results import (
    FAILED,
    MemberResult,
    MemberResults,
    forget_results,
    member_folder,
)

#: With these the user ends the program, and with it all members.
_END = (KeyboardInterrupt, SIGTERMException, bdb.BdbQuit)


class InProcessLauncher(MemberLauncher, Launcher):
    """Runs the stages of one member in this process."""

    #: Whether the user ended the latest stage.
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
            # Lightning raises another error instead of this one.
            self.is_ended = True
            raise

    def join(self, call: StageCall) -> None:
        """Take part in a stage of the program.

        Args:
            call: The stage, as member 0 began it.
        """
        self._call = call

    def fail(self, trainer: L.Trainer, error: BaseException) -> None:
        """Record that the stage failed, even if that was before or after its run.

        Args:
            trainer: The member's Trainer.
            error: Why it failed. If the run recorded a failure itself, that one stays.
        """
        recorded = self._recorded(self.member)
        if recorded is None or recorded.status != FAILED:
            self._record(trainer, FAILED, 0.0, error)

    @override
    def kill(self, signum: Any) -> None:
        """Nothing: there is no other process."""

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Nothing: no other member depends on this one."""


@dataclass(frozen=True)
class _MemberRun:
    """A stage of one member: its launcher, its Trainer and the arguments."""

    launcher: InProcessLauncher
    trainer: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def arguments(self) -> list[Any]:
        """The arguments of the Trainer's method: the same number for each member."""
        return tree_leaves((self.args, self.kwargs))

    def components(self) -> list[Any]:
        """The Trainer, its callbacks and its loggers: the same number for each new Trainer."""
        return [self.trainer, *self.trainer.callbacks, *self.trainer.loggers]

    def modules(self) -> dict[str, Any]:
        """All submodules by name, which may differ between members."""
        return dict(self.trainer.lightning_module.named_modules())


class SequentialLauncher(InProcessLauncher):
    """Runs the stages of member 0, and then those of each other member.

    Args:
        num_members: Members of the run.
        raise_on_failure: Whether member 0 raises an error where another member failed.
    """

    # One set of members for the whole program, however many Trainers it makes.
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
        self._begin(trainer, self._find_root(trainer) if self._call is None else self._call.root)
        if self._is_alone:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        root = self.call.root
        if root not in self._directories:
            self._directories.add(root)
            forget_results(root)
        own = _MemberRun(self, trainer, args, kwargs)
        runs = self._copy(own)
        self._trainers = {0: trainer} | {member: run.trainer for member, run in runs.items()}
        initial = self._initial_states()
        returned = failure = None
        try:
            returned = super().launch(function, *args, trainer=trainer, **kwargs)
        except _END:
            raise
        except BaseException as error:
            failure = error
            if not isinstance(error, TunerExit):
                del self._trainers[0]
        results = self._run_others(own, runs, initial)
        if failure is not None:
            try:
                raise failure
            finally:
                # Its traceback refers to this frame, which would keep it alive.
                del failure
        if self._raise_on_failure:
            results.check()
        return returned

    def _copy(self, own: _MemberRun) -> dict[int, _MemberRun]:
        """The runs of all other members that have not failed before.

        Raises:
            UnsuitableModuleError: Something cannot be copied as it is.
            ValueError: As of `_check_copyable`.
        """
        self._check_copyable(own)
        module = own.trainer.lightning_module
        runs = {}
        self._reasons = {}
        for member in self._others:
            copies = self._copies[member]
            reason = copies.failure((own.trainer, module))
            if reason is not None:
                self._reasons[member] = reason
                continue
            launcher = InProcessLauncher(member, self._num_members, raise_on_failure=False)
            with uncompiled(module):
                found = copies.copy((own.trainer, own.args, own.kwargs), {id(self): launcher})
            # The copy of a known Trainer has a launcher already.
            runs[member] = _MemberRun(found[0].strategy.launcher, *found)
        for member, run in runs.items():
            compile_as(run.trainer.lightning_module, module)
            run.launcher.join(self.call)
            copies = self._copies[member]
            copies.keep(zip(own.arguments(), run.arguments(), strict=True))
            if not copies.knows(own.trainer):
                copies.keep(zip(own.components(), run.components(), strict=True))
        return runs

    def _check_copyable(self, own: _MemberRun) -> None:
        """Check that the members can have copies of the run of member 0.

        Raises:
            UnsuitableModuleError: The module is compiled in place.
            ValueError: A checkpoint belongs to member 0, the module to another number of members,
                or a logger cannot distinguish members.
        """
        loggers = own.trainer.loggers
        if self._others and any(isinstance(logger, WandbLogger) for logger in loggers):
            raise ValueError(
                "WandbLogger with processes=False: it has one run per process, to which all members"
                " would write; leave out processes=False, or use a CSVLogger"
            )
        for given in own.arguments():
            if isinstance(given, (str, Path)) and member_folder(0) in Path(given).parts:
                raise ValueError(
                    f"{str(given)!r} belongs to member 0, and all members would load it: write"
                    " {member} in place of the number, or ckpt_path='best'"
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
                f"processes=False: compile() was called on {type(module).__name__} or a submodule"
                " of it, and the copies of the other members would not be compiled: use"
                " torch.compile(submodule) or torch.compile(module)"
            )

    def _initial_states(self) -> dict[int, RandomState]:
        """The random state in which each other member begins the stage.

        In the first stage it is the program's, as in a process of its own. The member continues
        with its own as long as the program does so, too.
        """
        now = RandomState.now()
        before = self._random.get(0)
        continues = before is not None and now.equals(before)
        return {m: self._random.get(m, now) if continues else now for m in self._others}

    def _run_others(
        self, own: _MemberRun, runs: dict[int, _MemberRun], initial: dict[int, RandomState]
    ) -> MemberResults:
        """Run the stage of the other members, and show how all members ended."""
        after = {0: RandomState.now()}
        try:
            for member in list(runs):
                initial[member].restore()
                self._run_member(own, runs.pop(member))
                after[member] = RandomState.now()
                if member not in self._trainers:
                    # Its Trainer and its module refer to each other, and to memory of a device.
                    gc.collect()
        finally:
            after[0].restore()
        self._random.clear()
        self._random.update(after)
        return self._show()

    def _run_member(self, own: _MemberRun, run: _MemberRun) -> None:
        copies = self._copies[run.launcher.member]
        try:
            getattr(run.trainer, self.call.name)(*run.args, **run.kwargs)
        except BaseException as error:
            if isinstance(error, _END) or run.launcher.is_ended:
                raise
            run.launcher.fail(run.trainer, error)
            self._drop_failed(own, run.launcher.member, traceback.format_exc())
        else:
            # Including those that were made in configure_model.
            modules = own.modules()
            copies.keep((modules[n], m) for n, m in run.modules().items() if n in modules)

    def _drop_failed(self, own: _MemberRun, member: int, text: str) -> None:
        """Report why a member failed, and drop its copies."""
        self._output(member).write_text(text)
        print(text, file=sys.stderr)
        copies = self._copies[member]
        copies.forget([*own.arguments(), *own.components(), *own.modules().values()])
        reason = self._result_of(member).error or ""
        copies.fail((own.trainer, own.trainer.lightning_module), reason)
        del self._trainers[member]

    @override
    def _result_of(self, member: int) -> MemberResult:
        result = super()._result_of(member)
        if member in self._reasons:
            result = replace(result, status=FAILED, error=self._reasons[member])
        if member and result.status == FAILED:
            result = replace(result, output=str(self._output(member)))
        return result
