"""The results that the members of ``memmap_independent`` record, written and read."""

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, stdev

from lightning_memmap.errors import MemberError
from lightning_memmap.tables import BAD, TitledTable, make_table, text, write_atomically

#: Files that a member writes: its results by stage and call, and what it prints.
_RESULTS = re.compile(r"results-(fit|validate|test|predict)-\d+\.json")
OUTPUT_NAME = "output.log"
#: The first line of such an output, by which it is recognized.
OUTPUT_HEAD = b"Output of a member of memmap_independent\n"


#: The values of `MemberResult.status`.
RUNNING = "running"
DONE = "done"
FAILED = "failed"
ABSENT = "did not run"


@dataclass(frozen=True)
class MemberResult:
    """How one stage of one member ended, or that it is still running.

    Args:
        member: The member.
        stage: ``fit``, ``validate``, ``test`` or ``predict``.
        call: Number of the call among the calls of this stage in the program, from 1.
        status: ``running``, ``done``, ``failed``, or ``did not run`` if the member's program ended
            without this stage.
        error: Why it failed.
        device: The member's device.
        epochs: Epochs that were trained.
        steps: Optimizer steps that were taken.
        seconds: Wall time of the stage.
        metrics: The logged metrics, by name.
        checkpoint: The best checkpoint, or the last one if nothing is monitored.
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
        """Raise an error if a member failed.

        Raises:
            MemberError: It says which members failed, why, and where they printed to.
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
            f" others ran to their end. {reasons}"
        )

    def table(self) -> TitledTable:
        """Make a table with a row for each member, followed by the errors of those that failed.

        The last rows are the mean and the sample standard deviation of each metric over the
        members that are done.

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
        table = make_table(labels, rows, ["status"])
        failures = [text(f"member {r.member}: {r.error}", BAD) for r in self.failed]
        return TitledTable(f"Members: {self.stage}", table, failures)


def read_results(directory: str | Path, stage: str = "fit") -> MemberResults:
    """Read what the members of a run recorded, also while it is running or after it was killed.

    Args:
        directory: ``default_root_dir`` of the run's Trainer.
        stage: Name of the stage; if it was called several times, each member's last call is read.

    Returns:
        The results of the members that recorded this stage, in the order of their numbers.

    Raises:
        FileNotFoundError: No member has recorded this stage there.
    """
    results: dict[int, MemberResult] = {}
    for path in Path(directory).glob(f"{folder_of('*')}/results-{stage}-*.json"):
        result = read_result(path)
        if result is not None and result.call >= results.get(result.member, result).call:
            results[result.member] = result
    if not results:
        raise FileNotFoundError(f"no member has recorded a {stage} in {directory}")
    return MemberResults(stage, tuple(results[member] for member in sorted(results)))


def folder_of(member: int | str) -> str:
    """Return the name of the folder that a member writes to, or a pattern for ``*``."""
    return f"member_{member}"


def result_path(root: Path, member: int, stage: str, call: int) -> Path:
    """Return the file in which a member records one stage."""
    return root / folder_of(member) / f"results-{stage}-{call}.json"


def write_result(path: Path, result: MemberResult) -> None:
    """Write a result at once, but never over a file that isn't one."""
    if path.exists() and read_result(path) is None:
        raise _foreign_file(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(result), indent=1).encode())


def read_result(path: Path) -> MemberResult | None:
    """Read a result; return None if the file doesn't exist, or isn't a result."""
    try:
        return MemberResult(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def old_results(root: Path, num_members: int) -> list[Path]:
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
    folders = {folder_of(member) for member in range(num_members)}
    for path in sorted(root.glob(f"{folder_of('*')}/*")):
        if _RESULTS.fullmatch(path.name):
            is_ours = read_result(path) is not None
        elif path.name == OUTPUT_NAME and path.parent.name != folder_of(0):
            with open(path, "rb") as file:
                is_ours = file.read(len(OUTPUT_HEAD)) == OUTPUT_HEAD
        else:
            continue
        if is_ours and path.name != OUTPUT_NAME:
            results.append(path)
        if not is_ours and path.parent.name in folders:
            raise _foreign_file(path)
    return results


def _foreign_file(path: Path) -> ValueError:
    return ValueError(
        f"default_root_dir={str(path.parent.parent)!r}: {path} was not written by"
        " memmap_independent, and would be replaced: move it, or choose another default_root_dir"
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
