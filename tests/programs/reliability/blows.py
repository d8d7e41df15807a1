"""What befalls a change: it is killed at a random moment or at a system call, or a call fails; and
what the next call makes of it."""

import os
import random
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from time import monotonic

from tests.programs.reliability.changes import (
    CHANGED,
    CHANGES,
    NEW,
    NUM_ROWS,
    Attempt,
    begin,
    look,
    look_for_leftovers,
    run,
)
from tests.programs.reliability.dataset import Files, expected_rows
from tests.programs.reliability.forks import Forked, Raised, call, orphans, wait_for_orphans
from tests.programs.reliability.outcome import Fault, Outcome, Subject

_ORPHAN_LIMIT_S = 5.0
#: Tries to hit a change at a random moment: it may end before the blow falls.
_MAX_TRIES = 20
#: By system call, how it may fail. A change is killed before each that has something to change.
_READS = {
    **dict.fromkeys(("read", "pread64", "preadv", "getdents64"), "EIO"),
    **{"mmap": "ENOMEM", "flock": "ENOLCK"},
}
_WRITES = {
    **dict.fromkeys(("openat", "mkdir", "write", "pwrite64", "ftruncate", "fallocate"), "ENOSPC"),
    **dict.fromkeys(("fsync", "rename", "unlink", "unlinkat", "rmdir", "sendfile"), "EIO"),
    "copy_file_range": "ENOSPC",
    "fcntl": "ENOLCK",
}
SYSTEM_CALLS = {**_READS, **_WRITES}
#: By so much more memory, and to how many times that, changes run short of it.
_LIMIT_STEP_BYTES, NUM_LIMITS = 4 * 2**20, 24
_LINE = re.compile(r"(\d+) +(\w+)\((.*)")


def kill_at_random_moment(
    subject: Subject,
    beginnings: Path,
    scratch: Path,
    rng: random.Random,
    _: int,
    *,
    name: str,
    victim: str,
) -> Outcome:
    """Kill a change, or one of the workers of a build, at a random moment."""
    outcome, change = Outcome(), CHANGES[name]
    num_workers = 2 if victim == "worker" else rng.choice((0, 2))
    # Rows that are still being read when the parent dies show workers that do not notice.
    slow_from = rng.choice((None, None, None, NUM_ROWS // 2)) if victim == "parent" else None
    content = Files(pause_s=0.0005, slow_from=slow_from, slow_pause_s=0.1)
    for _ in range(_MAX_TRIES):
        attempt = Attempt(
            begin(beginnings, scratch, name),
            overwrite=name == "overwrite",
            num_workers=num_workers,
            files=content,
        )
        under_way = Forked(run, change.run, subject, attempt)
        if victim == "worker":
            killed = _kill_worker(under_way, rng.uniform(0.0, 0.2), rng)
        else:
            limit_s = 0.6 if change.is_build else 0.3
            killed = not under_way.ended_within(rng.uniform(0.0, limit_s))
            if killed:
                under_way.kill()
        ending = under_way.end(subject.limit_s)
        if victim == "worker" or not killed:
            outcome.add_ending(ending, change.title, allowed=killed)
        if killed:
            break
    else:
        outcome.notes["not hit"] += 1
    _look_after(outcome, subject, name, attempt, rng, finished=not killed)
    return outcome


def _kill_worker(under_way: Forked, delay_s: float, rng: random.Random) -> bool:
    """Kill one of a build's workers, some time after they have started."""
    while not under_way.workers():
        if under_way.ended_within(0.001):
            return False
    if under_way.ended_within(delay_s) or not (workers := under_way.workers()):
        return False
    try:
        os.kill(rng.choice(workers), signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def calls_of(beginnings: Path, scratch: Path, name: str) -> list[tuple[str, int]]:
    """The system calls of a change that concern its files: name, and how many of this name a
    thread has made before."""
    attempt = Attempt(begin(beginnings, scratch, name), overwrite=name == "overwrite")
    log = scratch / "calls"
    expected_rows(NUM_ROWS, NEW)
    under_way = Forked(
        run,
        CHANGES[name].run,
        Subject(),
        attempt,
        trace=["-y", "-s0", "-o", str(log), "-e", f"trace={','.join(SYSTEM_CALLS)}"],
    )
    ending = under_way.end()
    if ending.status != 0 or isinstance(ending.value, Raised):
        raise RuntimeError(f"{name}, whose calls are counted, failed: {ending}")
    seen: dict[tuple[str, str], int] = {}
    found = set()
    for line in log.read_text(errors="replace").splitlines():
        if match := _LINE.match(line):
            thread, called, rest = match.groups()
            number = seen[thread, called] = seen.get((thread, called), 0) + 1
            if str(attempt.directory) in rest:
                found.add((called, number))
    log.unlink()
    return sorted(found)


def go_wrong_at_call(
    subject: Subject,
    beginnings: Path,
    scratch: Path,
    rng: random.Random,
    name: str,
    called: tuple[str, int],
    *,
    kills: bool,
) -> Outcome:
    """Kill a change at one of its system calls, or let the call fail."""
    outcome, change = Outcome(), CHANGES[name]
    attempt = Attempt(begin(beginnings, scratch, name), overwrite=name == "overwrite")
    system_call, number = called
    what = "signal=SIGKILL" if kills else f"error={SYSTEM_CALLS[system_call]}"
    trace = ["-o", "/dev/null", "-e", f"inject={system_call}:{what}:when={number}"]
    ending = Forked(run, change.run, subject, attempt, trace=trace).end(subject.limit_s)
    # A failure may be survived, where the call was not needed.
    finished = not ending.crashed and outcome.add_ending(ending, change.title, allowed=True)
    _look_after(outcome, subject, name, attempt, rng, finished=finished)
    return outcome


def run_short_of_memory(
    subject: Subject, beginnings: Path, scratch: Path, rng: random.Random, number: int, *, name: str
) -> Outcome:
    """Make a change with so many MiB of new memory: it may fail, and not hang."""
    outcome, change = Outcome(), CHANGES[name]
    attempt = Attempt(begin(beginnings, scratch, name), overwrite=name == "overwrite")
    room = number * _LIMIT_STEP_BYTES
    ending = call(run, change.run, subject, attempt, memory_bytes=room, limit_s=subject.limit_s / 2)
    finished = outcome.add_ending(ending, f"{change.title} in {room} bytes", allowed=True)
    _look_after(outcome, subject, name, attempt, rng, finished=finished)
    return outcome


def possible(calls: list[tuple[str, int]], *, kills: bool) -> list[tuple[str, int]]:
    """Those of some system calls at which it makes a difference to be killed, or to fail."""
    return [called for called in calls if not kills or called[0] in _WRITES]


def _look_after(
    outcome: Outcome,
    subject: Subject,
    name: str,
    attempt: Attempt,
    rng: random.Random,
    *,
    finished: bool,
) -> None:
    """Look at what a change left, make it again, and look at that."""
    ended, change = monotonic(), CHANGES[name]
    place = attempt.directory / change.place
    found = 0
    if change.place != "cache":  # The rows of that are looked at by whoever fetches them.
        versions = [change.after] if finished else [change.after, change.before]
        left = look(outcome, subject, place, versions, change.title)
        found = -1 if left is None else left
    if name == "append" and found == 0:  # Again, it would be another change.
        return
    later, expected, what = replace(attempt, files=Files()), change.after, "same"
    if change.is_build:
        later, what = _later(later, rng)
        expected = expected_rows(NUM_ROWS, later.edition + later.files.edition)
    outcome.notes[f"next: {what}"] += 1
    ending = call(run, change.run, subject, later, limit_s=subject.limit_s)
    in_the_way = isinstance(ending.value, Raised) and ending.value.name == "DatasetError"
    if in_the_way and not later.overwrite:
        # A whole store of the other dataset is there: it is not to be replaced unasked.
        later = replace(later, overwrite=True)
        ending = call(run, change.run, subject, later, limit_s=subject.limit_s)
    where = f"the next call ({what})"
    if outcome.add_ending(ending, where) and change.place != "cache":
        look(outcome, subject, place, [expected], where)
        look_for_leftovers(outcome, place)
    if orphans():
        if wait_for_orphans(max(0.0, ended + _ORPHAN_LIMIT_S - monotonic())):
            outcome.add(Fault.ORPHAN, f"workers were alive {_ORPHAN_LIMIT_S} s after the build")
        # What they wrote in the meantime must not have reached the new store.
        look(outcome, subject, place, [expected], f"{where}, and the end of the old workers")


def _later(attempt: Attempt, rng: random.Random) -> tuple[Attempt, str]:
    """The next build: of the same dataset, or of one that differs in one of three ways."""
    later = replace(attempt, num_workers=rng.choice((0, 2)))
    what = rng.choice(("same", "changed arguments", "changed files", "changed fingerprint"))
    other = Files(edition=CHANGED - NEW)
    if what == "changed arguments":
        later = replace(later, edition=CHANGED)
    elif what == "changed files":  # Nothing but the user's word tells.
        later = replace(later, files=other, overwrite=True)
    elif what == "changed fingerprint":
        later = replace(later, files=other, fingerprint="changed")
    return later, what


def can_trace() -> bool:
    """Whether system calls can be counted and made to fail here."""
    return shutil.which("strace") is not None
