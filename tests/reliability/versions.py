"""Builds in parts, appends and pulls that are killed, or whose file system fails, and what the next
call makes of it."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_memmap.errors import StoreError, StoreNotFoundError
from lightning_memmap.store import (
    append_store,
    build_part,
    build_store,
    finish_store,
    pull_store,
)
from lightning_memmap.store.remote import shards
from tests.reliability.calls import Calls, Mode
from tests.reliability.dataset import Edited, expected_rows, rows_of
from tests.reliability.forks import Raised, call
from tests.reliability.kills import NEW, OLD, look_for_leftovers
from tests.reliability.outcome import Fault, Outcome, Subject
from tests.unit.store.build_server import write_ranges_of

Way = Literal["parts", "append", "pull"]
WAYS: tuple[Way, ...] = ("parts", "append", "pull")

NUM_ROWS = 300
_NUM_SHARDS, _NUM_PARTS, _RANGE_ROWS = 3, 2, 50
_STORE, _FAR = "s", "far"


@dataclass(frozen=True)
class Change:
    """One change of a store.

    Args:
        way: How it is changed.
        path: The store.
        far: The store that is pulled.
    """

    way: Way
    path: Path
    far: Path

    def run(self, calls: Calls | None = None) -> None:
        """Make the change, in this process."""
        write_ranges_of(_RANGE_ROWS)
        shards._NUM_THREADS = 1
        if calls is not None:
            calls.install()
        dataset = Edited(NUM_ROWS, NEW)
        if self.way == "append":
            append_store(dataset, self.path, progress=False)
        elif self.way == "pull":
            pull_store(self.far.as_uri(), self.path, overwrite=True, progress=False)
        else:
            for index in range(_NUM_PARTS):
                part = (index, _NUM_PARTS)
                build_part(dataset, self.path, part, num_shards=_NUM_SHARDS, progress=False)
            finish_store(self.path, progress=False)

    @property
    def before(self) -> list[Any] | None:
        """The rows of the store before the change; None where there is none."""
        return None if self.way == "parts" else expected_rows(NUM_ROWS, OLD)

    @property
    def after(self) -> list[Any]:
        """The rows of the store after it."""
        added = expected_rows(NUM_ROWS, NEW)
        if self.way != "append":
            return added
        return expected_rows(NUM_ROWS, OLD) + added


def prepare(directory: Path) -> None:
    """Make what changes start from: one directory for each way, in which the store is named ``s``.

    Raises:
        RuntimeError: That fails already.
    """
    (directory / "parts").mkdir(parents=True)
    for path, edition in (
        (directory / "append" / _STORE, OLD),
        (directory / "pull" / _STORE, OLD),
        (directory / _FAR, NEW),
    ):
        built = call(_build, path, edition)
        if built.status != 0 or isinstance(built.value, Raised):
            raise RuntimeError(f"the store to change was not built: {built}")


def _build(path: Path, edition: int) -> None:
    build_store(Edited(NUM_ROWS, edition), path, num_shards=_NUM_SHARDS, progress=False)


def calls_of(beginnings: Path, scratch: Path, *, way: Way) -> list[str]:
    """The names of the calls to the file system of a change."""
    change = _begin(beginnings, scratch, way)
    log = scratch / "calls"
    log.mkdir()
    ending = call(change.run, Calls(change.path.parent, log=log))
    if ending.status != 0 or isinstance(ending.value, Raised):
        raise RuntimeError(f"the change whose calls are counted failed: {ending}")
    (file,) = log.iterdir()
    names = file.read_text().splitlines()
    shutil.rmtree(log)
    return names


def go_wrong_at_call(
    subject: Subject, beginnings: Path, scratch: Path, *, way: Way, number: int, mode: Mode
) -> Outcome:
    """Kill a change at one of its calls to the file system, or let the call fail."""
    outcome = Outcome()
    change = _begin(beginnings, scratch, way)
    calls = Calls(change.path.parent, number, mode)
    ending = call(change.run, calls, limit_s=subject.limit_s)
    finished = not ending.crashed and outcome.add_ending(ending, "the change", allowed=True)
    is_done = _look(outcome, subject, change, "the change", must_be_done=finished)
    if is_done and way == "append":  # Again, it would be another change.
        return outcome
    again = call(change.run, limit_s=subject.limit_s)
    if outcome.add_ending(again, "the next call"):
        _look(outcome, subject, change, "the next call", must_be_done=True)
        look_for_leftovers(outcome, change.path)
    return outcome


def _begin(beginnings: Path, scratch: Path, way: Way) -> Change:
    directory = scratch / "d"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(beginnings / way, directory)
    return Change(way, directory / _STORE, beginnings / _FAR)


def _look(
    outcome: Outcome, subject: Subject, change: Change, where: str, *, must_be_done: bool
) -> bool:
    """Compare a store's rows with those before and after a change. Returns whether it is done."""
    versions = [change.after] if must_be_done else [change.after, change.before]
    ending = call(_version_of, subject, change.path, versions)
    if not outcome.add_ending(ending, f"opening what {where} left"):
        return False
    version, fault = ending.value
    if fault is not None:
        outcome.add(fault[0], f"after {where}: {fault[1]}")
    return bool(version == 0)


def _version_of(
    subject: Subject, path: Path, versions: Sequence[list[Any] | None]
) -> tuple[int | None, tuple[Fault, str] | None]:
    """Which of some versions a store holds, where None is no store, or what is wrong with it."""
    try:
        store = subject.open(path)
    except StoreNotFoundError:
        if None in versions:
            return versions.index(None), None
        return None, (Fault.HALF_STORE, "there is no store")
    except StoreError as error:
        return None, (Fault.HALF_STORE, f"the store is refused: {error}")
    found = rows_of(store)
    number = versions.index(found) if found in versions else None
    if number is None:
        return None, (Fault.WRONG_ROWS, f"{store.num_rows} rows, of neither version")
    if damage := subject.verify(path):
        return number, (Fault.HALF_STORE, f"its rows are right, and `verify` finds {damage}")
    return number, None
