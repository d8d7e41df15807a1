"""Builds that are killed, or whose file system fails, and what the next build makes of it."""

import operator
import os
import random
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any, Literal

from lightning_memmap.errors import StoreError, StoreNotFoundError
from lightning_memmap.store.manifest import Manifest
from tests.reliability.calls import Calls, Mode
from tests.reliability.dataset import Edited, Files, expected_rows, files, rows_of
from tests.reliability.forks import Forked, Raised, call, orphans, wait_for_orphans
from tests.reliability.outcome import Fault, Outcome, Subject
from tests.unit.store.build_server import write_ranges_of

Beginning = Literal["new", "overwrite", "resumed"]
Victim = Literal["parent", "worker"]

BEGINNINGS: tuple[Beginning, ...] = ("new", "overwrite", "resumed")
VICTIMS: tuple[Victim, ...] = ("parent", "worker")

NUM_ROWS = 300
NUM_SHARDS = 3
_RANGE_ROWS = 50
_STORE = "s"
#: The edition of the store that is overwritten; of the build that is killed; of a later one.
OLD, NEW, CHANGED = 1, 2, 3
#: The build that a resumed one goes on with was killed at this row, which is no probe.
_KILLED_AT_ROW = 215
_ORPHAN_LIMIT_S = 5.0
#: How the names of the files of rows end.
_ROWS = (".memmap", ".index", ".values")
#: Tries to hit a build at a random moment: it may end before the blow falls.
_MAX_TRIES = 20


@dataclass(frozen=True)
class Build:
    """One build.

    Args:
        path: Where the store goes.
        edition: Edition that the arguments of the dataset tell.
        fingerprint: What the user calls the dataset; None: nothing.
        overwrite: Replace a store of another dataset.
        num_workers: Processes that read.
        files: What the dataset reads.
    """

    path: Path
    edition: int = NEW
    fingerprint: str | None = None
    overwrite: bool = False
    num_workers: int = 0
    files: Files = field(default_factory=Files)

    @property
    def dataset_edition(self) -> int:
        """Edition of the rows that the store must hold after it."""
        return self.edition + self.files.edition

    def run(self, subject: Subject, calls: Calls | None = None) -> None:
        """Build the store, in this process."""
        write_ranges_of(_RANGE_ROWS)
        files.__dict__.update(self.files.__dict__)
        if calls is not None:
            calls.install()
        options = {} if self.fingerprint is None else {"fingerprint": self.fingerprint}
        subject.build(
            Edited(NUM_ROWS, self.edition),
            self.path,
            num_shards=NUM_SHARDS,
            num_workers=self.num_workers,
            overwrite=self.overwrite,
            progress=False,
            **options,
        )


def prepare(directory: Path) -> None:
    """Make what builds start from: one directory for each, in which the store is named ``s``.

    Raises:
        RuntimeError: That fails already.
    """
    for name in BEGINNINGS:
        (directory / name).mkdir(parents=True)
    built = call(Build(directory / "overwrite" / _STORE, edition=OLD).run, Subject())
    if built.status != 0 or isinstance(built.value, Raised):
        raise RuntimeError(f"the store to overwrite was not built: {built}")
    interrupted = Build(directory / "resumed" / _STORE)
    killed = call(_run_until_row, interrupted, _KILLED_AT_ROW)
    if killed.status != -signal.SIGKILL:
        raise RuntimeError(f"the build to resume was not killed: {killed}")


def _run_until_row(build: Build, last: int) -> None:
    def read(dataset: Edited, row: int) -> object:
        if row == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(dataset, row)

    original = Edited.__getitem__
    Edited.__getitem__ = read  # type: ignore[assignment,method-assign]
    build.run(Subject())


# Kinds of cases


def kill_at_random_moment(
    subject: Subject,
    beginnings: Path,
    scratch: Path,
    rng: random.Random,
    *,
    beginning: Beginning,
    victim: Victim,
) -> Outcome:
    """Kill a build, or one of its workers, at a random moment, and look at what follows."""
    outcome = Outcome()
    num_workers = 2 if victim == "worker" else rng.choice((0, 2))
    # Rows that are still being read when the parent dies show workers that do not notice.
    slow_from = rng.choice((None, None, None, NUM_ROWS // 2)) if victim == "parent" else None
    content = Files(pause_s=0.0005, slow_from=slow_from, slow_pause_s=0.1)
    for _ in range(_MAX_TRIES):
        directory = _begin(beginnings, scratch, beginning)
        build = Build(
            directory / _STORE,
            overwrite=beginning == "overwrite",
            num_workers=num_workers,
            files=content,
        )
        under_way = Forked(build.run, subject)
        if victim == "worker":
            killed = _kill_worker(under_way, rng.uniform(0.0, 0.2), rng)
        else:
            killed = not under_way.ended_within(rng.uniform(0.0, 0.6))
            if killed:
                under_way.kill()
        ending = under_way.end(subject.limit_s)
        if victim == "worker" or not killed:
            outcome.add_ending(ending, "the build", allowed=killed)
        if killed:
            break
        look(outcome, subject, build.path, [NEW])
    else:
        outcome.notes["not hit"] += 1
    _look_after(outcome, subject, build, beginning, rng, finished=False)
    return outcome


def _kill_worker(under_way: Forked, delay_s: float, rng: random.Random) -> bool:
    """Kill one of a build's workers, some time after they have started."""
    while not under_way.workers():
        if under_way.ended_within(0.001):
            return False
    if under_way.ended_within(delay_s):
        return False
    workers = under_way.workers()
    if not workers:
        return False
    try:
        os.kill(rng.choice(workers), signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def calls_of(
    subject: Subject, beginnings: Path, scratch: Path, *, beginning: Beginning, victim: Victim
) -> list[str]:
    """The names of the calls to the file system of a build, or of its busiest worker."""
    build = _build_for_calls(_begin(beginnings, scratch, beginning), beginning, victim)
    log = scratch / "calls"
    log.mkdir()
    ending = call(build.run, subject, Calls(build.path.parent, who=victim, log=log))
    if ending.status != 0 or isinstance(ending.value, Raised):
        raise RuntimeError(f"the build whose calls are counted failed: {ending}")
    lists = [file.read_text().splitlines() for file in log.iterdir()]
    shutil.rmtree(log)
    return max(lists, key=len)


def go_wrong_at_call(
    subject: Subject,
    beginnings: Path,
    scratch: Path,
    rng: random.Random,
    *,
    beginning: Beginning,
    victim: Victim,
    number: int,
    mode: Mode,
) -> Outcome:
    """Kill a build at one of its calls to the file system, or let the call fail."""
    outcome = Outcome()
    build = _build_for_calls(_begin(beginnings, scratch, beginning), beginning, victim)
    ending = call(
        build.run,
        subject,
        Calls(build.path.parent, number, mode, victim),
        limit_s=subject.limit_s,
    )
    finished = False
    if victim == "worker" or not ending.crashed:
        # A failure may be survived, where the call was not needed.
        finished = outcome.add_ending(ending, "the build", allowed=True)
    _look_after(outcome, subject, build, beginning, rng, finished=finished)
    return outcome


def _build_for_calls(directory: Path, beginning: Beginning, victim: Victim) -> Build:
    return Build(
        directory / _STORE,
        overwrite=beginning == "overwrite",
        num_workers=2 if victim == "worker" else 0,
    )


# What must hold afterwards


def _begin(beginnings: Path, scratch: Path, beginning: Beginning) -> Path:
    directory = scratch / "d"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(beginnings / beginning, directory)
    return directory


def _look_after(
    outcome: Outcome,
    subject: Subject,
    build: Build,
    beginning: Beginning,
    rng: random.Random,
    *,
    finished: bool,
) -> None:
    """Look at what a build left, build again, and look at that."""
    ended = monotonic()
    editions = [NEW] if finished or beginning != "overwrite" else [OLD, NEW]
    must_exist = finished or beginning == "overwrite"
    found = look(outcome, subject, build.path, editions, must_exist=must_exist)
    later = replace(build, num_workers=rng.choice((0, 2)), files=Files())
    what = rng.choice(("same", "changed arguments", "changed files", "changed fingerprint"))
    if what == "changed arguments":
        later = replace(later, edition=CHANGED)
    elif what == "changed files":
        # Nothing but the user's word tells.
        later = replace(later, files=Files(edition=CHANGED - NEW), overwrite=True)
    elif what == "changed fingerprint":
        later = replace(later, files=Files(edition=CHANGED - NEW), fingerprint="changed")
    outcome.notes[f"next: {what}"] += 1
    ending = call(later.run, subject, limit_s=subject.limit_s)
    in_the_way = isinstance(ending.value, Raised) and ending.value.name == "DatasetError"
    if in_the_way and found is not None and not later.overwrite:
        # A whole store of the other dataset is there: it is not to be replaced unasked.
        later = replace(later, overwrite=True)
        ending = call(later.run, subject, limit_s=subject.limit_s)
    where = f"the next build ({what})"
    if outcome.add_ending(ending, where):
        look(outcome, subject, later.path, [later.dataset_edition], must_exist=True, where=where)
        look_for_leftovers(outcome, later.path)
    if orphans():
        left = wait_for_orphans(max(0.0, ended + _ORPHAN_LIMIT_S - monotonic()))
        if left:
            outcome.add(
                Fault.ORPHAN, f"{len(left)} workers were alive {_ORPHAN_LIMIT_S} s after the build"
            )
        # What they wrote in the meantime must not have reached the new store.
        where = f"{where}, and the end of the old workers"
        look(outcome, subject, later.path, [later.dataset_edition], must_exist=True, where=where)


def look(
    outcome: Outcome,
    subject: Subject,
    path: Path,
    editions: Sequence[int],
    *,
    must_exist: bool = False,
    where: str = "the killed build",
) -> int | None:
    """Compare a store's rows with those of the editions that it may hold.

    Returns:
        The edition; None where there is no store.
    """
    for edition in editions:
        expected_rows(NUM_ROWS, edition)  # Made once here, and inherited by the process that looks.
    ending = call(_edition_of, subject, path, tuple(editions))
    if not outcome.add_ending(ending, f"opening what {where} left"):
        return None
    edition: int | None = ending.value[0]
    fault = ending.value[1]
    if fault is not None:
        outcome.add(fault[0], f"after {where}: {fault[1]}")
    elif edition is None and must_exist:
        outcome.add(Fault.HALF_STORE, f"after {where}: there is no store")
    return edition


def _edition_of(
    subject: Subject, path: Path, editions: Sequence[int]
) -> tuple[int | None, tuple[Fault, str] | None]:
    """The edition whose rows a store holds, or what is wrong with it."""
    try:
        store = subject.open(path)
    except StoreNotFoundError:
        return None, None
    except StoreError as error:
        return None, (Fault.HALF_STORE, f"the store is refused: {error}")
    found = rows_of(store)
    for edition in editions:
        if found == expected_rows(NUM_ROWS, edition):
            break
    else:
        counts = _rows_of_editions(found)
        return None, (Fault.WRONG_ROWS, f"rows of editions {list(editions)} expected: {counts}")
    damage = subject.verify(path)
    if damage:
        return edition, (Fault.HALF_STORE, f"its rows are right, and `verify` finds {damage}")
    return edition, None


def _rows_of_editions(found: list[Any]) -> str:
    counts = [
        f"{sum(map(operator.eq, found, expected_rows(NUM_ROWS, edition)))} of edition {edition}"
        for edition in range(CHANGED + 1)
    ]
    return f"{len(found)} rows found, {', '.join(counts)} (probes are of all editions)"


def look_for_leftovers(outcome: Outcome, path: Path) -> None:
    """Look for what a finished build should have cleared away."""
    beside = {entry.name for entry in path.parent.iterdir()}
    generation = Manifest.read(path).generation
    within = {entry.name for entry in path.iterdir()} - {generation, "manifest.json", ".lock"}
    inside = {entry.name for entry in (path / generation).iterdir() if entry.suffix not in _ROWS}
    left = sorted(beside - {_STORE}) + sorted(within) + sorted(inside)
    if left:
        outcome.add(Fault.LEFTOVER, f"the finished build left {', '.join(left)}")
