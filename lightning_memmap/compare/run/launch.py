"""Starts one run in separate processes, watches it, and ends all of them with it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Generic

import msgspec

from lightning_memmap.compare.report.records import AnyRank, Value
from lightning_memmap.compare.run.plan import RunSpec

_POLL_S = 0.1
_TERMINATE_S = 5.0
_LOG_LINES = 12
#: What a launcher sets for its processes. A run is independent of whatever started this process.
_LAUNCHER = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")


class RunError(Value, frozen=True):
    """Why a run gave no result.

    Args:
        message: What to tell the user.
        refused: Whether a strategy or the data refused the run before its first step, since it
            cannot work here. Otherwise something broke.
        traceback: The traceback, if the run itself has written it.
    """

    message: str
    refused: bool = False
    traceback: str = ""


@dataclass(frozen=True)
class RunResult(Generic[AnyRank]):
    """What a run left behind.

    Args:
        folder: Its folder.
        ranks: The records of its processes, by rank.
        error: Why there are none.
    """

    folder: Path
    ranks: tuple[AnyRank, ...] = ()
    error: RunError | None = None


def run(
    spec: RunSpec,
    record: type[AnyRank],
    timeout_s: float,
    on_step: Callable[[int], None] = lambda step: None,
) -> RunResult[AnyRank]:
    """Do a run, and wait for it. In any case all its processes have ended afterwards.

    Args:
        spec: The run.
        record: What each of its processes writes; ``prepare`` writes none.
        timeout_s: A run that takes longer has failed.
        on_step: Called with the number of steps done, a few times a second.

    Returns:
        The records, or why there are none.

    Raises:
        KeyboardInterrupt: The user interrupted; the run has been ended.
    """
    path = spec.write()
    out = path.parent
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in (*_LAUNCHER, *_RENDEZVOUS) and not key.startswith("PL_")
    }
    command = [sys.executable, "-m", "lightning_memmap.compare.run.worker", str(path)]
    with (out / "log.txt").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            # A process group: ranks and workers end with it, and Ctrl-C reaches only the parent.
            start_new_session=True,
        )
        try:
            timed_out = _watch(process, out, timeout_s, on_step)
        finally:
            _end(process)
    if timed_out:
        error = RunError(f"not finished after {timeout_s:g} s (--timeout_s): {_tail(out)}")
        return RunResult(out, error=error)
    if process.returncode != 0:
        return RunResult(out, error=_read_error(out, process.returncode))
    try:
        ranks = read_ranks(out, record)
    except (OSError, ValueError) as damage:
        return RunResult(out, error=RunError(f"what it measured cannot be read: {damage}"))
    found = [rank.rank for rank in ranks]
    if spec.kind != "prepare" and found != list(range(ranks[0].world_size if ranks else 1)):
        error = RunError(f"only the ranks {found} wrote what they measured: {_tail(out)}")
        return RunResult(out, error=error)
    return RunResult(out, ranks)


def read_ranks(folder: Path, record: type[AnyRank]) -> tuple[AnyRank, ...]:
    """Read the records of the processes of a run.

    Args:
        folder: Folder of the run.
        record: The kind of record.

    Returns:
        The records that there are, by rank.
    """
    found = [
        msgspec.msgpack.decode(path.read_bytes(), type=record)
        for path in folder.glob("rank*.msgpack")
    ]
    return tuple(sorted(found, key=lambda rank: rank.rank))


def _watch(
    process: subprocess.Popen[bytes], out: Path, timeout_s: float, on_step: Callable[[int], None]
) -> bool:
    """Wait for the process to end. True if it did not end in time."""
    deadline = monotonic() + timeout_s
    while process.poll() is None:
        if monotonic() > deadline:
            return True
        on_step(_read_progress(out))
        sleep(_POLL_S)
    return False


def _read_progress(out: Path) -> int:
    try:
        return int((out / "progress").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # Not begun, or being written.
        return 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """End every process of the group, including those that outlived the first one."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        deadline = monotonic() + (_TERMINATE_S if number is signal.SIGTERM else 0)
        while monotonic() < deadline and _is_alive(process):
            sleep(_POLL_S / 10)
    process.wait()


def _is_alive(process: subprocess.Popen[bytes]) -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _read_error(out: Path, code: int) -> RunError:
    try:
        return msgspec.json.decode((out / "error.json").read_bytes(), type=RunError)
    except (OSError, ValueError):  # It is missing, or damaged, as on a full disk.
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        return RunError(f"it ended with {ended}: {_tail(out)}")


def _tail(out: Path) -> str:
    lines = (out / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    return " | ".join(line.strip() for line in lines[-_LOG_LINES:] if line.strip())
