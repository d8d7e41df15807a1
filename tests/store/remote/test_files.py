"""Stores at a URL whose server fails, lies or is gone, and the cache that is left."""

import errno
import fcntl
import os
import pathlib
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import fsspec
import pytest

from lightning_memmap import MemmapDataModule
from lightning_memmap.errors import StoreError, StoreNotFoundError
from lightning_memmap.store import (
    Store,
    build_store,
    checksums,
    open_store,
    pull_store,
    push_store,
    verify_store,
)
from lightning_memmap.store.paths import StoreUrl
from lightning_memmap.store.remote import files
from lightning_memmap.store.remote.cache import DIRECTORY, LIMIT
from lightning_memmap.store.remote.files import OFFLINE
from lightning_memmap.strategies import SuperBatchStrategy
from tests.support.datasets import Numbered, holds
from tests.support.models import Points, Regression, make_trainer
from tests.support.store.http_server import (
    CHUNKED,
    CUT,
    ENDLESS,
    ENDLESS_BYTES,
    GARBLED,
    PACKED,
    SHORT,
    STALLED,
    WHOLE,
    Fault,
    FileServer,
)

pytestmark = pytest.mark.usefixtures("cache")

NUM_ROWS, NUM_SHARDS = 60, 3


@pytest.fixture
def web(tmp_path: Path) -> Iterator[FileServer]:
    store(tmp_path / "far" / "train")
    found = FileServer(tmp_path / "far")
    yield found
    found.stop()
    fsspec.get_filesystem_class("http").clear_instance_cache()


def store(path: Path, version: int = 0) -> Store:
    dataset = Numbered(NUM_ROWS, version)
    return build_store(dataset, path, num_shards=NUM_SHARDS, overwrite=True, progress=False)


def only(fault: Fault, name: str, times: int = 10**6) -> Callable[[str], Fault]:
    """Spoils answers with a file, so many times."""
    left = [times]

    def found(path: str) -> Fault:
        if not path.endswith(name) or not left[0]:
            return None
        left[0] -= 1
        return fault

    return found


# Servers that fail


@pytest.mark.parametrize(
    ("fault", "message", "num_asked"),
    [
        (CUT, "x.memmap cannot be reached: ", None),
        (SHORT, "is damaged: field 'x', shard 0", 2),
        (GARBLED, r"shard 0 .*lightning-memmap store verify", 2),
        (404, "x.memmap", None),
        (403, r"x\.memmap was rejected: .*403.* credentials", 1),
        (410, "x.memmap was rejected: .*410, .* check that the URL is right", 1),
        (WHOLE, "640 bytes, and got more", 1),
    ],
)
def test_answer_that_is_always_spoilt_says_so(
    web: FileServer, fault: Fault, message: str, num_asked: int | None
) -> None:
    web.fault = only(fault, "x.memmap")
    opened = open_store(f"{web.url}/train")
    with pytest.raises(StoreError, match=message):
        opened.download([0], ["x"])
    if num_asked is not None:
        assert sum(path.endswith("/x.memmap") for path in web.asked) == num_asked
    web.fault = lambda path: None
    assert holds(opened, Numbered(NUM_ROWS))


def test_chunk_that_is_spoilt_once_is_the_only_one_read_again(
    web: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "CHUNK_BYTES", 64)
    store(web.directory / "train")
    web.fault = only(GARBLED, "x.memmap", times=1)
    opened = open_store(f"{web.url}/train")
    opened.download([0], ["x"])
    # 640 bytes.
    assert sum(path.endswith("/x.memmap") for path in web.asked) == 10 + 1
    assert holds(opened, Numbered(NUM_ROWS))


@pytest.mark.parametrize("name", ["manifest.json", "x.memmap"])
@pytest.mark.parametrize("fault", [ENDLESS, PACKED])
def test_answer_without_end_costs_no_more_memory_than_was_asked_for(
    web: FileServer, name: str, fault: Fault
) -> None:
    assert open_store(f"{web.url}/train")[1] is not None  # What is loaded once is loaded.
    web.fault = only(fault, name)
    tracemalloc.start()
    try:
        message = "compresses its answers" if fault == PACKED else "got more|larger than"
        with pytest.raises(StoreError, match=message):
            open_store(f"{web.url}/train")[0]
        assert tracemalloc.get_traced_memory()[1] < ENDLESS_BYTES / 2
    finally:
        tracemalloc.stop()
    assert web.num_sent < ENDLESS_BYTES


def test_answer_that_stops_is_not_waited_for(
    web: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_SILENCE_S", 0.2)
    opened = open_store(f"{web.url}/train")
    web.fault = only(STALLED, "x.memmap")
    begun = monotonic()
    message = rf"/train/g-.*/x.memmap cannot be reached: .*no bytes for 0.2 s.*{OFFLINE}=1"
    with pytest.raises(StoreError, match=message):
        opened.download([0], ["x"])
    assert monotonic() - begun < 30
    web.fault = only(STALLED, "x.memmap", times=1)
    assert holds(opened, Numbered(NUM_ROWS))


def test_server_that_tells_no_lengths_is_pulled_from(web: FileServer, tmp_path: Path) -> None:
    web.fault = lambda path: CHUNKED
    assert holds(
        pull_store(f"{web.url}/train", tmp_path / "near", progress=False), Numbered(NUM_ROWS)
    )
    assert files.RemoteFiles(StoreUrl(f"{web.url}/train")).find_stores() == [""]


def test_fields_of_any_name_are_pulled(web: FileServer, tmp_path: Path) -> None:
    keys = [
        "Gewicht (kg), größe",
        "年龄",
        "नाम",
        "km/h",
        "50 %",
        "a.b#c?d&e",
        "[0]*",
        "~",
        "\u202e",
    ]
    rows = [dict.fromkeys(keys, row) for row in range(20)]
    build_store(rows, tmp_path / "far" / "named", progress=False)
    for url in (f"{web.url}/named", (tmp_path / "far" / "named").as_uri()):
        near = pull_store(url, tmp_path / "near", overwrite=True, progress=False)
        assert all(near[row] == rows[row] for row in range(20))
        for key in keys:
            assert open_store(url).values(key).tolist() == [*range(20)]


# Servers that are gone


def test_store_is_opened_from_the_cache_where_its_server_is_gone(
    web: FileServer, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{web.url}/train"
    assert holds(open_store(url), Numbered(NUM_ROWS))
    assert "is opened" not in caplog.text
    web.stop()
    assert holds(open_store(url), Numbered(NUM_ROWS))
    assert f"{url} is opened in the last version in the cache" in caplog.text


def test_version_that_is_opened_offline_is_that_which_the_server_gave_last(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = (tmp_path / "far").as_uri()
    for version in (1, 2, 1, 3, 2):
        store(tmp_path / "far", version)
        assert holds(open_store(url), Numbered(NUM_ROWS, version))
        # As if the clock was set back before the next one.
        for path in cache.rglob("*"):
            os.utime(path, (4e9, 4e9))
        with monkeypatch.context() as patch:
            patch.setenv(OFFLINE, "1")
            for _ in range(2):
                assert holds(open_store(url), Numbered(NUM_ROWS, version))


def test_offline_nothing_is_asked_for_and_missing_shards_are_an_error(
    web: FileServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    other = store(tmp_path / "other", 1)
    assert holds(open_store(other.path.as_uri()), Numbered(NUM_ROWS, 1))
    monkeypatch.setenv(LIMIT, f"{int(1.5 * other.manifest.num_bytes)}B")
    url = f"{web.url}/train"
    assert open_store(url)[1]["x"][0] == 4
    web.asked.clear()
    monkeypatch.setenv(OFFLINE, "1")
    opened = open_store(url)
    assert opened[1]["x"][0] == 4
    with pytest.raises(StoreError, match=rf"not in the cache at .*{OFFLINE} is set"):
        opened[0]
    assert web.asked == []
    # Nothing was removed to make room for what could not be fetched.
    assert holds(open_store(other.path.as_uri()), Numbered(NUM_ROWS, 1))
    with pytest.raises(StoreNotFoundError, match=r"no store at .*/val: "):
        open_store(f"{web.url}/val")
    # Once the server answers again, the rest is fetched.
    monkeypatch.delenv(OFFLINE)
    monkeypatch.delenv(LIMIT)
    assert holds(opened, Numbered(NUM_ROWS))


def test_shards_of_a_version_that_its_server_no_longer_has_are_an_error(
    web: FileServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = f"{web.url}/train"
    assert open_store(url)[1]["x"][0] == 4
    monkeypatch.setenv(OFFLINE, "true")
    opened = open_store(url)
    store(tmp_path / "far" / "train", 1)
    monkeypatch.setenv(OFFLINE, "0")
    with pytest.raises(
        StoreError,
        match=r"not in the cache at .* was replaced",
    ):
        opened[0]
    assert opened[1]["x"][0] == 4
    assert holds(open_store(url), Numbered(NUM_ROWS, 1))


# The cache


def test_cache_that_cannot_be_written_gives_what_it_has(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = [store(tmp_path / str(number), number).path.as_uri() for number in range(2)]
    assert holds(open_store(urls[0]), Numbered(NUM_ROWS))
    opened = os.open

    def refuse(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if str(path).startswith(str(cache)) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return opened(path, flags, *rest, **options)

    def refuse_any(path: Any, *_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    with monkeypatch.context() as patch:
        # As root, whom no permission stops, and without a mount.
        patch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
        patch.setattr(os, "open", refuse)
        # In Python 3.10, pathlib has its own references to those of os.
        for owner in (os, getattr(pathlib, "_NormalAccessor", os)):
            for name in ("mkdir", "rename", "utime"):
                patch.setattr(owner, name, staticmethod(refuse_any), raising=False)
        assert holds(open_store(urls[0]), Numbered(NUM_ROWS))
        with pytest.raises(StoreError, match=rf"Read-only.* {DIRECTORY} "):
            open_store(urls[1])


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOLCK, errno.EACCES])
def test_store_of_which_nobody_can_say_whether_it_is_in_use_stays_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    one, other = (store(tmp_path / str(each), each) for each in range(2))
    monkeypatch.setenv(LIMIT, f"{one.manifest.num_bytes}B")
    kept = open_store(one.path.as_uri())
    kept.download()
    flock = fcntl.flock

    def refuse(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX | fcntl.LOCK_NB and is_entry(descriptor):
            raise OSError(number, os.strerror(number))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StoreError, match="LIGHTNING_MEMMAP_CACHE_SIZE"):
        open_store(other.path.as_uri())[0]
    assert holds(kept, Numbered(NUM_ROWS))


def is_entry(descriptor: int) -> bool:
    return os.readlink(f"/proc/self/fd/{descriptor}").endswith("/.in_use")


# Push


def test_damaged_store_is_not_pushed(tmp_path: Path) -> None:
    (file,) = store(tmp_path / "s").path.rglob("label.memmap")
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)
    with pytest.raises(StoreError, match="'label', shard 0"):
        push_store(tmp_path / "s", (tmp_path / "far").as_uri(), progress=False)
    assert not (tmp_path / "far").exists()


def test_push_leaves_the_files_of_others_alone(tmp_path: Path) -> None:
    built = store(tmp_path / "s")
    (tmp_path / "far" / "g-mine").mkdir(parents=True)
    others = (tmp_path / "far" / "x.memmap", tmp_path / "far" / "g-mine" / "x.memmap")
    for path in others:
        path.write_text("mine")
    for overwrite in (False, True):
        push_store(built.path, (tmp_path / "far").as_uri(), overwrite=overwrite, progress=False)
        assert holds(open_store((tmp_path / "far").as_uri()), Numbered(NUM_ROWS))
        assert [path.read_text() for path in others] == ["mine", "mine"]


@pytest.mark.parametrize("moment", ["an upload", "the manifest", "a removal"])
def test_push_that_another_comes_between_mixes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The other push runs from its beginning to its end at one moment of the first."""
    one, other = store(tmp_path / "1", 1), store(tmp_path / "2", 2)
    url, far = (tmp_path / "far").as_uri(), files.RemoteFiles
    push_store(store(tmp_path / "0", 0).path, url, progress=False)
    method = {"an upload": "write", "the manifest": "replace", "a removal": "remove"}[moment]
    original = getattr(far, method)

    def interrupted(self: files.RemoteFiles, *arguments: Any) -> None:
        monkeypatch.setattr(far, method, original)
        push_store(other.path, url, overwrite=True, progress=False)
        original(self, *arguments)

    monkeypatch.setattr(far, method, interrupted)
    if moment == "an upload":
        with pytest.raises(StoreError, match="has pushed another store"):
            push_store(one.path, url, overwrite=True, progress=False)
    else:
        push_store(one.path, url, overwrite=True, progress=False)
    version = 1 if moment == "the manifest" else 2
    assert holds(open_store(url), Numbered(NUM_ROWS, version))
    assert verify_store(tmp_path / "far") == []


def test_push_of_a_store_that_is_replaced_meanwhile_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, url = store(tmp_path / "1", 1), (tmp_path / "far").as_uri()
    write = files.RemoteFiles.write

    def interrupted(self: files.RemoteFiles, *arguments: Any) -> None:
        write(self, *arguments)
        monkeypatch.setattr(files.RemoteFiles, "write", write)
        store(one.path, 2)

    monkeypatch.setattr(files.RemoteFiles, "write", interrupted)
    with pytest.raises(StoreError, match="was replaced: push it again"):
        push_store(one.path, url, progress=False)
    with pytest.raises(StoreNotFoundError):
        open_store(url)
    push_store(one.path, url, progress=False)
    assert holds(open_store(url), Numbered(NUM_ROWS, 2))


# Pull


@pytest.mark.parametrize("kind", ["link", "fifo"])
@pytest.mark.parametrize("where", ["manifest.json", "build.json"])
def test_pull_follows_no_link_and_waits_for_no_pipe(tmp_path: Path, kind: str, where: str) -> None:
    there, begun = store(tmp_path / "far"), tmp_path / "s"
    planted = begun / where
    if where == "build.json":  # Of a pull that was interrupted.
        pull_store(there.path.as_uri(), begun, progress=False)
        (planted,) = (path / where for path in begun.glob("g-*"))
        (begun / "manifest.json").unlink()
    planted.parent.mkdir(exist_ok=True)
    if kind == "link":
        planted.symlink_to(there.path / "manifest.json")
    else:
        os.mkfifo(planted)
    errors: list[str] = []

    def pull() -> None:
        try:
            pull_store(there.path.as_uri(), begun, overwrite=True, progress=False)
        except StoreError as error:
            errors.append(str(error))

    thread = threading.Thread(target=pull, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert "never opened" in errors[0]


@pytest.mark.filterwarnings("ignore:Total length of")  # There is nothing to validate on.
def test_training_goes_on_offline_with_the_splits_that_are_in_the_cache(
    tmp_path: Path, web: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_store(Points(48), tmp_path / "far" / "points" / "train", num_shards=2, progress=False)

    def train(seed: int) -> int:
        trainer = make_trainer(
            tmp_path, strategy=SuperBatchStrategy(data_devices=["cpu"]), max_epochs=1
        )
        url = f"{web.url}/points"
        trainer.fit(Regression(), MemmapDataModule(store_dir=url, batch_size=4, seed=seed))
        return trainer.global_step

    assert train(0) == 12
    web.stop()
    # Whether there is a split to validate on, nobody can tell: it is not left out without a word.
    with pytest.raises(StoreError, match=rf"points/val.* cannot be reached: .*{OFFLINE}=1"):
        train(1)
    monkeypatch.setenv(OFFLINE, "1")
    assert train(1) == 12


def test_push_to_a_server_that_can_only_be_read_says_so(web: FileServer, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot be written: .* can only be read"):
        push_store(tmp_path / "far" / "train", f"{web.url}/other", progress=False)
