"""What others may have planted where a store is, or will be: nothing of it is followed or waited
for, and no row of it gets into a store."""

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.programs.reliability.changes import CHANGES, NEW, NUM_ROWS, OLD, Attempt, look, run
from tests.programs.reliability.dataset import expected_rows
from tests.programs.reliability.forks import call
from tests.programs.reliability.outcome import Fault, Outcome, Subject

_MEMORY_BYTES = 2**30
#: Nothing that is done here takes longer than a second or two.
_LIMIT_S = 30.0
_STRANGER = 65534


@dataclass(frozen=True)
class Plant:
    """Something planted."""

    name: str
    put: Callable[[Path, Path], Any]


def _deep(path: Path, _: Path) -> None:
    path.write_text("[" * 200_000 + "]" * 200_000)


def _deep_under_keys(path: Path, _: Path) -> None:
    path.write_text('{"fields": ' + '{"a":' * 100_000 + "1" + "}" * 100_000 + "}")


def _long_number(path: Path, _: Path) -> None:
    path.write_text('{"num_rows": ' + "9" * 5000 + "}")


def _lines_of_long_numbers(path: Path, _: Path) -> None:
    path.write_text(("9" * 5000 + "\n") * 20)


def _sparse(path: Path, _: Path) -> None:
    path.touch()
    os.truncate(path, 2**36)


def _socket(path: Path, _: Path) -> None:
    os.mknod(path, 0o140644)


def _linked_copy(path: Path, elsewhere: Path) -> None:
    """A second name of a file elsewhere."""
    os.link(elsewhere / "file", path)


#: What is planted in the place of one file or directory.
FILES = (
    Plant("link to a file elsewhere", lambda path, away: path.symlink_to(away / "file")),
    Plant("link to a directory elsewhere", lambda path, away: path.symlink_to(away)),
    Plant("dangling link", lambda path, away: path.symlink_to(away / "nothing")),
    Plant("link to itself", lambda path, _: path.symlink_to(path)),
    Plant("link to /dev/zero", lambda path, _: path.symlink_to("/dev/zero")),
    Plant("second name of a file elsewhere", _linked_copy),
    Plant("fifo", lambda path, _: os.mkfifo(path)),
    Plant("socket", _socket),
    Plant("directory", lambda path, _: path.mkdir()),
    Plant("deep lists", _deep),
    Plant("deep objects", _deep_under_keys),
    Plant("number of 5,000 digits", _long_number),
    Plant("lines of 5,000 digits", _lines_of_long_numbers),
    Plant("64 GiB of nothing", _sparse),
    Plant("bytes of no encoding", lambda path, _: path.write_bytes(b"\xff\xfe" * 1000)),
)

#: Where: what is there, and the place, in which * is the one generation.
PLACES = (
    ("new", "s"),
    *(("overwrite", f"s/{name}") for name in (".lock", "manifest.json", "manifest.json.tmp", "*")),
    *(("overwrite", f"s/*/{name}") for name in ("x.memmap", "build.json", "journal")),
    ("overwrite", "s/g-0123456789abcdef"),
    *(("resumed", f"s/{name}") for name in (".lock", "manifest.json", "*")),
    *(("resumed", f"s/*/{name}") for name in ("x.memmap", "label.memmap", "build.json", "journal")),
)
ACTIONS = ("open", "verify", "build", "overwrite")


def _wholly_linked(building: Path, away: Path) -> None:
    """Someone else's unfinished build, in the place of the user's own."""
    shutil.move(building, away / "building")
    building.symlink_to(away / "building")


def _files_with_second_names(building: Path, away: Path) -> None:
    for file in building.glob("*.memmap"):
        os.link(file, away / file.name)


def _of_a_stranger(building: Path, _: Path) -> None:
    for path in (building, *building.iterdir()):
        os.chown(path, _STRANGER, _STRANGER)


#: Unfinished builds that look exactly like one of the user's own, and hold other rows.
FOREIGN_BUILDS = (
    Plant("unfinished build behind a link", _wholly_linked),
    Plant("unfinished build with second names", _files_with_second_names),
    Plant("unfinished build of another user", _of_a_stranger),
)

NUM_CASES = len(PLACES) * len(FILES) * len(ACTIONS) + len(FOREIGN_BUILDS)


def describe(number: int) -> str:
    """What a case is, in words."""
    if number >= NUM_CASES - len(FOREIGN_BUILDS):
        return f"{FOREIGN_BUILDS[number - NUM_CASES].name}, then a build"
    beginning, place, plant, action = _parts(number)
    return f"{plant.name} at {place} ({beginning}), then {action}"


def _parts(number: int) -> tuple[str, str, Plant, str]:
    number, action = divmod(number, len(ACTIONS))
    place, plant = divmod(number, len(FILES))
    return *PLACES[place], FILES[plant], ACTIONS[action]


def _generation(directory: Path) -> Path:
    (found,) = (directory / "s").glob("g-*")
    return found


def meet(
    subject: Subject, beginnings: Path, scratch: Path, _: random.Random, number: int
) -> Outcome:
    """Plant something, and open, verify or build the store there."""
    if number >= NUM_CASES - len(FOREIGN_BUILDS):
        return _meet_foreign_build(subject, beginnings, scratch, number)
    outcome = Outcome()
    beginning, place, plant, action = _parts(number)
    directory, away = _begin(scratch)
    shutil.copytree(beginnings / beginning, directory, dirs_exist_ok=True)
    edition = OLD if beginning == "overwrite" and action != "overwrite" else NEW
    path = directory / place
    if "*" in place:
        path = directory / place.replace("*", _generation(directory).name)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    plant.put(path, away)
    before = _content(away)
    attempt = Attempt(directory, edition=edition, overwrite=action == "overwrite")
    build = CHANGES["new"].run
    function = {"open": subject.open, "verify": subject.verify}.get(action)
    ending = (
        call(run, build, subject, attempt, memory_bytes=_MEMORY_BYTES, limit_s=_LIMIT_S)
        if function is None
        else call(_use, function, attempt.path, memory_bytes=_MEMORY_BYTES, limit_s=_LIMIT_S)
    )
    what = describe(number)
    returned = outcome.add_ending(ending, what, allowed=True)
    after = _content(away)
    if place == "s":
        # The path that the user gives may be a link to another disk: a store is made there, and
        # what was there stays.
        after = {name: data for name, data in after.items() if name in before}
    if after != before:
        outcome.add(Fault.WRONG_ROWS, f"{what}: files elsewhere were changed")
    if returned and function is None:
        look(outcome, subject, attempt.path, [expected_rows(NUM_ROWS, edition)], what)
    return outcome


def _meet_foreign_build(subject: Subject, beginnings: Path, scratch: Path, number: int) -> Outcome:
    outcome = Outcome()
    plant = FOREIGN_BUILDS[number - NUM_CASES]
    if plant.put is _of_a_stranger and os.geteuid() != 0:
        outcome.notes[f"left out, needs root: {plant.name}"] += 1
        return outcome
    directory, away = _begin(scratch)
    shutil.copytree(beginnings / "resumed", directory, dirs_exist_ok=True)
    # Rows 3 to 30, which are no probes, and which the unfinished build has written.
    generation = _generation(directory)
    _spoil(generation / "x.memmap")
    plant.put(generation, away)
    attempt = Attempt(directory)
    ending = call(run, CHANGES["new"].run, subject, attempt, limit_s=_LIMIT_S)
    if outcome.add_ending(ending, plant.name, allowed=True):
        for file in away.glob("**/*.memmap"):
            # Whoever has another name of the files can still write into them.
            _spoil(file)
        look(outcome, subject, attempt.path, [expected_rows(NUM_ROWS, NEW)], plant.name)
    return outcome


def _spoil(file: Path) -> None:
    with open(file, "r+b") as opened:
        opened.seek(32)
        opened.write(b"\xee" * 320)


def _use(function: Callable[[Path], Any], path: Path) -> None:
    function(path)


def _begin(scratch: Path) -> tuple[Path, Path]:
    """An empty directory for the store, and one elsewhere with something in it."""
    for name in ("d", "away"):
        shutil.rmtree(scratch / name, ignore_errors=True)
        (scratch / name).mkdir()
    (scratch / "away" / "file").write_bytes(bytes(range(256)) * 100)
    return scratch / "d", scratch / "away"


def _content(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }
