"""What is left where a process is killed just before one of its changes to the file system."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.programs.reliability.changes import (
    CHANGES,
    OLD,
    Attempt,
    Change,
    begin,
    look_for_leftovers,
    run,
    version_of,
)
from tests.programs.reliability.dataset import EDITED
from tests.programs.reliability.forks import Raised, call
from tests.programs.reliability.outcome import Outcome, Subject
from tests.programs.reliability.runner import runners
from tests.support.daily import numbers_of_today
from tests.support.store.build_server import kill_before_change

pytestmark = pytest.mark.slow

#: Threads do not make their changes in one order; a cache is looked at by `test_remote_cache`; and
#: a stream is stored as other rows are, once it has ended.
CASES = {name: CHANGES[name] for name in CHANGES if name not in ("threads", "cache", "stream")}
CASES |= {
    "resumed over a store": replace(CHANGES["resumed"], stores={"s": OLD}),
    "new table": replace(CHANGES["table"], stores={}),
    "new pull": replace(CHANGES["pull"], stores={"far": CHANGES["pull"].stores["far"]}),
}

#: A kill at each change of all cases takes minutes. On each day it is every third one.
KILL_STEP = 3


def change_until(event: int, change: Change, attempt: Attempt) -> None:
    kill_before_change(event)
    run(change.run, Subject(), attempt)


def kill_at_changes(name: str, path: Path) -> None:
    # Rows of numbers alone are written in fewer changes.
    EDITED.clear()
    change, outcome, left = CASES[name], Outcome(), list[int | None]()
    change.prepare(path / "beginnings" / name)
    for event in numbers_of_today(KILL_STEP):
        directory = begin(path / "beginnings", path, name)
        attempt, place = (
            Attempt(directory, overwrite="s" in change.stores),
            directory / change.place,
        )
        ending = call(change_until, event, change, attempt)
        assert ending.status in (0, -signal.SIGKILL)
        assert not isinstance(ending.value, Raised), ending.value.text
        number, fault = version_of(Subject(), place, [change.before, change.after])
        assert fault is None, (event, fault)
        left.append(number)
        # Nothing that was left stops the next one, or stays. Rows are not appended twice.
        if name != "append" or number == 0:
            outcome.add_ending(call(run, change.run, Subject(), attempt), "the next one")
            look_for_leftovers(outcome, place)
        assert version_of(Subject(), place, [change.after]) == (0, None), event
        assert not outcome.faults, (event, outcome.faults)
        if ending.status == 0:
            break
    # The kills came before the commit, and the last run was not killed.
    assert event > 3
    assert (left[0], left[-1]) == (0, 1)
    assert left == sorted(left)


@pytest.fixture(scope="module")
def runner() -> Iterator[ProcessPoolExecutor]:
    with runners(1) as started:
        # So that its threads are there before those of a test are counted.
        started.submit(os.getpid).result()
        yield started


@pytest.mark.parametrize("name", CASES)
def test_change_killed_anywhere_leaves_a_whole_store_or_none_and_can_be_made_again(
    runner: ProcessPoolExecutor, tmp_path: Path, name: str
) -> None:
    runner.submit(kill_at_changes, name, tmp_path).result(280)
