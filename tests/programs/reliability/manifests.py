"""Manifests as strangers write them: each is refused, or says what the files hold."""

import random
import shutil
import signal
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from lightning_memmap.store.manifest import MANIFEST, Manifest
from tests.programs.reliability.damage import STORES, stores
from tests.programs.reliability.forks import call
from tests.programs.reliability.manifest_fuzz import mutated_manifests, open_mutated
from tests.programs.reliability.outcome import Fault, Outcome, Subject

#: Manifests that one process opens, one after the other.
BATCH = 150
_MEMORY_BYTES = 2**30
#: For one manifest, in which a stranger must not make anybody wait.
_LIMIT_S = 5.0
#: What Python tells of before it happens, and what no manifest may bring about.
_FORBIDDEN = (
    "ctypes.dlopen", "marshal.loads", "os.exec", "os.fork", "os.posix_spawn", "os.system",
    "pickle.find_class", "socket.connect", "subprocess.Popen",
)  # fmt: skip
_CHANGES = (
    "os.chmod", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink",
    "os.truncate", "shutil.rmtree",
)  # fmt: skip


class _TooSlow(BaseException):
    """The time for one manifest is over."""


@dataclass
class _Findings:
    """What came of some manifests."""

    opened: int
    faults: list[tuple[Fault, str]]


def open_fuzzed(
    subject: Subject, beginnings: Path, scratch: Path, rng: random.Random, _: int
) -> Outcome:
    """Open a store with some manifests of a stranger."""
    outcome = Outcome(runs=BATCH)
    name = rng.choice(sorted(STORES))
    pristine, path = stores(beginnings) / name, scratch / "s"
    shutil.copytree(pristine, path)
    seed = rng.getrandbits(32)
    progress = scratch / "progress"
    # The process gets time for all; each manifest is timed by itself.
    ending = call(_open_all, subject, pristine, path, seed, progress, memory_bytes=_MEMORY_BYTES)
    what = f"manifests of seed {seed} of a store of {name}, of which it opened {_last(progress)},"
    if outcome.add_ending(ending, what):
        findings: _Findings = ending.value
        outcome.faults += findings.faults
        outcome.notes["fuzzed manifests that opened"] += findings.opened
    return outcome


def _last(progress: Path) -> int:
    return progress.stat().st_size if progress.exists() else 0


def _open_all(subject: Subject, pristine: Path, path: Path, seed: int, progress: Path) -> _Findings:
    findings = _Findings(0, [])
    original = Manifest.read(pristine)
    signal.signal(signal.SIGALRM, _stop)
    # What is imported when it is first needed is imported now.
    subject.open(pristine)
    data = (pristine / MANIFEST).read_bytes()
    with open(progress, "wb", buffering=0) as done, _guarded(path, findings):
        manifests = mutated_manifests(seed, BATCH, data)
        for index, data in enumerate(manifests):
            started = monotonic()
            signal.setitimer(signal.ITIMER_REAL, _LIMIT_S)
            where = f"manifest {index} of seed {seed} of a store of {pristine.name}"
            try:
                findings.opened += open_mutated(path, data, original, subject.open)
            except AssertionError:
                fault = (Fault.WRONG_ROWS, f"{where}: {traceback.format_exc()}")
                findings.faults.append(fault)
            except _TooSlow:
                seconds = monotonic() - started
                findings.faults.append((Fault.HANG, f"{where} took {seconds:.1f} s"))
            except Exception:
                fault = (Fault.FOREIGN_ERROR, f"{where} raised {traceback.format_exc()}")
                findings.faults.append(fault)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            done.write(b".")
    return findings


def _stop(*_: Any) -> None:
    raise _TooSlow


@contextmanager
def _guarded(path: Path, findings: _Findings) -> Iterator[None]:
    """Note whatever is opened, changed or run outside of a store. An audit hook cannot be removed:
    this is for a process that ends soon."""
    active = True
    harmless = (str(path.parent), "/proc/", "/sys/", "/dev/null", *_libraries())

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if not active:
            return
        if event in _FORBIDDEN:
            findings.faults.append((Fault.FOREIGN_ERROR, f"{event} of {arguments!r}"))
        elif event == "open" or event in _CHANGES:
            place = arguments[0]
            if isinstance(place, (str, bytes, Path)):
                name = str(Path(place.decode() if isinstance(place, bytes) else place).absolute())
                if not name.startswith(harmless) or (event != "open" and path.name not in name):
                    findings.faults.append((Fault.WRONG_ROWS, f"{event} of {name}, outside"))

    sys.addaudithook(watch)
    try:
        yield
    finally:
        active = False


def _libraries() -> tuple[str, ...]:
    """Where Python finds source lines for a traceback."""
    names = ("stdlib", "purelib", "platlib")
    here = str(Path(__file__).parents[3])
    return (here, *(sysconfig.get_path(name) for name in names))
