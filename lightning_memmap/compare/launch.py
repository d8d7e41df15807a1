"""Starts one run as processes of its own, watches it, and ends it with all of its processes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from lightning_memmap.compare.spec import RunSpec

_POLL_S = 0.1
_TERMINATE_S = 5.0
_LOG_LINES = 12
#: What a launcher sets for its processes. A run is one of its own, whatever started this one.
_LAUNCHER = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RunError:
    """Why a run gave no result.

    Args:
        message: What to tell the user.
        refused: Whether it was refused before the first step, by a strategy or the data: it
            cannot work here. Else something broke.
    """

    message: str
    refused: bool


@dataclass(frozen=True)
class RunResult:
    """What a run left behind.

    Args:
        out: Its folder.
        ranks: What each process wrote, by rank.
        error: Why there is none of it.
    """

    out: Path
    ranks: tuple[dict[str, Any], ...] = ()
    error: RunError | None = None


def run(
    spec: RunSpec, timeout_s: float, on_step: Callable[[int], None] = lambda step: None
) -> RunResult:
    """Do a run, and wait for it. Whatever happens, none of its processes is left.

    Args:
        spec: The run.
        timeout_s: A run that takes longer has failed.
        on_step: Called with the number of steps done, a few times a second.

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
    command = [sys.executable, "-m", "lightning_memmap.compare.child", str(path)]
    with (out / "log.txt").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            # A process group: ranks and workers end with it, and Ctrl-C reaches the parent alone.
            start_new_session=True,
        )
        try:
            timed_out = _watch(process, out, timeout_s, on_step)
        finally:
            _end(process)
    return _read(out, process.returncode, timeout_s if timed_out else None, spec)


def _watch(
    process: subprocess.Popen[bytes], out: Path, timeout_s: float, on_step: Callable[[int], None]
) -> bool:
    """Wait for the end; True where it did not come in time."""
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
    """End every process of the group, also those that outlived the first one."""
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


def _read(out: Path, code: int, timed_out_s: float | None, spec: RunSpec) -> RunResult:
    ranks = [json.loads(path.read_text(encoding="utf-8")) for path in out.glob("rank*.json")]
    ranks.sort(key=lambda rank: int(rank["rank"]))
    error = None
    if timed_out_s is not None:
        error = RunError(f"no end after {timed_out_s:g} s (--timeout_s): {_tail(out)}", False)
    elif code != 0:
        error = _read_error(out, code)
    elif spec.kind != "prepare" and [r["rank"] for r in ranks] != list(
        range(ranks[0]["world_size"] if ranks else 1)
    ):
        found = [rank["rank"] for rank in ranks]
        error = RunError(f"only the ranks {found} wrote what they measured: {_tail(out)}", False)
    return RunResult(out, tuple(ranks), error)


def _read_error(out: Path, code: int) -> RunError:
    path = out / "error.json"
    if not path.exists():
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        return RunError(f"it ended with {ended}: {_tail(out)}", False)
    found = json.loads(path.read_text(encoding="utf-8"))
    return RunError(f"{found['type']}: {found['message']}", bool(found["refused"]))


def _tail(out: Path) -> str:
    lines = (out / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    return " | ".join(line.strip() for line in lines[-_LOG_LINES:] if line.strip())
