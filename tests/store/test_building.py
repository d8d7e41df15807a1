"""Below the ways to build: ranges of rows, the journal, the thread that writes, checksums."""

import multiprocessing
from pathlib import Path
from threading import Lock, Thread
from time import sleep
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memmap.errors import DatasetError
from lightning_memmap.sampling.rows import Shards
from lightning_memmap.schema.forms import Declared
from lightning_memmap.store import Damage, build_store, open_store, verify_store
from lightning_memmap.store import building as building_module
from lightning_memmap.store import journal as journal_module
from lightning_memmap.store.build_spec import BuildSpec
from lightning_memmap.store.building import Building
from lightning_memmap.store.columns import FixedColumn
from lightning_memmap.store.directory import StoreDirectory
from lightning_memmap.store.growing import BackgroundBuild, open_growing
from lightning_memmap.store.journal import KEPT, WRITTEN, Journal
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.samples import RandomDatasetError
from lightning_memmap.store.workers import RowRanges
from tests.support.datasets import Logged, Numbered, holds
from tests.support.store.layout import files_of

ROWS = st.lists(st.integers(0, 399), min_size=1, max_size=60)


@given(ROWS, st.integers(0, 9), st.integers(1, 200), st.floats(1e-9, 1e3), st.integers(1, 50))
def test_missing_rows_are_dealt_once_whatever_they_cost(
    tmp_path_factory: pytest.TempPathFactory,
    done: list[int],
    num_workers: int,
    max_rows: int,
    row_s: float,
    block: int,
) -> None:
    directory = tmp_path_factory.mktemp("journal")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_module, "_MARKED_ROWS", block)
        journal = Journal(directory, range(0, 400))
        journal.mark(range(0, 400), WRITTEN)
        journal.mark(np.array(done, np.int64), KEPT)
        assert list(journal.missing()) == []
        journal.close()
        again = Journal(directory, range(0, 400))
        assert again.num_done == len({*done})
        todo = list(again.missing())
        again.close()
    ranges = RowRanges(todo, max_rows=max_rows, num_workers=num_workers, row_s=row_s)
    dealt = list[int]()
    for index, rows in enumerate(ranges):
        assert 1 <= len(rows) <= max_rows
        dealt += rows
        ranges.record(rows, [0.0, 1e4, 1e-3][index % 3])
    assert sorted([*dealt, *{*done}]) == list(range(400))


class Failing(Logged):
    """Raises at a row that is no probe, and is so slow that a task has few rows."""

    def __getitem__(self, row: int) -> object:
        sleep(0.003)
        if row == 60:
            raise ValueError("broken")
        return super().__getitem__(row)


@pytest.mark.parametrize("needed", [[], [3, 60]])
def test_background_build_that_failed_is_resumed_by_the_same_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, needed: list[int]
) -> None:
    first = {"train": np.stack([np.arange(len(needed)), needed])} if needed else {}

    def build(kind: type[Logged], log: str) -> set[str]:
        dataset = kind(Numbered(100), tmp_path / log)
        spec = BuildSpec(dataset, tmp_path / "s", None, 1, "one", Declared(), progress=False)
        building = BackgroundBuild({"train": spec}, 1, lambda stores: first)
        store = open_growing(tmp_path / "s")
        assert store is not None
        try:
            store.shared_build.wait_for_commit()
        finally:
            building.stop()
        return {*Path(dataset.log).read_text().split()}

    with pytest.raises(DatasetError, match="row 60"):
        build(Failing, "first")
    # Nothing of the first one has kept the lock of its journal.
    assert "resuming" not in caplog.text
    assert len(build(Logged, "second")) < 100
    assert "resuming" in caplog.text
    assert holds(open_store(tmp_path / "s"), Numbered(100))


def test_rows_count_as_kept_once_their_files_and_the_names_of_these_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, mark = building_module.sync_path, Journal.mark
    synced, kept = set[Path](), list[set[Path]]()

    def noted_sync(path: Path) -> None:
        sync(path)
        synced.add(path)

    def noted_mark(self: Journal, rows: Any, what: int) -> None:
        if what == KEPT:
            kept.append({*synced})
        mark(self, rows, what)

    monkeypatch.setattr(building_module, "sync_path", noted_sync)
    monkeypatch.setattr(Journal, "mark", noted_mark)
    store = build_store([b"a" * row for row in range(50)], tmp_path / "s", progress=False)
    assert kept
    # The pieces of rows that differ in length are files with names of their own.
    assert all(store.files in paths and len(paths) > 2 for paths in kept)


# Items are written in a thread, while those that come next are read


# Checksums


def test_verify_names_field_shard_and_file(tmp_path: Path) -> None:
    path = tmp_path / "s"
    build_store(Numbered(100), path, num_shards=7, progress=False)
    file = files_of(path) / "label.memmap"
    data = bytearray(file.read_bytes())
    data[int(Shards(100, 7).starts[1]) * 8] ^= 1
    file.write_bytes(data)
    for place, num_threads in ((path, 1), (str(path), 8)):
        (damage,) = verify_store(place, num_threads=num_threads)
        # All of the shard, which is smaller than a chunk.
        assert damage == Damage("label", 1, file, 15 * 8, 30 * 8)
        assert str(file) in str(damage)
    # Opening reads no rows, so that it stays fast.
    assert len(open_store(path)) == 100


def test_files_of_a_store_are_brought_to_the_disk_while_it_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build of several stores syncs all of them from another thread."""
    found, ended = list[Building](), list[BaseException | None]()
    commit, begin = StoreDirectory.commit, Building.begin.__func__  # type: ignore[attr-defined]

    def note(cls: Any, *arguments: Any, **options: Any) -> Building:
        found.append(begin(cls, *arguments, **options))
        return found[-1]

    def sync() -> None:
        try:
            found[0].sync()
            ended.append(None)
        except BaseException as error:
            ended.append(error)

    def commit_slowly(self: StoreDirectory, manifest: Manifest) -> None:
        threads = [Thread(target=sync) for _ in range(3)]
        for thread in threads:
            thread.start()
        sleep(0.02)
        commit(self, manifest)
        started.extend(threads)

    def list_slowly(path: Path) -> Any:
        names = [*list_(path)]
        sleep(0.1)
        return iter(names)

    started, list_ = list[Thread](), Path.iterdir
    monkeypatch.setattr(Building, "begin", classmethod(note))
    monkeypatch.setattr(StoreDirectory, "commit", commit_slowly)
    monkeypatch.setattr(Path, "iterdir", list_slowly)
    build_store(Numbered(30), tmp_path / "s", progress=False)
    for thread in started:
        thread.join()
    assert ended == [None] * 3


def test_dataset_that_cannot_be_sent_to_a_started_process_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset: Any = Numbered(30)
    dataset.lock = Lock()
    context = multiprocessing.get_context("spawn")
    monkeypatch.setattr(multiprocessing, "Process", context.Process)
    with pytest.raises(DatasetError, match=r"Numbered.*num_workers=0"):
        build_store(dataset, tmp_path / "s", num_workers=1, progress=False)


def test_row_that_was_lost_on_its_way_to_the_file_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FixedColumn, "write", lambda *_: None)
    with pytest.raises(RandomDatasetError, match="row"):
        build_store(Numbered(50), tmp_path / "s", progress=False)
    assert not (tmp_path / "s" / "manifest.json").exists()
