"""How the stages of independent members ended: a file per member, and one table of all."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, stdev
from uuid import uuid4

from rich.markup import escape
from rich.table import Table

from lightning_memmap.errors import MemberError

_FILE = "results.json"
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

    def table(self) -> Table:
        """Make a table with a row for each member; below it is why some failed.

        The last rows are the mean and the standard deviation of each metric over the members that
        are done: the deviation of a sample, with one less than their number as divisor.

        Returns:
            The table, which a console of rich prints.
        """
        names = list(dict.fromkeys(name for result in self.done for name in result.metrics))
        table = Table(
            title=f"Members: {self.stage}",
            title_justify="left",
            caption="\n".join(f"member {r.member}: {escape(r.error or '')}" for r in self.failed),
            caption_justify="left",
        )
        table.add_column("member", justify="right")
        for name in ("device", "status"):
            table.add_column(name)
        for name in ("epochs", "steps", "seconds", *names):
            table.add_column(name, justify="right")
        for result in self.members:
            table.add_row(
                str(result.member),
                result.device,
                result.status,
                *(str(result.epochs), str(result.steps), f"{result.seconds:.1f}"),
                *(_number(result.metrics.get(name)) for name in names),
            )
        if len(self.done) > 1 and names:
            table.add_section()
            columns = [[r.metrics[n] for r in self.done if n in r.metrics] for n in names]
            table.add_row("mean", "", "", "", "", "", *(_number(mean(c)) for c in columns))
            spreads = (_number(stdev(c)) if len(c) > 1 else "" for c in columns)
            table.add_row("std", "", "", "", "", "", *spreads)
        return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def member_folder(member: int | str) -> str:
    """The name of the folder that a member writes to; of ``*``, a pattern that matches all."""
    return f"member_{member}"


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
    found = {}
    for folder in Path(directory).glob(member_folder("*")):
        for result in read_member(folder):
            if result.stage == stage:
                found[result.member] = result
    if not found:
        raise FileNotFoundError(f"no member has recorded a {stage} in {directory}")
    return MemberResults(stage, tuple(found[member] for member in sorted(found)))


def read_member(folder: Path) -> list[MemberResult]:
    """What a member recorded in its folder, in the order in which its stages began."""
    try:
        text = (folder / _FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [MemberResult(**entry) for entry in json.loads(text)]


def record(folder: Path, result: MemberResult) -> None:
    """Record a result in a member's folder, atomically, instead of one of the same call."""
    entries = {(known.stage, known.call): known for known in read_member(folder)}
    entries[result.stage, result.call] = result
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{_FILE}.{uuid4().hex}"
    partial.write_text(json.dumps([asdict(each) for each in entries.values()], indent=1))
    partial.replace(folder / _FILE)


def forget_results(directory: Path) -> None:
    """Remove what the members of an earlier run recorded; other files stay."""
    for path in directory.glob(f"{member_folder('*')}/{_FILE}"):
        path.unlink()
