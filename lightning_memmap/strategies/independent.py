"""``memmap_independent``: each device trains its own model, and none waits for another."""

import atexit
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from time import perf_counter, sleep
from types import FrameType
from typing import Any, ClassVar

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info
from rich import get_console
from typing_extensions import override

from lightning_memmap._compat.launchers import (
    ScriptLauncher,
    TunerExit,
    move_outputs,
    script_command,
    share_threads,
)
from lightning_memmap._compat.modules import unless_none
from lightning_memmap.errors import MemberError, check_integer
from lightning_memmap.launched import Launched, on_sigterm
from lightning_memmap.strategies._base import OneNode
from lightning_memmap.tables import BAD, TitledTable, make_table, text, write_atomically

#: Which member a process trains. A user who sets it trains this one alone.
MEMBER_VARIABLE = "LIGHTNING_MEMMAP_MEMBER"
_DIRECTORY_VARIABLE = "LIGHTNING_MEMMAP_MEMBERS_DIRECTORY"
_POLL_S = 0.1
#: What a member writes: its results by stage and call, and, but for member 0, what it prints.
_RESULTS, _OUTPUT = re.compile(r"results-(fit|validate|test|predict)-\d+\.json"), "output.log"
#: The first line of such an output, which marks it as one.
_OUTPUT_HEAD = b"Output of a member of memmap_independent\n"


#: What `MemberResult.status` may be.
RUNNING, DONE, FAILED, ABSENT = "running", "done", "failed", "did not run"


@dataclass(frozen=True)
class MemberResult:
    """How one stage of one member ended, or that it is still running.

    Args:
        member: The member.
        stage: ``fit``, ``validate``, ``test`` or ``predict``.
        call: Number of the call among those of this stage in the program, from 1.
        status: ``running``, ``done``, ``failed``, or ``did not run`` where the member's program
            ended without this stage.
        error: Why it failed.
        device: The member's device.
        epochs: Epochs that were trained.
        steps: Optimizer steps that were taken.
        seconds: Wall time of the stage.
        metrics: The logged metrics, by name.
        checkpoint: The best checkpoint, or the last one where nothing is monitored.
        output: The file that the member's process prints to.
    """

    member: int
    stage: str
    call: int
    status: str
    error: str | None = None
    device: str = ""
    epochs: int = 0
    steps: int = 0
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    checkpoint: str | None = None
    output: str | None = None


@dataclass(frozen=True)
class MemberResults:
    """The results of one stage of all members.

    Args:
        stage: Name of the stage.
        members: One result per member, by number.
    """

    stage: str
    members: tuple[MemberResult, ...]

    @property
    def done(self) -> tuple[MemberResult, ...]:
        """The members that completed the stage."""
        return tuple(result for result in self.members if result.status == DONE)

    @property
    def failed(self) -> tuple[MemberResult, ...]:
        """The members that failed."""
        return tuple(result for result in self.members if result.status == FAILED)

    def check(self) -> None:
        """Raise an error where a member failed.

        Raises:
            MemberError: It says which failed, why, and where they printed to.
        """
        if not self.failed:
            return
        reasons = "; ".join(
            f"member {result.member}: {result.error}"
            + (f" (its output: {result.output})" if result.output else "")
            for result in self.failed
        )
        raise MemberError(
            f"{self.stage}: {len(self.failed)} of {len(self.members)} members failed, and the"
            f" others came to their end. {reasons}"
        )

    def table(self) -> TitledTable:
        """Make a table with a row for each member; below it is why some failed.

        The last rows are the mean and the standard deviation of each metric over the members that
        are done: the deviation of a sample, with one less than their number as divisor.

        Returns:
            The table, which a console of rich prints.
        """
        names = list(dict.fromkeys(name for result in self.done for name in result.metrics))
        rows = [
            [r.member, r.device, r.status, r.epochs, r.steps, f"{r.seconds:.1f}"]
            + [_number(r.metrics.get(name)) for name in names]
            for r in self.members
        ]
        if len(self.done) > 1 and names:
            columns = [[r.metrics[n] for r in self.done if n in r.metrics] for n in names]
            spreads = [_number(stdev(c) if len(c) > 1 else None) for c in columns]
            rows.append(["mean", *[""] * 5, *(_number(mean(c)) for c in columns)])
            rows.append(["std", *[""] * 5, *spreads])
        labels = ["member", "device", "status", "epochs", "steps", "seconds", *names]
        table = make_table(labels, [[text(cell) for cell in row] for row in rows], ["status"])
        failures = [text(f"member {r.member}: {r.error}", BAD) for r in self.failed]
        return TitledTable(f"Members: {self.stage}", table, failures)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def read_results(directory: str | Path, stage: str = "fit") -> MemberResults:
    """Read what the members of a run recorded, also while it is running or after it was killed.

    Args:
        directory: ``default_root_dir`` of the run's Trainer.
        stage: Name of the stage; of several calls, each member's last one is read.

    Returns:
        The results of the members that recorded this stage, in the order of their numbers.

    Raises:
        FileNotFoundError: No member has recorded this stage there.
    """
    found: dict[int, MemberResult] = {}
    for path in Path(directory).glob(f"{_folder_of('*')}/results-{stage}-*.json"):
        result = _read(path)
        if result is not None and result.call >= found.get(result.member, result).call:
            found[result.member] = result
    if not found:
        raise FileNotFoundError(f"no member has recorded a {stage} in {directory}")
    return MemberResults(stage, tuple(found[member] for member in sorted(found)))


def _folder_of(member: int | str) -> str:
    """The name of the folder that a member writes to; of ``*``, a pattern that matches all."""
    return f"member_{member}"


def _read(path: Path) -> MemberResult | None:
    """Read what a member recorded; None where there is no such file, or it is another one."""
    try:
        return MemberResult(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _old_results(root: Path, num_members: int) -> list[Path]:
    """Check that members will overwrite nothing but files of members.

    Args:
        root: Directory of the members' folders.
        num_members: The number of members.

    Returns:
        The results of earlier programs.

    Raises:
        ValueError: Another file has the name of one that a member writes.
    """
    results = list[Path]()
    folders = {_folder_of(member) for member in range(num_members)}
    for path in sorted(root.glob(f"{_folder_of('*')}/*")):
        if _RESULTS.fullmatch(path.name):
            is_ours = _read(path) is not None
        elif path.name == _OUTPUT and path.parent.name != _folder_of(0):
            with open(path, "rb") as file:
                is_ours = file.read(len(_OUTPUT_HEAD)) == _OUTPUT_HEAD
        else:
            continue
        if is_ours and path.name != _OUTPUT:
            results.append(path)
        if not is_ours and path.parent.name in folders:
            raise _foreign_file(path)
    return results


def _foreign_file(path: Path) -> ValueError:
    return ValueError(
        f"default_root_dir={str(path.parent.parent)!r}: {path} was not written by"
        " memmap_independent, and would be replaced: move it, or choose another default_root_dir"
    )


class IndependentStrategy(OneNode):
    """Trains members that exchange nothing: the folds of a k-fold, an ensemble, a model per site.

    The program runs once for each member, in its own process on its own device. Each member has
    its own Trainer with its own optimizers, checkpoints, loggers and early stopping, and its
    weights are bit for bit those of a run by itself. The program chooses its data and its model by
    ``member``; a `MemmapDataModule` chooses the member's fold or subset by it.

    What a Trainer writes goes to a folder ``member_<m>`` for each member: below its
    ``default_root_dir``, the ``save_dir`` of CSV and TensorBoard loggers, and the ``dirpath`` of a
    ``ModelCheckpoint``. The process that the user started is member 0. At the end of each stage it
    waits until the others have completed theirs, and prints one table. A member that fails does
    not stop the others.

    Args:
        num_members: Number of members; by default one per device. Where there are more than
            devices, member ``m`` has device ``m % devices``.
        raise_on_failure: Whether member 0 raises an error, once all others have ended, if one
            of them failed. Otherwise it continues, and ``results`` says which ones failed.
        **kwargs: As for Lightning's ``SingleDeviceStrategy``.

    Raises:
        ValueError: ``num_members`` is below 1 or below the number of devices, the environment
            variable ``LIGHTNING_MEMMAP_MEMBER`` is not a member, the Trainer asks for more than
            one node, or the program was started in several processes.
        MisconfigurationException: The program is a notebook, and there are several members.
        MemberError: With ``raise_on_failure``, at the end of a stage in which a member failed.
    """

    strategy_name = "memmap_independent"
    #: Members have no common result that could be compared with that of another strategy.
    trains_one_model = False
    what_it_is = "starts the processes of its members"
    advice = (
        f"on another machine, start the program with {MEMBER_VARIABLE}=<member> for each of its"
        " members; to train one model in all processes, use strategy='memmap_superbatch_ddp'"
    )

    def __init__(
        self, num_members: int | None = None, raise_on_failure: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if num_members is not None:
            check_integer("num_members", num_members, 1, "at least 1; omit it for one per device")
        self._count = num_members
        self.raise_on_failure = raise_on_failure
        self._members: _Members | None = None

    @property
    def member(self) -> int:
        """The member that this process trains, counted from 0. Known before there is a Trainer.

        Raises:
            ValueError: The environment variable ``LIGHTNING_MEMMAP_MEMBER`` is not a number.
        """
        return _member_of_this_process() or 0

    @property
    def num_members(self) -> int:
        """Members of the run: as given, or else the Trainer's devices."""
        return self._count or len(self.parallel_devices) or 1

    # Processes of the run on this machine.
    num_processes = num_members

    @property
    def processes_per_device(self) -> int:
        """The members on this member's device, which all hold their data there."""
        num_devices = max(1, len(self.parallel_devices))
        return len(range(self.member % num_devices, self.num_members, num_devices))

    @property
    def results(self) -> MemberResults | None:
        """How the latest stage ended for all members, in the process that the user started.

        None in all other processes, and before the end of a stage.
        """
        return None if self._members is None else self._members.results

    @property
    @override
    def root_device(self) -> torch.device:
        devices = self.parallel_devices
        return devices[self.member % len(devices)] if devices else super().root_device

    @override
    def check_devices(self) -> None:
        devices = self.parallel_devices
        if self._count is not None and self._count < len(devices):
            raise ValueError(
                f"num_members={self._count} with Trainer(devices={len(devices)}): some devices"
                f" would be idle; use devices={self._count}"
            )
        if self.member >= self.num_members:
            raise ValueError(
                f"{MEMBER_VARIABLE}={self.member}: there are {self.num_members} members, counted"
                " from 0"
            )

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        self._launcher = self._members = _Members(self)

    @override
    def setup_environment(self) -> None:
        # configure_callbacks of the module may have added callbacks.
        module = self.lightning_module
        if module is not None:
            move_outputs(module.trainer, _folder_of(self.member))
        super().setup_environment()

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint; ``{member}`` in its path is replaced by the number of this member."""
        path = str(checkpoint_path).replace("{member}", str(self.member))
        return super().load_checkpoint(path, *unless_none(weights_only))

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        # Where member 0 failed, the others train to their end.
        members, ends_all = self._members, isinstance(exception, (KeyboardInterrupt, MemberError))
        if members is not None and members.is_first and members.root is not None and not ends_all:
            members.show()


class _Members(ScriptLauncher):  # type: ignore[misc]
    """Runs the stages of one member; in the process of member 0, starts the others before."""

    # Of the whole program, however many Trainers it makes.
    _others: ClassVar[dict[int, Launched]] = {}
    _first_root: ClassVar[Path | None] = None
    _calls: ClassVar[Counter[str]] = Counter()

    def __init__(self, strategy: IndependentStrategy) -> None:
        super().__init__(LightningEnvironment(), num_processes=1, num_nodes=1)
        self.member, self._num_members = strategy.member, strategy.num_members
        self._raise_on_failure = strategy.raise_on_failure
        self.results: MemberResults | None = None
        #: Where the members record their results; None before the first stage.
        self.root: Path | None = None
        self.is_first = _member_of_this_process() is None
        self._stage = ""
        self._call = 0

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        # A notebook cannot be run again by the other members.
        return self._num_members == 1 or not self.is_first

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        # Only once, since the Trainer's own directory becomes a member's folder afterwards. All
        # Trainers use the directory of the program's first one.
        self.root = self.root or self._first_root or _find_root(trainer)
        self._stage = trainer.state.fn.value
        self._calls[self._stage] += 1
        self._call = self._calls[self._stage]
        if self._num_members > 1:
            share_threads(self._num_members)
            if self.is_first:
                self._start(self.root)
        returned = self._run_stage(trainer, function, *args, **kwargs)
        if self.is_first:
            results = self.show(self._has_ended)
            if results.failed and self._raise_on_failure:
                # This error may end the program, which must not leave the others running.
                self._wait()
                results.check()
        return returned

    def _run_stage(
        self, trainer: Any, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a stage of this member in its Trainer, and record how it ends."""
        move_outputs(trainer, _folder_of(self.member))
        bar = trainer.progress_bar_callback
        if self.member and bar is not None:
            bar.disable()
        device, began = str(trainer.strategy.root_device), perf_counter()
        result = MemberResult(self.member, self._stage, self._call, RUNNING, device=device)
        self._record(result)
        result = replace(result, status=DONE)
        try:
            return function(*args, **kwargs)
        except TunerExit:
            # A Tuner ends the fit in which it tried something.
            raise
        except BaseException as error:
            result = replace(result, status=FAILED, error=f"{type(error).__name__}: {error}")
            raise
        finally:
            logged = trainer.callback_metrics if result.status == DONE else {}
            saver = trainer.checkpoint_callback
            result = replace(
                result,
                epochs=trainer.current_epoch,
                steps=trainer.global_step,
                seconds=perf_counter() - began,
                metrics={name: float(value) for name, value in logged.items()},
                checkpoint=(isinstance(saver, ModelCheckpoint) and saver.best_model_path) or None,
            )
            self._record(result)

    def _record(self, result: MemberResult) -> None:
        path = self._file(self.member)
        if path.exists() and _read(path) is None:
            raise _foreign_file(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(result), indent=1).encode())

    def _start(self, root: Path) -> None:
        """Start the other members, unless this program has done so."""
        if not self._others:
            _Members._first_root = root
            for path in _old_results(root, self._num_members):
                path.unlink()
            for member in range(1, self._num_members):
                variables = {MEMBER_VARIABLE: str(member), _DIRECTORY_VARIABLE: str(root)}
                command, directory = script_command(f"_{_folder_of(member)}")
                self._others[member] = Launched(
                    command,
                    self._output(member),
                    head=_OUTPUT_HEAD,
                    cwd=directory,
                    env={**os.environ, **variables},
                    # Ctrl-C reaches all members.
                    start_new_session=False,
                )
            rank_zero_info(f"The other members print to {self._output('*')}")
            # The program ends after them.
            atexit.register(self._wait)
        elif len(self._others) + 1 != self._num_members:
            raise ValueError(
                f"num_members={self._num_members}: this program already trains"
                f" {len(self._others) + 1} members; all of its Trainers must have as many"
            )
        self.procs = list(self._others.values())

    def _has_ended(self, member: int) -> bool:
        result = _read(self._file(member))
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

    def show(self, is_ready: Callable[[int], bool] = lambda member: False) -> MemberResults:
        """Wait for the other members, and print one table."""
        self._wait(is_ready)
        members = tuple(self._result_of(member) for member in range(self._num_members))
        self.results = MemberResults(self._stage, members)
        if self._num_members > 1:
            get_console().print(self.results.table())
        return self.results

    def _result_of(self, member: int) -> MemberResult:
        """What a member recorded of this stage, completed by the state of its process."""
        process = self._others.get(member)
        # Polled before the file is read: a member that has ended records nothing afterwards.
        code = None if process is None else process.poll()
        recorded = _read(self._file(member))
        result = recorded or MemberResult(member, self._stage, self._call, RUNNING)
        if process is None:
            return result
        result = replace(result, output=str(process.output))
        if result.status != RUNNING or code is None:
            return result
        if code or recorded is not None:
            return replace(result, status=FAILED, error=process.describe_exit())
        return replace(result, status=ABSENT)

    def _file(self, member: int) -> Path:
        assert self.root is not None
        return self.root / _folder_of(member) / f"results-{self._stage}-{self._call}.json"

    def _output(self, member: int | str) -> Path:
        assert self.root is not None
        return self.root / _folder_of(member) / _OUTPUT


def _member_of_this_process() -> int | None:
    """The member that this process was started for; None in the one that runs the others."""
    text = os.environ.get(MEMBER_VARIABLE)
    if text is None:
        return None
    if not text.isdecimal():
        raise ValueError(f"{MEMBER_VARIABLE}={text!r}: give the number of a member, counted from 0")
    return int(text)


def _find_root(trainer: Any) -> Path:
    """Where the members record their results."""
    given = os.environ.get(_DIRECTORY_VARIABLE)
    root = trainer.default_root_dir
    if given is None and "://" in root:
        raise ValueError(
            f"default_root_dir={root!r}: memmap_independent records the results of its members"
            " there; choose a local directory, and a remote one for checkpoints with"
            " ModelCheckpoint(dirpath=...)"
        )
    return Path(given or root).absolute()
