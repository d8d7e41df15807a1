"""What is left where a process is killed just before each of its changes to the file system."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lightning_memmap.errors import StoreNotFoundError
from lightning_memmap.store import build_store, open_store, push_store, verify_store
from tests.datasets import Numbered, holds
from tests.unit.store.build_server import Build, BuildServer, killed
from tests.unit.store.layout import names_in

pytestmark = pytest.mark.slow


OLD, NEW, BOTH = 1, 2, 3
NUM_ROWS = 200


def of(directory: Path, **options: Any) -> Build:
    return Build(str(directory / "s"), NUM_ROWS, version=NEW, range_rows=50, **options)


def old(server: BuildServer, directory: Path) -> None:
    assert server.run(replace(of(directory), version=OLD)) == 0


def nothing(server: BuildServer, directory: Path) -> None:
    pass


def begun(server: BuildServer, directory: Path) -> None:
    """A build that was killed in its third range, where there was a store or none."""
    assert killed(server.run(of(directory, kill_at_row=130, overwrite=True)))


def both(server: BuildServer, directory: Path) -> None:
    old(server, directory)
    begun(server, directory)


def parts(server: BuildServer, directory: Path) -> None:
    for index in range(2):
        assert server.run(of(directory, part=(index, 2), overwrite=True)) == 0


def replacing_parts(server: BuildServer, directory: Path) -> None:
    old(server, directory)
    parts(server, directory)


def far(server: BuildServer, directory: Path) -> None:
    """A store that is to be pushed over another one."""
    build_store(Numbered(NUM_ROWS, OLD), directory / "old", num_shards=3, progress=False)
    push_store(directory / "old", (directory / "s").as_uri(), progress=False)
    shutil.rmtree(directory / "old")
    build_store(Numbered(NUM_ROWS, NEW), directory / "new", num_shards=3, progress=False)


class Case(NamedTuple):
    """One way to change a store."""

    prepare: Callable[[BuildServer, Path], None]
    change: Callable[[Path], Build]
    before: int
    after: int = NEW
    then: tuple[dict[str, Any], ...] = ()
    """What is done when the change was run again."""


def building(**options: Any) -> Callable[[Path], Build]:
    return lambda directory: of(directory, **options)


FINISH = {"finish": True, "overwrite": True}
OTHER_PART = {"part": (1, 2), "overwrite": True}
CASES = {
    "new": Case(nothing, building(), 0),
    "overwrite": Case(old, building(overwrite=True), OLD),
    "resume": Case(begun, building(), 0),
    "resumed overwrite": Case(both, building(overwrite=True), OLD),
    "part": Case(
        nothing, building(part=(0, 2), overwrite=True), 0, after=0, then=(OTHER_PART, FINISH)
    ),
    "part over a store": Case(
        old, building(part=(0, 2), overwrite=True), OLD, after=OLD, then=(OTHER_PART, FINISH)
    ),
    "finish": Case(parts, building(**FINISH), 0),
    "finish over a store": Case(replacing_parts, building(**FINISH), OLD),
    "append": Case(old, building(append=True), OLD, after=BOTH),
    "table": Case(nothing, building(table=True), 0),
    "table over a store": Case(old, building(table=True), OLD),
    "pull": Case(nothing, building(pull="far"), 0),
    "pull over a store": Case(old, building(pull="far"), OLD),
    "push over a store": Case(
        far,
        lambda directory: replace(
            of(directory, push=(directory / "s").as_uri()), path=str(directory / "new")
        ),
        OLD,
    ),
}


def version_in(path: Path) -> int:
    """The version of the one dataset whose rows a store holds; 0 where there is no store."""
    try:
        store = open_store(path)
    except StoreNotFoundError:
        return 0
    assert verify_store(path) == []
    if len(store) == 2 * NUM_ROWS:
        return BOTH
    versions = [version for version in (OLD, NEW) if holds(store, Numbered(NUM_ROWS, version))]
    assert len(versions) == 1, "the store holds rows of no dataset, or of two"
    return versions[0]


@pytest.mark.parametrize("name", CASES)
def test_change_killed_anywhere_leaves_a_whole_store_or_none_and_can_be_made_again(
    server: BuildServer, tmp_path: Path, name: str
) -> None:
    prepare, change, before, after, then = CASES[name]
    beginning, left = tmp_path / "beginning", list[int]()
    beginning.mkdir()
    prepare(server, beginning)
    url = build_store(Numbered(NUM_ROWS, NEW), tmp_path / "far", num_shards=3, progress=False)
    for event in range(1000):
        directory = tmp_path / str(event)
        shutil.copytree(beginning, directory)
        build = change(directory)
        build = replace(build, pull=url.path.as_uri() if build.pull else "")
        status = server.run(replace(build, kill_at_event=event))
        assert status == 0 or killed(status)
        left.append(version_in(directory / "s"))
        # Nothing that was left stops the next one, or stays. Rows are not appended twice.
        if left[-1] != BOTH:
            assert server.run(build) == 0
        for options in then:
            assert server.run(of(directory, **options)) == 0
        assert version_in(directory / "s") == (NEW if then else after)
        assert {path.name for path in directory.iterdir()} <= {"s", "new"}
        if not build.push and left[-1] != BOTH:
            assert names_in(directory / "s") == ["label.memmap", "manifest.json", "x.memmap"]
        shutil.rmtree(directory)
        if status == 0:
            break
    # The kills came before and after the commit.
    assert event > 3
    assert (left[0], left[-1]) == (before, after)
    assert left == sorted(left)
