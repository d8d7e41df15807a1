"""Stores at a URL: fetched shard by shard into a cache of bounded size, pushed and pulled."""

import errno
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from threading import Event
from typing import Any

import fsspec
import lightning as L
import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given
from hypothesis import strategies as st

from lightning_memmap import MemmapDataModule
from lightning_memmap.errors import StoreError, StoreNotFoundError
from lightning_memmap.loading.split import load_split
from lightning_memmap.placement.plan import Residency, plan_placement
from lightning_memmap.placement.topology import DataTopology
from lightning_memmap.sampling import KFold, Mixture
from lightning_memmap.schema import Windows
from lightning_memmap.store import (
    Store,
    build_store,
    open_store,
    pull_store,
    push_store,
    verify_store,
)
from lightning_memmap.store.paths import StoreUrl
from lightning_memmap.store.remote import shards
from lightning_memmap.store.remote.cache import DIRECTORY, LIMIT, RemoteStore
from lightning_memmap.store.remote.files import RemoteFiles
from lightning_memmap.strategies import SuperBatchStrategy
from tests.support.datasets import Mixed, Numbered, holds
from tests.support.models import Points, Regression, make_trainer, weights
from tests.support.rows import size_of
from tests.support.store.layout import building_path
from tests.support.store.s3_server import CuttingProxy, s3_server
from tests.support.store.signing import encode_signed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cache")]


NUM_ROWS, NUM_SHARDS = 60, 4


def build_mixed(path: Path, num_rows: int = NUM_ROWS, num_shards: int = NUM_SHARDS) -> Store:
    return build_store(
        Mixed(num_rows), path, num_shards=num_shards, **Mixed.declared, progress=False
    )


def is_row(found: Any, row: int) -> bool:
    expected = Mixed(NUM_ROWS)[row]
    return (
        found["name"] == expected["name"]
        and np.array_equal(found["x"].numpy(), expected["x"])
        and np.array_equal(found["box"].numpy(), expected["box"])
        and [record["label"] for record in found["records"]] == [row] * (row % 3)
        and found["maybe"] == expected["maybe"]
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mixed(tmp_path_factory.mktemp("built") / "s").path


@pytest.fixture
def url(built: Path, tmp_path: Path) -> str:
    """The URL of a store whose files a test may change."""
    shutil.copytree(built, tmp_path / "far" / "s")
    return (tmp_path / "far" / "s").as_uri()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """What was read of remote files: name in the generation, first byte, end."""
    seen: list[tuple[str, int, int]] = []
    read = RemoteFiles.read

    def noted(self: RemoteFiles, name: str, start: int, end: int, **options: Any) -> bytes:
        seen.append((name.rpartition("/")[2], start, end))
        return read(self, name, start, end, **options)

    monkeypatch.setattr(RemoteFiles, "read", noted)
    return seen


# Rows


def test_url_of_a_file_is_quoted_as_urls_are(built: Path, tmp_path: Path) -> None:
    url = (tmp_path / "a b" / "é%20").as_uri()
    assert "%20" in url
    push_store(built, url, progress=False)
    assert (tmp_path / "a b" / "é%20" / "manifest.json").is_file()
    assert is_row(open_store(url)[7], 7)


def test_row_of_a_url_fetches_its_shard_alone_and_once(
    url: str, reads: list[tuple[str, int, int]]
) -> None:
    store = open_store(url)
    assert [name for name, _, _ in reads] == ["manifest.json"]
    reads.clear()
    assert is_row(store[6], 6)
    # An index that two fields share is read with each.
    expected = [chunk[1:4] for field in store.manifest.chunks for chunk in field.of_shard(6 % 4)]
    assert sorted(reads) == sorted(expected)
    reads.clear()
    assert is_row(store[10], 10)
    assert is_row(open_store(url)[2], 2)
    # Of the second opening.
    assert [name for name, _, _ in reads] == ["manifest.json"]


@pytest.mark.parametrize("meanwhile", [False, True])
def test_field_of_a_url_is_fetched_alone(
    tmp_path: Path, reads: list[tuple[str, int, int]], meanwhile: bool
) -> None:
    build_store(Numbered(40), tmp_path / "s", num_shards=3, progress=False)
    store = RemoteStore(StoreUrl((tmp_path / "s").as_uri()), in_background=meanwhile)
    assert (store.pending is not None) == meanwhile
    reads.clear()
    assert store.values("label").tolist() == [row % 10 for row in range(40)]
    assert {name for name, _, _ in reads} == {"label.memmap"}


def test_lengths_of_a_url_read_the_index_alone(
    url: str, built: Path, reads: list[tuple[str, int, int]]
) -> None:
    store, whole = open_store(url), open_store(built)
    assert is_row(store[5], 5)
    reads.clear()
    for name in ("name", "box"):
        assert np.array_equal(store.lengths(name), whole.lengths(name))
    assert {name for name, _, _ in reads} == {"name.index", "box.index"}
    # Shard 1 was here.
    assert len(reads) == 2 * (NUM_SHARDS - 1)
    reads.clear()
    assert all(is_row(store[row], row) for row in range(NUM_ROWS))
    reads.clear()
    store.lengths("name")
    assert reads == []


def test_lengths_of_a_url_with_a_damaged_index_are_not_returned(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(url)
    (path,) = (tmp_path / "far" / "s").rglob("name.index")
    data = bytearray(path.read_bytes())
    data[8] ^= 1  # Where the second row ends: the shard still ends where it should.
    path.write_bytes(data)
    with pytest.raises(StoreError, match="'name', shard 0"):
        store.lengths("name")


def test_store_of_a_url_is_sent_to_a_process_by_its_url_until_it_is_replaced(
    url: str, tmp_path: Path
) -> None:
    store = open_store(url)
    sent = pickle.dumps(store)
    assert is_row(pickle.loads(sent)[5], 5)
    assert repr(pickle.loads(sent)) == repr(store)
    assert url in repr(store)
    push_store(build_mixed(tmp_path / "s", 70).path, url, overwrite=True, progress=False)
    with pytest.raises(StoreError, match="was replaced"):
        pickle.loads(sent)


@given(data=st.data())
def test_shards_that_were_fetched_give_their_rows_whatever_else_is_missing(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("some")
    num_rows = data.draw(st.integers(10, NUM_ROWS), label="rows")
    num_shards = data.draw(st.integers(1, 20), label="shards")
    whole = build_mixed(directory / "s", num_rows, num_shards)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DIRECTORY, str(directory / "cache"))
        store = open_store((directory / "s").as_uri())
        wanted = data.draw(st.sets(st.integers(0, num_shards - 1)), label="wanted")
        store.download(wanted)
        for row in (row for row in range(num_rows) if row % num_shards in wanted):
            for found, expected in zip(store.mapped_columns, whole.mapped_columns, strict=True):
                assert torch.equal(found.row(row), expected.row(row))


# What a process owns


@pytest.mark.parametrize("residency", ["host", "mmap", "stream"])
def test_process_fetches_the_shards_that_it_owns(
    tmp_path: Path, reads: list[tuple[str, int, int]], residency: str
) -> None:
    build_store(Numbered(50), tmp_path / "s", num_shards=6, progress=False)
    store = open_store((tmp_path / "s").as_uri())
    reads.clear()
    cpu = torch.device("cpu")
    topology = DataTopology((cpu,), 1, 3, assemble_on=cpu)
    size = size_of(store.manifest, topology)
    placement = plan_placement(
        {"train": size}, topology, residency, budget_bytes={cpu: 2**30}
    ).splits["train"]
    load_split(store, topology, placement)
    chunks = [field.of_shard(s) for field in store.manifest.chunks for s in (1, 4)]
    assert sorted(reads) == sorted(chunk[1:4] for chunk in chain(*chunks))


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"subset": KFold(3), "member": 1},
        {"residency": "host"},
        {"build": "while_training", "num_workers": 1, "residency": "host"},
        {"build": "while_training", "num_workers": 1, "residency": "stream", "shuffle_block": 2},
        {"build": "while_training", "num_workers": 1, "subset": KFold(3), "member": 1},
    ],
)
def test_training_on_a_url_has_the_batches_of_the_directory(
    tmp_path: Path, devices: int, options: dict[str, Any]
) -> None:
    for split in ("train", "val"):
        build_store(Points(60), tmp_path / "far" / split, num_shards=12, progress=False)
    seen = []
    for place in (tmp_path / "far", (tmp_path / "far").as_uri()):
        data = MemmapDataModule(store_dir=place, batch_size=12 // devices, **options)
        module = Regression()
        strategy = SuperBatchStrategy(data_devices=["cpu"] * devices)
        make_trainer(tmp_path, strategy=strategy, max_epochs=2).fit(module, data)
        seen.append((module.seen, weights(module).tolist()))
    assert seen[0] == seen[1]
    assert len(seen[0][0]["train"]) >= 3
    resident = {*data.placement.splits["train"].residencies}
    assert Residency(options.get("residency", "mmap")) in resident


class Opening(L.Callback):
    """Sets an event at the first step, and notes how much of the store was there."""

    def __init__(self) -> None:
        self.opened, self.shares = Event(), list[float]()

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        supply = trainer.datamodule.stores["train"].pending
        self.shares.append(1.0 if supply is None else supply.progress)
        self.opened.set()


@pytest.mark.parametrize("is_damaged", [False, True])
def test_training_at_a_url_starts_with_the_first_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_damaged: bool
) -> None:
    build_store(Points(240), tmp_path / "far" / "train", num_shards=12, progress=False)
    fits = []
    read, opening, ranges = RemoteFiles.read, Opening(), list[int]()

    def gated(self: RemoteFiles, name: str, start: int, end: int, **options: Any) -> bytes:
        if name.endswith(".memmap"):
            ranges.append(start)
            # Lightning asks for two steps first: rows of four shards, of two fields.
            assert len(ranges) <= 8 or opening.opened.wait(30), "a step waits for later shards"
        data = read(self, name, start, end, **options)
        is_wrong = is_damaged and name.endswith(".memmap") and len(ranges) > 16
        return bytes(len(data)) if is_wrong else data

    for place in (tmp_path / "far", (tmp_path / "far").as_uri()):
        module = Regression()
        options: dict[str, Any] = {"build": "while_training", "num_workers": 1}
        data = MemmapDataModule(store_dir=place, batch_size=2, shuffle=False, **options)
        fits.append((module, data))
    given: dict[str, Any] = {"max_epochs": 2, "limit_val_batches": 0}
    make_trainer(tmp_path, **given).fit(*fits[0])
    monkeypatch.setattr(RemoteFiles, "read", gated)
    monkeypatch.setattr(shards, "_NUM_THREADS", 1)
    trainer = make_trainer(tmp_path, callbacks=[opening], **given)
    if is_damaged:
        with pytest.raises(StoreError, match="is damaged: field"):
            trainer.fit(*fits[1])
        return
    trainer.fit(*fits[1])
    assert opening.shares[0] < 0.5
    assert opening.shares[-1] == 1.0
    assert fits[0][0].seen == fits[1][0].seen
    assert torch.equal(*(weights(module) for module, _ in fits))


def test_store_that_is_missing_at_a_url_says_where_it_was_looked_for(tmp_path: Path) -> None:
    url = (tmp_path / "far").as_uri()
    data = MemmapDataModule(Numbered(50), store_dir=url)
    data.prepare_data()
    with pytest.raises(StoreNotFoundError, match="lightning-memmap store push DIRECTORY file:"):
        data.setup()
    build_store(Numbered(50), tmp_path / "far" / "train", progress=False)
    data = MemmapDataModule(store_dir=url)
    data.setup()
    assert list(data.stores) == ["train"]
    with pytest.raises(StoreNotFoundError, match=r"no store at file:.*far/test: "):
        data.test_dataloader()


# Interruptions


def test_fetch_that_was_interrupted_goes_on_with_the_next_shard(
    url: str, monkeypatch: pytest.MonkeyPatch, reads: list[tuple[str, int, int]]
) -> None:
    monkeypatch.setattr(shards, "_NUM_THREADS", 1)
    read, left = RemoteFiles.read, [8]

    def breaking(self: RemoteFiles, *arguments: Any, **options: Any) -> bytes:
        left[0] -= 1
        if left[0] < 0:
            raise StoreError("the network is gone")
        return read(self, *arguments, **options)

    store = open_store(url)
    with monkeypatch.context() as patch:
        patch.setattr(RemoteFiles, "read", breaking)
        with pytest.raises(StoreError, match="the network is gone"):
            store.download()
    first = set(_reads_of_rows(reads))
    reads.clear()
    store = open_store(url)
    store.download()
    # Of what was there, at most the last shard of a field is read again: it was begun.
    assert len(first.intersection(_reads_of_rows(reads))) <= 1
    assert all(is_row(store[row], row) for row in range(NUM_ROWS))


def _reads_of_rows(reads: list[tuple[str, int, int]]) -> Iterator[tuple[str, int, int]]:
    return (read for read in reads if read[0] != "manifest.json")


def test_shards_that_several_want_at_once_are_fetched_once(
    url: str, reads: list[tuple[str, int, int]]
) -> None:
    stores = [open_store(url) for _ in range(3)]
    reads.clear()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda store: store.download(), stores))
    fields = stores[0].manifest.chunks
    chunks = [field.of_shard(shard) for field in fields for shard in range(NUM_SHARDS)]
    assert sorted(reads) == sorted(chunk[1:4] for chunk in chain(*chunks))
    for found in zip(*(store.mapped_columns for store in stores), strict=True):
        assert len({tuple(column.row(7).flatten().tolist()) for column in found}) == 1


# The size of the cache


def entries(cache: Path) -> set[str]:
    return {path.read_text().strip() for path in cache.glob("*/g-*/.in_use")}


def used_bytes(cache: Path) -> int:
    return sum(
        int(abs(np.fromfile(path, np.int64)).sum())
        for path in cache.glob(f"*/g-*/{shards.RECORDS}")
    )


def test_cache_without_room_drops_what_was_opened_longest_ago(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = []
    for number in range(4):
        store = build_store(Numbered(100, number), tmp_path / str(number), progress=False)
        urls.append(store.path.as_uri())
    # 4 KB each.
    monkeypatch.setenv(LIMIT, str(2 * store.manifest.num_bytes))
    for number in (0, 1, 0, 2):
        assert holds(open_store(urls[number]), Numbered(100, number))
    assert entries(cache) == {urls[0], urls[2]}
    kept = open_store(urls[0])
    assert holds(kept, Numbered(100, 0))
    for number in (1, 2, 3, 2, 1):
        assert holds(open_store(urls[number]), Numbered(100, number))
        assert urls[0] in entries(cache)
        assert used_bytes(cache) <= int(os.environ[LIMIT])


# What changes at the URL


def test_store_that_is_replaced_or_removed_while_it_is_fetched_is_an_error(tmp_path: Path) -> None:
    url = build_store(Numbered(50, 1), tmp_path / "s", progress=False).path.as_uri()
    old = open_store(url)
    build_store(Numbered(50, 2), tmp_path / "s", overwrite=True, progress=False)
    with pytest.raises(StoreError, match="was replaced"):
        old[0]
    shutil.rmtree(tmp_path / "s")
    with pytest.raises(StoreNotFoundError, match="was removed"):
        old[0]


# What cannot be reached


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The environment of an S3 client, which forgets its connections afterwards."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    system = fsspec.get_filesystem_class("s3")
    system.clear_instance_cache()
    yield monkeypatch
    system.clear_instance_cache()


@pytest.mark.parametrize(
    ("address", "error", "message"),
    [
        ("nowhere://bucket/s", ValueError, "nowhere://bucket/s: Protocol not known: nowhere"),
        ("gs://bucket/s", StoreError, r"install 'lightning_memmap\[remote\]'"),
        ("memory://nothing/s", StoreNotFoundError, "no store at memory://nothing/s: .* push it"),
    ],
)
def test_url_that_leads_nowhere_says_so(address: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        open_store(address)


@pytest.mark.parametrize(
    "error",
    [
        PermissionError("Forbidden"),
        TypeError("an argument too many"),
        NotImplementedError(),  # fsspec's answer where a protocol, such as github://, cannot write.
        type("NoCredentialsError", (Exception,), {})("none"),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    ],
)
def test_what_is_refused_is_not_tried_again(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    calls = []

    def refuse(*arguments: Any, **_: Any) -> None:
        calls.append(arguments)
        raise error

    store = build_store(Numbered(50), tmp_path / "here", progress=False)
    there = (tmp_path / "there").as_uri()
    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "cat_file", refuse)
        with pytest.raises(StoreError, match=r"was rejected: .* room.* credentials"):
            open_store(url)
    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "put_file", refuse)
        with pytest.raises(StoreError, match=r"there/g-.* was rejected: .* room.* credentials"):
            push_store(store.path, there, progress=False)
    assert len(calls) == 2
    push_store(store.path, there, progress=False)
    assert holds(open_store(there), Numbered(50))


def test_url_where_a_directory_is_needed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a URL"):
        build_store(Numbered(5), "s3://bucket/s", progress=False)
    with pytest.raises(ValueError, match="s3://bucket"):
        pull_store(str(tmp_path), tmp_path / "s")


# An untrusted store


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "a/b", "..", "", "x\0y"])
def test_manifest_of_a_stranger_makes_no_file_elsewhere(
    url: str, tmp_path: Path, cache: Path, name: str
) -> None:
    path = tmp_path / "far" / "s" / "manifest.json"
    body = json.loads(path.read_bytes().replace(b'"x"', json.dumps(name).encode()))
    path.write_bytes(encode_signed(body))
    before = {*tmp_path.rglob("*")}
    for action in (open_store, lambda at: pull_store(at, tmp_path / "back", progress=False)):
        with pytest.raises(StoreError, match="cannot be trusted"):
            action(url)
    made = {path.name for path in {*tmp_path.rglob("*")} - before}
    assert made <= {"cache"}


# Push and pull


def rows_in(store: Path) -> dict[str, bytes]:
    """The files of the one generation of a store."""
    (generation,) = store.glob("g-*")
    return {path.name: path.read_bytes() for path in generation.iterdir()}


def test_store_that_is_pushed_and_pulled_is_the_same_byte_for_byte(
    built: Path, tmp_path: Path
) -> None:
    for overwrite in (False, True):
        push_store(built, "memory://there/s", overwrite=overwrite, progress=False)
        store = pull_store(
            "memory://there/s", tmp_path / "back", overwrite=overwrite, progress=False
        )
        assert rows_in(store.path) == rows_in(built)
        assert store.manifest.content == open_store(built).manifest.content
        assert sorted(os.listdir(store.path)) == [".lock", store.files.name, "manifest.json"]
        assert os.listdir(tmp_path) == ["back"]
    # Again: both find it there.
    push_store(built, "memory://there/s", progress=False)
    pull_store("memory://there/s", tmp_path / "back", progress=False)


def test_push_writes_the_manifest_last_and_goes_on_where_it_stopped(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, write, names = (tmp_path / "far").as_uri(), RemoteFiles.write, list[str]()

    def breaking(self: RemoteFiles, name: str, source: Path | bytes) -> None:
        if len(names) == 2:
            raise StoreError("the network is gone")
        names.append(name)
        write(self, name, source)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteFiles, "write", breaking)
        with pytest.raises(StoreError, match="the network is gone"):
            push_store(built, url, progress=False)
        with pytest.raises(StoreNotFoundError):
            open_store(url)
    modified = {name: (tmp_path / "far" / name).stat().st_mtime_ns for name in names}
    push_store(built, url, progress=False)
    assert all((tmp_path / "far" / name).stat().st_mtime_ns == modified[name] for name in names)
    store = open_store(url)
    assert all(is_row(store[row], row) for row in range(NUM_ROWS))
    assert rows_in(tmp_path / "far") == rows_in(built)


def test_push_over_another_store_needs_overwrite(tmp_path: Path) -> None:
    url = (tmp_path / "far").as_uri()
    for version in (1, 2):
        build_store(Numbered(50, version), tmp_path / str(version), progress=False)
    push_store(tmp_path / "1", url, progress=False)
    with pytest.raises(StoreError, match="there is another store at"):
        push_store(tmp_path / "2", url, progress=False)
    assert holds(open_store(url), Numbered(50, 1))
    # Files of the same sizes: none of the old ones may be taken for new.
    push_store(tmp_path / "2", url, overwrite=True, progress=False)
    assert holds(open_store(url), Numbered(50, 2))
    assert verify_store(tmp_path / "far") == []


def test_manifest_of_others_is_never_replaced(tmp_path: Path) -> None:
    store = build_store(Numbered(50), tmp_path / "here", progress=False)
    for name in ("far", "near"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text('{"name": "mine"}')
    with pytest.raises(StoreError, match=r"manifest\.json"):
        push_store(store.path, (tmp_path / "far").as_uri(), overwrite=True, progress=False)
    with pytest.raises(StoreError, match=r"manifest\.json"):
        pull_store(store.path.as_uri(), tmp_path / "near", overwrite=True, progress=False)
    for name in ("far", "near"):
        assert os.listdir(tmp_path / name) == ["manifest.json"]
        assert (tmp_path / name / "manifest.json").read_text() == '{"name": "mine"}'


def test_push_to_a_directory_of_stores_is_an_error(tmp_path: Path) -> None:
    store = build_store(Numbered(50), tmp_path / "here", progress=False)
    push_store(store.path, (tmp_path / "far" / "train").as_uri(), progress=False)
    with pytest.raises(StoreError, match="far is a directory of stores, such as 'train'"):
        push_store(store.path, (tmp_path / "far").as_uri(), progress=False)
    assert os.listdir(tmp_path / "far") == ["train"]


def test_pull_that_was_interrupted_is_not_taken_for_a_build(tmp_path: Path) -> None:
    far = build_store(Numbered(50), tmp_path / "far", progress=False)
    (far.files / "x.memmap").unlink()
    with pytest.raises(StoreError):
        pull_store(far.path.as_uri(), tmp_path / "s", progress=False)
    assert building_path(tmp_path / "s")
    with pytest.raises(StoreNotFoundError, match="store build"):
        open_store(tmp_path / "s")


def test_pull_of_another_store_needs_overwrite(url: str, tmp_path: Path) -> None:
    build_store(Numbered(50), tmp_path / "s", progress=False)
    with pytest.raises(StoreError, match="has another store: replace it with overwrite=True"):
        pull_store(url, tmp_path / "s", progress=False)
    assert is_row(pull_store(url, tmp_path / "s", overwrite=True, progress=False)[5], 5)


# S3


@pytest.fixture(scope="module")
def s3_port() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture
def bucket(s3_port: int, far: pytest.MonkeyPatch) -> str:
    far.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3_port}")
    system = fsspec.filesystem("s3")
    if not system.exists("bucket"):
        system.mkdir("bucket")
    return "s3://bucket"


def test_store_on_s3_gives_its_rows(built: Path, bucket: str, tmp_path: Path) -> None:
    push_store(built, f"{bucket}/rows/s", progress=False)
    store = open_store(f"{bucket}/rows/s")
    assert all(is_row(store[row], row) for row in range(NUM_ROWS))
    back = pull_store(f"{bucket}/rows/s", tmp_path / "back", progress=False)
    assert back.manifest.content == store.manifest.content
    # The files of the one that is replaced go.
    other = build_store(Numbered(50), tmp_path / "s", progress=False)
    push_store(other.path, f"{bucket}/rows/s", overwrite=True, progress=False)
    assert holds(open_store(f"{bucket}/rows/s"), Numbered(50))
    names = fsspec.filesystem("s3").find(f"{bucket}/rows/s")
    assert len({name.split("/")[-2] for name in names}) == 2


@pytest.mark.parametrize("after_bytes", [0, 300, 40_000])
def test_store_on_s3_is_read_through_connections_that_break(
    s3_port: int, bucket: str, far: pytest.MonkeyPatch, tmp_path: Path, after_bytes: int
) -> None:
    build_store(Numbered(5000), tmp_path / "s", num_shards=3, progress=False)
    push_store(tmp_path / "s", f"{bucket}/broken/{after_bytes}", progress=False)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with CuttingProxy(s3_port, num_cuts=3, after_bytes=after_bytes) as proxy:
        far.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        store = open_store(f"{bucket}/broken/{after_bytes}")
        assert holds(store, Numbered(5000))
    assert proxy.num_cut == 3


@pytest.mark.parametrize("residency", ["mmap", "host"])
def test_windows_and_mixtures_of_a_url_are_those_of_the_directory(
    tmp_path: Path, residency: str
) -> None:
    for name, first in (("a", 0), ("b", 500)):
        samples = [{"steps": np.arange(first + row, first + row + 9)} for row in range(30)]
        build_store(samples, tmp_path / "far" / "train" / name, num_shards=6, progress=False)
    options: list[dict[str, Any]] = [
        {"sampler": Mixture({"a": 0.6, "b": 0.4}, 40)},
        {"sampler": Mixture({"a": 0.6, "b": 0.4}, 40), "windows": Windows("steps", 4, 2)},
    ]
    for each in options:
        batches = []
        for place in (tmp_path / "far", (tmp_path / "far").as_uri()):
            data = MemmapDataModule(store_dir=place, batch_size=5, residency=residency, **each)
            data.setup()
            batches.append([batch["steps"].clone() for batch in data.train_dataloader()])
            data.teardown()
        assert len(batches[0]) == len(batches[1]) == 8
        assert all(torch.equal(*pair) for pair in zip(*batches, strict=True))
