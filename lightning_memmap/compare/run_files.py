"""The files by which the processes of a run receive its spec, and return records and errors."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeAlias

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_memmap.compare.folder import RUN_SCHEMA, SPEC
from lightning_memmap.errors import MemmapError, describe_error

#: ``check`` trains a few steps and records rows, losses, weights and bytes; ``timed`` only measures
#: time and memory.
RunKind: TypeAlias = Literal["check", "timed"]
#: This file is made in the folder of a run when it has trained a step.
HAS_TRAINED = "trained"
#: Errors by which a strategy, a store or the Trainer rejects what is not supported.
REFUSALS = (MemmapError, ValueError, TypeError, ModuleNotFoundError, MisconfigurationException)


@dataclass(frozen=True)
class RunSpec:
    """A run in new processes."""

    kind: RunKind
    config: dict[str, Any]
    trainer: dict[str, Any]
    variant: str
    devices: int
    global_batch: int
    num_shards: int
    warmup_steps: int
    steps: int
    transform_is_random: bool
    out: str
    #: The weights file of the reference run; None in that run itself.
    reference: str | None = None
    #: Marks the folder of a run.
    schema: str = RUN_SCHEMA

    def write(self) -> Path:
        """Write this spec into the folder of the run, and make the folder if it is missing."""
        path = Path(self.out) / SPEC
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: str | Path) -> "RunSpec":
        """Read a spec that `write` has written."""
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))


@dataclass(frozen=True)
class RankRecord:
    """The measurements of one process of a run, which it writes to a JSON file."""

    rank: int
    world_size: int
    data_rank: int
    global_batch: int
    losses: Sequence[float]
    first_batch_s: float = 0.0
    #: Seconds of each part of each measured step.
    steps: Sequence[Mapping[str, float]] = ()
    #: Private and shared bytes of this process and all its descendants, by process id.
    processes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    #: Peak of allocated bytes, by accelerator.
    peaks: Mapping[str, int] = field(default_factory=dict)
    #: Bytes of the model's state, by device and kind.
    state_bytes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    #: Hash of the rows of each step of a check run, as the loader returned them.
    hashes: Sequence[int] = ()
    #: Number of parts of this process's rows that go through the module separately.
    num_separate_batches: int = 1
    parameters: Sequence[str] = ()
    #: Digests of the weights before the first step and after the last one; on global rank zero.
    initial: Mapping[str, str] = field(default_factory=dict)
    final: Mapping[str, str] = field(default_factory=dict)
    #: Squared distance of the final weights: in the reference run from the initial weights, in any
    #: other run from the reference. None if names or shapes differ, and on other ranks.
    squared_distance: float | None = None

    def write(self, out: Path) -> None:
        """Write this record into the folder of the run."""
        (out / f"rank{self.rank}.json").write_text(json.dumps(asdict(self)), encoding="utf-8")

    def mean_s(self, *parts: str) -> float:
        """Return the mean seconds of some parts of a step."""
        return fmean(sum(step[part] for part in parts) for step in self.steps)


def read_records(out: Path) -> list[RankRecord]:
    """Read the records of the processes of a run, by rank."""
    texts = [path.read_text(encoding="utf-8") for path in out.glob("rank*.json")]
    return sorted(
        (RankRecord(**json.loads(text)) for text in texts), key=lambda record: record.rank
    )


class RunError(Exception):
    """A run ended without a result."""

    def __init__(self, message: str, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


def write_error(out: Path, error: BaseException) -> None:
    """Write why this process failed. The parent shows the error that was written first."""
    is_refused = isinstance(error, REFUSALS) and not (out / HAS_TRAINED).exists()
    content = {"message": describe_error(error), "refused": is_refused}
    (out / f"error-{os.getpid()}.json").write_text(json.dumps(content), encoding="utf-8")


def read_error(out: Path) -> RunError | None:
    """Return the error of the process that failed first; None if none has written its error."""
    for path in sorted(out.glob("error-*.json"), key=lambda path: path.stat().st_mtime_ns):
        # It may be cut off, if the process was killed.
        with suppress(ValueError):
            return RunError(**json.loads(path.read_text(encoding="utf-8")))
    return None
