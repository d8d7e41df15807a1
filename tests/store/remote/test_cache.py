"""The cache of stores at URLs: what others do to it, and how much is in it."""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from lightning_memmap.errors import StoreError
from lightning_memmap.store import build_store, open_store, verify_store
from lightning_memmap.store.remote import cache as module
from lightning_memmap.store.remote.cache import DIRECTORY, LIMIT
from lightning_memmap.store.remote.files import OFFLINE, RemoteFiles
from tests.programs.reliability.runner import fork_server
from tests.support.daily import numbers_of_today
from tests.support.datasets import Numbered, holds
from tests.support.store.build_server import BuildServer, kill_before_change, killed

pytestmark = pytest.mark.usefixtures("cache")

NUM_ROWS, NUM_SHARDS = 60, 4


class Far(NamedTuple):
    """A store at a URL."""

    url: str
    path: Path
    num_bytes: int
    dataset: Numbered


def far(path: Path, version: int = 1, num_rows: int = NUM_ROWS) -> Far:
    dataset = Numbered(num_rows, version)
    store = build_store(dataset, path, num_shards=NUM_SHARDS, overwrite=True, progress=False)
    return Far(path.as_uri(), store.path, store.manifest.num_bytes, dataset)


# What others do to it


def empty(cache: Path) -> None:
    shutil.rmtree(cache)


def remove_files(cache: Path) -> None:
    for path in cache.rglob("*.memmap"):
        path.unlink()


@pytest.mark.parametrize("clean", [empty, remove_files])
def test_cache_removed_and_made_again_under_an_open_store_never_gives_other_rows(
    tmp_path: Path, cache: Path, clean: Callable[[Path], None]
) -> None:
    there = far(tmp_path / "far")
    opened = open_store(there.url)
    assert opened[1]["x"].tolist() == there.dataset[1]["x"].tolist()
    clean(cache)
    assert holds(open_store(there.url), there.dataset)
    num_errors = 0
    for row in range(NUM_ROWS):
        try:
            found = opened[row]["x"].tolist()
        except StoreError:
            num_errors += 1
        else:
            assert found == there.dataset[row]["x"].tolist(), row
    assert num_errors == NUM_ROWS * (NUM_SHARDS - 1) // NUM_SHARDS


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_cache_that_others_may_write_to_is_not_supported(
    tmp_path: Path, cache: Path, mode: int
) -> None:
    there = far(tmp_path / "far")
    cache.mkdir()
    cache.chmod(mode)
    with pytest.raises(StoreError, match=rf"chmod go-w .*{DIRECTORY}"):
        open_store(there.url)[0]
    cache.chmod(0o755)
    assert holds(open_store(there.url), there.dataset)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[5] ^= 4
    path.write_bytes(bytes(data))


def verify(url: str) -> int:
    """The exit code of the command."""
    # Here alone: the processes of a test import this module, and do without Lightning.
    from lightning_memmap.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["store", "verify", url])
    return int(ended.value.code or 0)


def test_bit_flipped_in_the_cache_is_found_and_fetched_again(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = far(tmp_path / "far")
    assert holds(open_store(there.url), there.dataset)
    assert verify_store(there.url) == []
    (path,) = cache.rglob("x.memmap")
    flip(path)
    assert verify(there.url) == 1
    said = capsys.readouterr().out
    assert "field 'x', shard 0 " in said
    assert there.url in said
    assert holds(open_store(there.url), there.dataset)
    assert verify(there.url) == 0
    assert "checksums match" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["bit", "hole"])
def test_damage_in_the_cache_is_fetched_again_when_a_process_opens_it(
    tmp_path: Path, cache: Path, damage: str
) -> None:
    there = far(tmp_path / "far")
    assert holds(open_store(there.url), there.dataset)
    (path,) = cache.rglob("x.memmap")
    if damage == "bit":
        flip(path)
    else:
        path.write_bytes(bytes(path.stat().st_size))
    assert holds(open_store(there.url), there.dataset)
    assert verify_store(there.url) == []


def test_cache_beyond_the_memory_is_not_read_twice(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = far(tmp_path / "far")
    assert holds(open_store(there.url), there.dataset)

    def fail(*_: Any, **__: Any) -> bool:
        raise AssertionError("a shard was compared")

    monkeypatch.setattr(module._CachedShards, "damaged_chunks", fail)
    monkeypatch.setattr(module, "available_bytes", lambda: 8)
    assert holds(open_store(there.url), there.dataset)


def test_verify_of_a_url_reads_what_is_not_in_the_cache_from_its_server(
    tmp_path: Path, cache: Path
) -> None:
    there = far(tmp_path / "far")
    assert open_store(there.url)[0] is not None
    (path,) = there.path.rglob("x.memmap")
    flip(path)
    # Shard 0 was fetched before.
    assert verify_store(there.url) == []
    shutil.rmtree(cache)
    counts: list[int] = []
    (damage,) = verify_store(there.url, advance=counts.append)
    assert (damage.field, damage.shard) == ("x", 0)
    assert str(damage.path) == path.as_uri()
    assert sum(counts) == there.num_bytes


# How much is in it


def test_what_others_are_fetching_counts_as_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (far(tmp_path / str(version), version, 5000) for version in (1, 2))
    may_read, is_reading, read = threading.Event(), threading.Event(), RemoteFiles.read

    def wait(self: RemoteFiles, name: str, *arguments: Any, **options: Any) -> bytes:
        if name.endswith(".memmap") and self.url == one.url:
            is_reading.set()
            may_read.wait(60)
        return read(self, name, *arguments, **options)

    # Room for one of the two, of which no byte is on the disk yet.
    free = shutil.disk_usage(tmp_path)._replace(free=int(1.5 * one.num_bytes) + 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    monkeypatch.setattr(RemoteFiles, "read", wait)
    first, second = open_store(one.url), open_store(other.url)
    thread = threading.Thread(target=first.download)
    thread.start()
    try:
        assert is_reading.wait(60)
        with pytest.raises(StoreError, match=rf"{DIRECTORY}.*{LIMIT}"):
            second.download()
    finally:
        may_read.set()
        thread.join()
    assert holds(first, one.dataset)


@pytest.mark.slow
def test_eight_processes_that_ask_for_room_at_once_get_what_there_is(
    tmp_path: Path, cache: Path
) -> None:
    stores = [far(tmp_path / str(version), version) for version in range(8)]
    # Not in this process: what forks others keeps its environment.
    settings = {DIRECTORY: str(cache), LIMIT: f"{int(3.5 * stores[0].num_bytes)}B"}
    context = fork_server()
    asking, done, ends = context.Barrier(8), context.Barrier(9), context.Queue()
    processes = [
        context.Process(target=fetch_at_once, args=(each, settings, asking, done, ends))
        for each in stores
    ]
    for process in processes:
        process.start()
    outcomes = [ends.get(timeout=120) for _ in processes]
    # Those that got no room were told before a byte was fetched.
    records = [np.fromfile(path, np.int64) for path in cache.glob("*/g-*/shards.tmp")]
    assert sorted(outcomes) == ["fetched"] * 3 + ["no room"] * 5
    assert sum(bool(each.any()) for each in records) == 3
    assert sum(int(abs(each).sum()) for each in records) <= 3.5 * stores[0].num_bytes
    done.wait(60)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0


def fetch_at_once(there: Far, settings: dict[str, str], asking: Any, done: Any, ends: Any) -> None:
    """Fetch all of a store when the others do, and keep it open until all have ended."""
    os.environ |= settings
    opened = open_store(there.url)
    asking.wait(60)
    try:
        opened.download()
        ends.put("fetched" if holds(opened, there.dataset) else "other rows")
    except StoreError as error:
        ends.put("no room" if LIMIT in str(error) else str(error))
    done.wait(60)


def fetch_until(event: int, there: Far, cache: Path) -> None:
    kill_before_change(event)
    os.environ[DIRECTORY] = str(cache)
    assert holds(open_store(there.url), there.dataset)


@pytest.mark.slow
def test_fetch_killed_at_any_change_leaves_no_shard_uncounted(
    server: BuildServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = far(tmp_path / "1", 1), far(tmp_path / "2", 2)
    for event in numbers_of_today(2):
        cache = tmp_path / f"cache{event}"
        monkeypatch.setenv(DIRECTORY, str(cache))
        status = server.run(fetch_until, event, one, cache)
        monkeypatch.setenv(LIMIT, f"{int(1.5 * one.num_bytes)}B")
        kept = open_store(one.url)
        assert holds(kept, one.dataset)
        with pytest.raises(StoreError, match=LIMIT):
            open_store(other.url).download()
        del kept
        assert holds(open_store(other.url), other.dataset)
        monkeypatch.delenv(LIMIT)
        shutil.rmtree(cache)
        if status == 0:
            break
        assert killed(status)
    assert event > 5


def test_request_above_the_limit_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = [far(tmp_path / str(version), version) for version in (1, 2)]
    large = far(tmp_path / "3", 3, 10 * NUM_ROWS)
    for each in small:
        assert holds(open_store(each.url), each.dataset)
    monkeypatch.setenv(LIMIT, f"{large.num_bytes - 1}B")
    with pytest.raises(StoreError, match=LIMIT):
        open_store(large.url).download()
    monkeypatch.setenv(OFFLINE, "1")
    for each in small:
        assert holds(open_store(each.url), each.dataset)
