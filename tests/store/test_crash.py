"""Builders that are killed: a store is whole and of one dataset, or it is not there."""

import errno
import os
import shutil
import signal
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import psutil
import pytest

from lightning_memmap.errors import StoreNotFoundError
from lightning_memmap.store import build_store, open_store, verify_store
from lightning_memmap.store import directory as directory_module
from lightning_memmap.store import workers as workers_module
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.samples import choose_probe_rows
from lightning_memmap.store.workers import Workers
from tests.support.datasets import Logged, Numbered, holds
from tests.support.store.build_server import BuildServer, Deadly, Gated, build_and_check, killed
from tests.support.store.layout import building_path, names_in, rows_there

pytestmark = pytest.mark.slow


OLD, NEW = 1, 2
NUM_ROWS = 600
RANGE_ROWS = 100
# A row in range 4 that is not a probe row.
DEADLY_ROW = 430


@pytest.fixture(scope="module")
def begun(server: BuildServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a build that was killed."""
    path = tmp_path_factory.mktemp("begun")
    deadly = Deadly(Numbered(NUM_ROWS, NEW), DEADLY_ROW)
    assert killed(server.run(build_and_check, deadly, path / "s", range_rows=RANGE_ROWS))
    assert building_path(path / "s").is_dir()
    return path


def version_in(directory: Path) -> int | None:
    """The version of the one dataset whose rows the store holds; None where there is no store."""
    try:
        store = open_store(directory / "s")
    except StoreNotFoundError:
        return None
    versions = [version for version in (OLD, NEW) if holds(store, Numbered(NUM_ROWS, version))]
    assert len(versions) == 1, "the store holds rows of no dataset, or of two"
    assert verify_store(directory / "s") == []
    return versions[0]


def assert_finishes(server: BuildServer, directory: Path) -> None:
    new = Numbered(NUM_ROWS, NEW)
    assert server.run(build_and_check, new, directory / "s", range_rows=RANGE_ROWS) == 0
    assert version_in(directory) == NEW
    left = {path.name for path in directory.iterdir()}
    assert left == {"s"}
    assert names_in(directory / "s") == ["label.memmap", "manifest.json", "x.memmap"]


# Kills


def test_build_killed_takes_its_workers_along(server: BuildServer, tmp_path: Path) -> None:
    # The worker is busy with a row that takes forever.
    gate, directory = tmp_path / "gate", tmp_path / "stores"
    directory.mkdir()
    gated, options = Gated(Numbered(NUM_ROWS, NEW), gate, 150), {"num_workers": 2}
    pid = server.start(build_and_check, gated, directory / "s", range_rows=RANGE_ROWS, **options)
    worker = int(wait_for(gate.with_suffix(".pid")).read_text())
    assert worker != pid
    assert running(worker)
    os.kill(pid, signal.SIGKILL)
    assert killed(server.wait(pid))
    while running(worker):
        sleep(0.001)
    assert_finishes(server, directory)


def build_outlived(dataset: Any, path: Path) -> None:
    """Build with workers that end only once they have done their tasks, if this process ends."""
    workers_module.end_with_starter = lambda: None
    build_and_check(dataset, path, range_rows=RANGE_ROWS, num_workers=2)


@pytest.mark.parametrize("version", [OLD, NEW], ids=["same dataset", "other dataset"])
@pytest.mark.parametrize("late", [False, True], ids=["opened", "not yet opened"])
def test_build_outlived_by_its_worker_is_followed_by_a_right_one(
    server: BuildServer, tmp_path: Path, late: bool, version: int
) -> None:
    # What such a worker still writes must not reach the files of the next build: neither where it
    # has opened them by then nor where it has not.
    orphan, builder, log = tmp_path / "orphan", tmp_path / "builder", tmp_path / "log"
    # Row 100 is the first one that the second worker reads.
    old = Gated(Numbered(NUM_ROWS, OLD), orphan, 100 if late else 350)
    old_pid = server.start(build_outlived, old, tmp_path / "s")
    worker = int(wait_for(orphan.with_suffix(".pid")).read_text())
    assert worker != old_pid
    os.kill(old_pid, signal.SIGKILL)
    try:
        # The next builder has written the rows that the worker is about to write.
        new = Gated(Logged(Numbered(NUM_ROWS, version), log), builder, DEADLY_ROW)
        pid = server.start(build_and_check, new, tmp_path / "s", range_rows=RANGE_ROWS)
        wait_for(builder.with_suffix(".pid"))
        building = building_path(tmp_path / "s")
        inodes = {path.stat().st_ino for path in building.glob("*.memmap")}
        held = {os.stat(f"/proc/{worker}/fd/{name}").st_ino for name in open_files(worker)}
        assert running(worker)
        assert not inodes & held
        orphan.touch()
        while running(worker):
            sleep(0.001)
        builder.touch()
        assert server.wait(pid) == 0
    finally:
        # Not reaped yet, so that the group's id is still its own.
        os.killpg(old_pid, signal.SIGKILL)
        assert killed(server.wait(old_pid))
    assert set(rows_in(log)) == set(range(NUM_ROWS))
    assert version_in(tmp_path) == version


def open_files(pid: int) -> list[str]:
    return [
        name
        for name in os.listdir(f"/proc/{pid}/fd")
        if os.readlink(f"/proc/{pid}/fd/{name}").split(" ")[0].endswith(".memmap")
    ]


def wait_for(path: Path) -> Path:
    while not path.exists():
        sleep(0.001)
    return path


def running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


# Resuming


def rows_in(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_build_resumed_after_a_kill_reads_only_what_is_missing(
    server: BuildServer, begun: Path, tmp_path: Path, num_workers: int
) -> None:
    directory, log = tmp_path / "resume", tmp_path / "log"
    shutil.copytree(begun, directory)
    # The last of the whole ranges may not have been on the disk yet.
    done = rows_there(directory / "s")
    last = DEADLY_ROW // RANGE_ROWS * RANGE_ROWS
    assert done in (last - RANGE_ROWS, last)
    new = Logged(Numbered(NUM_ROWS, NEW), log)
    options = {"range_rows": RANGE_ROWS, "num_workers": num_workers}
    assert server.run(build_and_check, new, directory / "s", **options) == 0
    read = rows_in(log)
    probes = set(choose_probe_rows(NUM_ROWS))
    assert {row for row in read if row < done} <= probes
    assert sorted(set(read) | probes) == sorted(probes | set(range(done, NUM_ROWS)))
    missing = [row for row in read if row >= done and row not in probes]
    assert len(missing) == len(set(missing))
    assert version_in(directory) == NEW


# Around the commit


def stored(path: Path, version: int) -> None:
    build_store(Numbered(NUM_ROWS, version), path, num_shards=3, overwrite=True, progress=False)


def test_reader_that_comes_between_two_generations_reads_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    stored(path, OLD)
    read = Manifest.read
    replaced: list[Path] = []

    def read_and_be_late(directory: Path) -> Manifest:
        manifest = read(directory)
        if not replaced:
            replaced.append(directory)
            stored(path, NEW)
        return manifest

    monkeypatch.setattr(Manifest, "read", read_and_be_late)
    assert holds(open_store(path), Numbered(NUM_ROWS, NEW))


@pytest.mark.parametrize("num_syncs", range(4))
def test_disk_that_fails_at_the_commit_leaves_the_old_store_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_syncs: int
) -> None:
    sync, left = directory_module.sync_path, [num_syncs]
    build_store(Numbered(50, OLD), tmp_path / "s", progress=False)

    def failing(path: Path) -> None:
        if not left[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        left[0] -= 1
        sync(path)

    monkeypatch.setattr(directory_module, "sync_path", failing)
    with pytest.raises(OSError, match="Input/output error"):
        build_store(Numbered(50, NEW), tmp_path / "s", overwrite=True, progress=False)
    assert holds(open_store(tmp_path / "s"), Numbered(50, OLD if num_syncs < 2 else NEW))
    assert verify_store(tmp_path / "s") == []


def pid_maker(dataset: Any) -> Any:
    return pid_of_worker


def pid_of_worker(task: int) -> int:
    sleep(0.05)
    return os.getpid()


def length_maker(dataset: Any) -> Any:
    return len


def test_tasks_larger_than_a_pipe_holds_are_done() -> None:
    tasks, lengths = [np.arange(200_000 + task) for task in range(9)], list[int]()
    with Workers(None, 2) as workers:
        workers.run(length_maker, tasks, lambda task, length: lengths.append(length - len(task)))
    assert lengths == [0] * len(tasks)


def test_processes_end_though_one_of_them_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "_PATIENCE_S", 0.2)
    workers, pids = Workers(None, 2), set[int]()
    workers.run(pid_maker, range(8), lambda _, pid: pids.add(pid))
    # Like one that waits for a lock of another that was killed.
    os.kill(min(pids), signal.SIGSTOP)
    workers.close()
    assert not any(map(psutil.pid_exists, pids))
