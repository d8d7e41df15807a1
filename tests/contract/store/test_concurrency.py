"""Several processes that use one store at the same time."""

from pathlib import Path
from time import sleep

import pytest

from lightning_memmap.store import build_store, open_store, verify_store
from tests.support.datasets import Logged, Numbered, Slow, holds
from tests.support.store.build_server import BuildServer, build_and_check

pytestmark = pytest.mark.slow


NUM_ROWS = 600


@pytest.mark.parametrize("num_workers", [0, 2])
def test_build_by_three_processes_at_once_reads_the_dataset_once(
    server: BuildServer, tmp_path: Path, num_workers: int
) -> None:
    logs = [tmp_path / f"log{index}" for index in range(3)]
    slow = Slow(Numbered(NUM_ROWS), 0.003)
    pids = [
        server.start(build_and_check, Logged(slow, log), tmp_path / "s", num_workers=num_workers)
        for log in logs
    ]
    # Each of them has compared every row of the store that it got.
    assert [server.wait(pid) for pid in pids] == [0, 0, 0]
    # One has read all rows and the probe rows; for the others the fingerprint is enough.
    (log,) = (log for log in logs if log.exists())
    rows = [int(line) for line in log.read_text().splitlines()]
    assert set(rows) == set(range(NUM_ROWS))
    assert len(rows) == NUM_ROWS + 8
    assert holds(open_store(tmp_path / "s"), Numbered(NUM_ROWS))
    assert verify_store(tmp_path / "s") == []


def test_build_while_another_process_builds_waits_and_says_so(
    server: BuildServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "log"
    slow = Logged(Slow(Numbered(NUM_ROWS), 0.04), log)
    pid = server.start(build_and_check, slow, tmp_path / "s")
    while not log.exists():
        sleep(0.001)
    store = build_store(
        Numbered(NUM_ROWS), tmp_path / "s", num_shards=3, progress=False, fingerprint="version 0"
    )
    assert holds(store, Numbered(NUM_ROWS))
    assert f"another process is building the store at {tmp_path / 's'}" in caplog.text
    assert server.wait(pid) == 0


def test_build_of_two_datasets_at_once_stores_one_and_refuses_the_other(
    server: BuildServer, tmp_path: Path
) -> None:
    datasets = [Slow(Numbered(NUM_ROWS, version), 0.003) for version in (1, 2)]
    pids = [server.start(build_and_check, dataset, tmp_path / "s") for dataset in datasets]
    statuses = [server.wait(pid) for pid in pids]
    assert sorted(statuses) == [0, 1]
    winner = 1 + statuses.index(0)
    assert holds(open_store(tmp_path / "s"), Numbered(NUM_ROWS, winner))


def test_overwrite_by_two_processes_at_once_leaves_one_whole_store(
    server: BuildServer, tmp_path: Path
) -> None:
    # Each of them may find the other's store when it opens its own: only the end counts.
    slow, path = Slow(Numbered(NUM_ROWS), 0.001), tmp_path / "s"
    pids = [server.start(build_and_check, slow, path, overwrite=True) for _ in range(3)]
    assert [server.wait(pid) for pid in pids] == [0, 0, 0]
    assert holds(open_store(tmp_path / "s"), Numbered(NUM_ROWS))
    assert {path.name for path in tmp_path.iterdir()} == {"s"}


def overwrite_often(path: Path) -> None:
    for num_shards in range(3, 3 + 60):
        build_and_check(Numbered(50), path, num_shards=num_shards, overwrite=True)


def test_open_while_another_process_overwrites_never_fails_nor_mixes_two_stores(
    server: BuildServer, tmp_path: Path
) -> None:
    # All of these stores have files of the same sizes and hold the same rows, each in another
    # order: files of one read by the manifest of another would give wrong rows.
    path = tmp_path / "s"
    build_store(Numbered(50), path, num_shards=2, progress=False)
    pid = server.start(overwrite_often, path)
    seen = set()
    while 3 + 60 - 1 not in seen:
        store = open_store(path)
        assert holds(store, Numbered(50))
        seen.add(store.num_shards)
    assert server.wait(pid) == 0
    # The reader did see stores come and go.
    assert len(seen) > 2
