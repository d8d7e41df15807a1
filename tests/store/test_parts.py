"""Stores that are built in parts: by processes that know nothing of each other, and are killed."""

import errno
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from time import sleep
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from lightning_memmap.errors import DatasetError, StoreError, StoreNotFoundError
from lightning_memmap.store import (
    Store,
    build_part,
    build_store,
    columns,
    finish_store,
    open_store,
    verify_store,
    workers,
)
from lightning_memmap.store.directory import PARTS_DRAFT
from lightning_memmap.store.files import write_all
from lightning_memmap.store.manifest import Manifest
from tests.support.datasets import Counting, Mixed, Numbered, Replaced, holds
from tests.support.store.build_server import BuildServer, Gated, build_and_check
from tests.support.store.layout import fail_to_list, files_of, names_in, parts_path

pytestmark = pytest.mark.slow


NUM_ROWS = 600
QUIET: Mapping[str, Any] = {"progress": False}


def assert_same_store(path: Path, other: Path) -> None:
    """All bytes are the same, except for the time of the build."""
    assert names_in(path) == names_in(other)
    for file in files_of(path).iterdir():
        assert file.read_bytes() == (files_of(other) / file.name).read_bytes(), file.name
    one, two = Manifest.read(path), Manifest.read(other)
    assert replace(one, source={}, generation="") == replace(two, source={}, generation="")
    assert {**one.source, "created": ""} == {**two.source, "created": ""}


@given(data=st.data())
def test_store_of_parts_is_that_of_one_process_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("parts")
    dataset = Mixed(data.draw(st.integers(4, 40), label="rows"))
    options: Any = {
        **QUIET,
        "num_shards": data.draw(st.integers(1, 7), label="shards"),
        **Mixed.declared,
    }
    num_parts = data.draw(st.integers(1, 9), label="parts")
    # In any order, and some of them twice.
    again = st.lists(st.integers(0, num_parts - 1), max_size=3)
    order = [*data.draw(st.permutations(range(num_parts))), *data.draw(again)]
    for index in order:
        build_part(dataset, directory / "parts", (index, num_parts), **options)
        with pytest.raises(StoreNotFoundError):
            open_store(directory / "parts")
    store = finish_store(directory / "parts", **QUIET)
    assert store.manifest.classes == ("odd", "even")
    build_store(dataset, directory / "one", **options)
    assert_same_store(store.path, directory / "one")
    assert verify_store(store.path) == []
    assert {entry.name for entry in directory.iterdir()} == {"one", "parts"}


def test_part_reads_its_rows_alone(tmp_path: Path) -> None:
    dataset = Counting(Numbered(100))
    build_part(dataset, tmp_path / "s", (1, 4), fingerprint="one", **QUIET)
    probes = {0, 14, 28, 42, 56, 70, 84, 99}
    assert set(dataset.rows) == probes | set(range(25, 50))
    dataset.rows.clear()
    build_part(dataset, tmp_path / "s", (1, 4), fingerprint="one", **QUIET)
    assert set(dataset.rows) == probes


def test_part_that_failed_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_memmap.store.writing._MAX_BLOCK_ROWS", 2048)
    monkeypatch.setattr("lightning_memmap.store.writing._MAX_BLOCKS", 1)
    numbered = Numbered(40_000)
    broken = Replaced(numbered, {15_000: OSError("unplugged")})
    with pytest.raises(DatasetError, match="row 15000"):
        build_part(broken, tmp_path / "s", (0, 2), fingerprint="one", **QUIET)
    with pytest.raises(StoreError, match=r"part 0 was interrupted after [\d,]+ of 20,000 rows"):
        finish_store(tmp_path / "s", **QUIET)
    mended = Counting(numbered)
    build_part(mended, tmp_path / "s", (0, 2), fingerprint="one", **QUIET)
    assert 0 < len(mended.rows) < 20_000
    build_part(mended, tmp_path / "s", (1, 2), fingerprint="one", num_workers=1, **QUIET)
    assert holds(finish_store(tmp_path / "s", **QUIET), numbered)


def test_who_finishes_while_another_does_gets_the_same_store(tmp_path: Path) -> None:
    begin = Barrier(3)

    def finish(path: Path) -> Store:
        begin.wait()
        return finish_store(path, **QUIET)

    for path in (tmp_path / str(number) for number in range(5)):
        build_part(Numbered(50), path, (0, 1), **QUIET)
        with ThreadPoolExecutor(3) as threads:
            stores = [*threads.map(finish, [path] * 3)]
        assert len({store.manifest.generation for store in stores}) == 1
        assert holds(stores[0], Numbered(50))


class _Changing(Numbered):
    """Begins another build when a probe row of its second half is read again, as another row."""

    def __init__(self, num_rows: int, path: Path) -> None:
        super().__init__(num_rows)
        self.path, self.num_read = path, 0

    def __getitem__(self, row: int) -> Any:
        self.num_read += row == 33
        if self.num_read < 2 or row != 33:
            return super().__getitem__(row)
        self.path.mkdir(exist_ok=True)
        return super().__getitem__(row + 1)


def test_part_of_a_random_dataset_removes_nothing_but_its_own_rows(tmp_path: Path) -> None:
    path, options = tmp_path / "s", {"fingerprint": "one", **QUIET}
    build_part(Numbered(60), path, (0, 2), **options)
    # As a process does that holds the lock meanwhile.
    other = path / "g-0123456789abcdef"
    with pytest.raises(DatasetError, match=r"row 33.*dataset is random"):
        build_part(_Changing(60, other), path, (1, 2), **options)
    assert other.exists()
    with pytest.raises(StoreError, match="part 1 is missing"):
        finish_store(path, **QUIET)
    build_part(Numbered(60), path, (1, 2), **options)
    assert holds(finish_store(path, **QUIET), Numbered(60))


# What is refused


def test_one_part_by_two_processes_at_once_is_an_error(server: BuildServer, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gated = Gated(Numbered(NUM_ROWS), gate, 210)
    pid = server.start(build_and_check, gated, tmp_path / "s", range_rows=20, part=(1, 3))
    while not gate.with_suffix(".pid").exists():
        sleep(0.001)
    options: Any = {**QUIET, "num_shards": 3, "fingerprint": "version 0"}
    with pytest.raises(
        StoreError, match=r"part 1 of 3 .* is being written by another process"
    ) as raised:
        build_part(Numbered(NUM_ROWS), tmp_path / "s", (1, 3), **options)
    assert "another build" not in str(raised.value)
    # Others are not kept waiting.
    build_part(Numbered(NUM_ROWS), tmp_path / "s", (2, 3), **options)
    with pytest.raises(StoreError, match="part 0 is missing; part 1 is being written"):
        finish_store(tmp_path / "s", **QUIET)
    gate.touch()
    assert server.wait(pid) == 0
    build_part(Numbered(NUM_ROWS), tmp_path / "s", (0, 3), **options)
    assert holds(finish_store(tmp_path / "s", **QUIET), Numbered(NUM_ROWS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": Numbered(40)}, "the length"),
        ({"dataset": Numbered(30, 1)}, "attribute version changed"),
        ({"num_shards": 5}, "it has num_shards=24, and this one num_shards=5"),
        ({"part": (1, 3)}, "it has num_parts=2, and this one num_parts=3"),
        ({"fingerprint": "v2"}, "it was stored without a fingerprint, and now has 'v2'"),
        ({"variable": ["x"]}, "it has field 'x'=int64"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_parts_of_different_builds_are_an_error(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    options: dict[str, Any] = {"dataset": Numbered(30), "part": (0, 2), **QUIET}
    build_part(path=tmp_path / "s", **options)
    with pytest.raises(StoreError, match=rf"of another build: .*{message}.* or remove .*g-"):
        build_part(path=tmp_path / "s", **{**options, "part": (1, 2), **change})
    build_part(path=tmp_path / "s", **{**options, "part": (1, 2)})
    assert holds(finish_store(tmp_path / "s", **QUIET), Numbered(30))


@pytest.mark.parametrize(
    ("part", "error", "message"),
    [
        (
            (8, 8),
            ValueError,
            "part=8/8.*0-7",
        ),
        ((-1, 8), ValueError, "part=-1/8"),
        ((0, 0), ValueError, "a store has 1 to"),
        ((0.5, 2), TypeError, r"0\.5"),
        (3, TypeError, r"like \(0, 8\)"),
    ],
)
def test_number_of_a_part_that_cannot_be_is_refused(
    tmp_path: Path, part: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build_part(Numbered(30), tmp_path / "s", part, **QUIET)
    assert not list(tmp_path.iterdir())


def test_part_of_a_stream_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="part=0"):
        build_part(iter([1, 2]), tmp_path / "s", (0, 2), **QUIET)


@pytest.mark.parametrize("name", ["s", "no/where"])
def test_finish_without_parts_says_how_to_write_them_and_makes_nothing(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(StoreError, match=r"build_part\(dataset, path, \(i, n\)\)"):
        finish_store(tmp_path / name, **QUIET)
    assert not list(tmp_path.iterdir())


def test_parts_beside_a_store_replace_it_at_the_end(tmp_path: Path) -> None:
    old = build_store(Numbered(30, 1), tmp_path / "s", **QUIET)
    with pytest.raises(DatasetError, match="another dataset"):
        build_part(Numbered(30, 2), tmp_path / "s", (0, 1), **QUIET)
    build_part(Numbered(30, 2), tmp_path / "s", (0, 1), overwrite=True, **QUIET)
    with pytest.raises(StoreError, match="exists: replace it by the parts"):
        finish_store(tmp_path / "s", **QUIET)
    # Whoever uses the old store leaves the parts alone.
    build_store(Numbered(30, 1), tmp_path / "s", **QUIET)
    assert holds(open_store(tmp_path / "s"), Numbered(30, 1))
    for overwrite in (True, False):  # It is finished already.
        store = finish_store(tmp_path / "s", overwrite=overwrite, **QUIET)
        assert holds(store, Numbered(30, 2))
    assert holds(old, Numbered(30, 1))


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.ESTALE])
def test_finish_of_parts_that_cannot_be_listed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    build_store(Numbered(30, 1), tmp_path / "s", **QUIET)
    build_part(Numbered(30, 2), tmp_path / "s", (0, 1), overwrite=True, **QUIET)
    with monkeypatch.context() as patch:
        fail_to_list(patch, tmp_path / "s", code)
        with pytest.raises((StoreError, OSError), match=str(tmp_path / "s")):
            finish_store(tmp_path / "s", overwrite=True, **QUIET)
        assert holds(open_store(tmp_path / "s"), Numbered(30, 1))
    assert holds(finish_store(tmp_path / "s", overwrite=True, **QUIET), Numbered(30, 2))


@pytest.mark.parametrize("is_key", [False, True], ids=["directory", "key"])
def test_interrupted_build_that_cannot_be_seen_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_key: bool
) -> None:
    failing = Replaced(Numbered(30), {13: ValueError("no")})
    with pytest.raises(DatasetError):
        build_store(failing, tmp_path / "s", fingerprint="1", **QUIET)
    (generation,) = (path for path in (tmp_path / "s").iterdir() if path.is_dir())
    with monkeypatch.context() as patch:
        if is_key:
            patch.setattr(os, "lstat", failing_at(generation / "build.json", os.lstat))
            patch.setattr(os.path, "lexists", lambda path: Path(path).name != "build.json")
        else:
            fail_to_list(patch, tmp_path / "s")
        with pytest.raises((StoreError, OSError), match=str(tmp_path / "s")):
            build_store(Numbered(30), tmp_path / "s", fingerprint="1", **QUIET)
    assert (generation / "build.json").exists()


def failing_at(path: Path, call: Any) -> Any:
    """A call that fails for one path."""

    def called(given: Any, **options: Any) -> Any:
        if str(given) == str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(given))
        return call(given, **options)

    return called


def test_part_of_a_store_that_is_whole_does_nothing(tmp_path: Path) -> None:
    build_store(Numbered(30), tmp_path / "s", **QUIET)
    build_part(Numbered(30), tmp_path / "s", (0, 2), **QUIET)
    assert names_in(tmp_path / "s")


def test_key_of_parts_that_is_damaged_is_refused(tmp_path: Path) -> None:
    build_part(Numbered(30), tmp_path / "s", (0, 1), **QUIET)
    key = parts_path(tmp_path / "s") / PARTS_DRAFT
    os.truncate(key, key.stat().st_size // 2)
    with pytest.raises(StoreError, match=r"parts\.json cannot be read: .*: remove"):
        finish_store(tmp_path / "s", **QUIET)
    with pytest.raises(StoreError, match=r"or remove .* to start again"):
        build_part(Numbered(30), tmp_path / "s", (0, 1), **QUIET)


# Other ways to start processes


def test_parts_built_by_threads_of_one_process_hold_their_own_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Such as those of an actor with threads.
    rows = [{"text": f"{row} " * (row % 9)} for row in range(400)]
    num_parts = 4
    start = Barrier(num_parts)

    def write_late(*arguments: Any) -> None:
        # Meanwhile, the other threads have found where to write.
        sleep(0.2)
        write_all(*arguments)

    def build(part: int) -> None:
        start.wait()
        build_part(rows, tmp_path / "s", (part, num_parts), num_shards=3, progress=False)

    monkeypatch.setattr(columns, "write_all", write_late)
    with ThreadPoolExecutor(num_parts) as threads:
        list(threads.map(build, range(num_parts)))
    store = finish_store(tmp_path / "s", progress=False)
    assert [store[row] for row in range(len(rows))] == rows


def test_part_without_memory_for_a_thread_says_so_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(part: int) -> None:
        build_part(Numbered(90, 2), tmp_path / "s", (part, 2), overwrite=True, **QUIET)

    def no_memory(*_: Any) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    build_store(Numbered(90, 1), tmp_path / "s", **QUIET)
    with monkeypatch.context() as patched:
        patched.setattr(workers, "mmap", no_memory)
        with pytest.raises(OSError, match=r"no memory for a thread.*: rows cannot be written"):
            build(0)
    assert holds(open_store(tmp_path / "s"), Numbered(90, 1))
    build(0)
    build(1)
    assert holds(finish_store(tmp_path / "s", overwrite=True, **QUIET), Numbered(90, 2))
