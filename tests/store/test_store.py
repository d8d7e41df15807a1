import json
import os
import pickle
import shutil
from base64 import b64encode
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memmap.errors import StoreError, StoreNotFoundError
from lightning_memmap.loading.row_file import open_row_files
from lightning_memmap.placement.shard_sizes import compute_shard_bytes
from lightning_memmap.sampling import Pool
from lightning_memmap.store import Store, build_store, open_store, verify_store
from lightning_memmap.store.manifest import MANIFEST, VERSION, Manifest
from lightning_memmap.store.recognition import check_dataset
from tests.support.datasets import Numbered, holds
from tests.support.rows import StridedRows
from tests.support.store.layout import files_of
from tests.support.store.signing import read_manifest, sign_manifest

DATASET = Numbered(100)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("open") / "s"
    build_store(DATASET, path, num_shards=3, progress=False)
    return path


@pytest.fixture
def path(pristine: Path, tmp_path: Path) -> Path:
    """A copy of a whole store, to be damaged."""
    return Path(shutil.copytree(pristine, tmp_path / "s"))


def sizes(directory: Path) -> dict[str, int]:
    return {file.name: file.lstat().st_size for file in directory.iterdir()}


# Where there is no store


def test_open_nothing_there_raises_store_not_found(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_text("{}")
    for name in ("s", "a/b", "directory", "file", "file/below"):
        for read in (open_store, verify_store):
            with pytest.raises(StoreNotFoundError, match=r"no store at .*: build it"):
                read(tmp_path / name)
    assert issubclass(StoreNotFoundError, FileNotFoundError)
    assert sorted(os.listdir(tmp_path)) == ["directory", "file"]


# Damaged files


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def grow(file: Path) -> None:
    os.truncate(file, file.stat().st_size + 1)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def link(file: Path) -> None:
    target = file.with_name("elsewhere")
    file.rename(target)
    file.symlink_to(target)


def dangling_link(file: Path) -> None:
    file.unlink()
    file.symlink_to("/nowhere")


def fifo(file: Path) -> None:
    # Opening one blocks until somebody writes: the test would hang.
    file.unlink()
    os.mkfifo(file)


def directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, r"has \d+ bytes, expected \d+"),
        (grow, r"has \d+ bytes, expected \d+"),
        (empty, r"has 0 bytes, expected \d+"),
        (Path.unlink, "is missing: build the store again"),
        (link, "is a link, or not a plain file"),
        (dangling_link, "is a link, or not a plain file"),
        (fifo, "is a link, or not a plain file"),
        (directory, "is a link, or not a plain file"),
    ],
)
def test_open_damaged_field_file_is_refused_named_and_left_alone(
    path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    name = "x.memmap"
    damage(files_of(path) / name)
    before = sizes(path)
    for read in (open_store, verify_store):
        with pytest.raises(StoreError, match=f"{name}.* {message}"):
            read(path)
    assert sizes(path) == before


@pytest.mark.parametrize("damage", [link, dangling_link, fifo, directory])
def test_open_manifest_that_is_no_plain_file_is_refused(
    path: Path, damage: Callable[[Path], Any]
) -> None:
    damage(path / MANIFEST)
    for read in (open_store, verify_store):
        with pytest.raises(StoreError, match=r"manifest\.json is a link, or not a plain file"):
            read(path)


@pytest.mark.parametrize("damage", [link, dangling_link, fifo, directory])
def test_field_file_that_became_no_plain_file_is_not_streamed(
    path: Path, damage: Callable[[Path], Any]
) -> None:
    store = open_store(path)
    damage(files_of(path) / "x.memmap")
    with pytest.raises(StoreError, match=r"x\.memmap is a link, or not a plain file"):
        open_row_files(store)


# Lies in the manifest


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"{}",
        b'"manifest"',
        b"\xff\xfe",
        b'{"format": "lightning_memmap store"}',
        b'{"format": "lightning_memmap store", "version": 6}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"1" * 10_000,
        b"[" + b"1," * 300_000,
        b'"' * 2_000_000,
        b'{"format": NaN}',
        b'{"format": 1e999999999}',
    ],
)
def test_open_manifest_that_is_no_manifest_is_refused(path: Path, text: bytes) -> None:
    (path / MANIFEST).write_bytes(text)
    with pytest.raises(StoreError, match=r"cannot be trusted|format version None"):
        open_store(path)


@pytest.mark.parametrize("version", [0, 5, "6", None, [6]])
def test_store_of_another_format_version_is_refused_and_left_alone(
    path: Path, version: Any
) -> None:
    sign_manifest(path, lambda body: body.update(version=version))
    names = {*os.listdir(path), ".lock"}
    for act in (open_store, verify_store, partial(build_store, DATASET, overwrite=True)):
        with pytest.raises(StoreError, match=rf"version .* {VERSION}: .*build it again$"):
            act(path)
    assert {*os.listdir(path), ".lock"} == names


@pytest.mark.parametrize("key", ["num_rows", "num_shards", "probes", "source", "checksums"])
def test_open_manifest_edited_without_its_digest_is_refused(path: Path, key: str) -> None:
    body = read_manifest(path)
    body[key] = {"num_rows": 99, "num_shards": 4}.get(key, type(body[key])())
    (path / MANIFEST).write_text(json.dumps(body))
    with pytest.raises(StoreError, match="its digest does not match its content"):
        open_store(path)


def test_open_manifest_signed_anew_without_a_lie_is_the_same_store(path: Path) -> None:
    # The table of lies depends on this: none of them is refused for its digest alone.
    before = Manifest.read(path)
    sign_manifest(path, lambda body: None)
    assert Manifest.read(path) == before
    assert holds(open_store(path), DATASET)


def put(*keys: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(body: Any) -> None:
        for key in keys[:-1]:
            body = body[key]
        body[keys[-1]] = value

    return edit


FIRST = ("structure", "children", 0, "field")


def drop(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda body: body.pop(key)


def rename_field(name: str) -> Callable[[dict[str, Any]], None]:
    """A field whose name leads elsewhere, and its key too."""

    def edit(body: dict[str, Any]) -> None:
        body["structure"]["children"][0]["field"]["name"] = name
        sums = list(body["checksums"].values())
        body["checksums"] = {name: sums[0], "label": sums[1]}
        body["structure"]["keys"][0] = name

    return edit


def empty_shape(*shape: int) -> Callable[[dict[str, Any]], None]:
    """A field of no bytes, which needs no file, of a shape that no tensor can have."""

    def edit(body: dict[str, Any]) -> None:
        put(*FIRST, "shape", value=list(shape))(body)
        body["checksums"]["x"] = ""

    return edit


SUM = "0123456789abcdef"


def sums(num_chunks: int) -> str:
    return b64encode(bytes(8 * num_chunks)).decode()


def replace_fields(body: dict[str, Any], names: list[str]) -> None:
    field = {"dtype": "int64", "shape": [0]}
    leaves = [{"kind": "leaf", "field": {"name": name, **field}} for name in names]
    body["structure"] = {"kind": "dict", "keys": names, "children": leaves}
    body["checksums"] = dict.fromkeys(names, "")


def many_fields(num_fields: int, num_shards: int) -> Callable[[dict[str, Any]], None]:
    def edit(body: dict[str, Any]) -> None:
        body["num_shards"] = num_shards
        names = [f"f{index}" for index in range(num_fields)]
        replace_fields(body, names)

    return edit


def no_bytes(num_rows: int) -> Callable[[dict[str, Any]], None]:
    """Rows for which no file is evidence."""

    def edit(body: dict[str, Any]) -> None:
        body["num_rows"] = num_rows
        replace_fields(body, ["x", "label"])

    return edit


LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "more rows": put("num_rows", value=101),
    "no rows": put("num_rows", value=0),
    "negative rows": put("num_rows", value=-1),
    "too many rows": put("num_rows", value=2**48 + 1),
    "rows as float": put("num_rows", value=100.0),
    "rows as bool": put("num_rows", value=True),
    "fewer shards": put("num_shards", value=2),
    "too many shards": put("num_shards", value=2**16 + 1),
    "larger shape": put(*FIRST, "shape", value=[5]),
    "huge shape": put(*FIRST, "shape", value=[2**39, 2**39]),
    "empty and huge shape": empty_shape(2**39, 2**39, 0),
    "wider dtype": put(*FIRST, "dtype", value="complex128"),
    "name outside": rename_field("../x"),
    "no structure": drop("structure"),
    "no field": put(*FIRST, value=None),
    "no number of rows": drop("num_rows"),
    "no checksums": drop("checksums"),
    "checksums of another field": put("checksums", value={"y": sums(3), "label": sums(3)}),
    "too few checksums": put("checksums", "x", value=sums(2)),
    "too many checksums": put("checksums", "x", value=sums(4)),
    "half a checksum": put("checksums", "x", value=b64encode(bytes(20)).decode()),
    "checksums not in Base64": put("checksums", "x", value="!" + sums(3)[1:]),
    "no probes": drop("probes"),
    "probe beyond the rows": put("probes", value=[[100, SUM]]),
    "probe before the rows": put("probes", value=[[-1, SUM]]),
    "probe with a wrong hash": put("probes", value=[[1, 2]]),
    "source of a number": put("source", value={"a": 1}),
    "terminal codes as source": put("source", value={"dataset": "\x1b[2J"}),
    "endless source": put("source", value={"dataset": "x" * 5000}),
    "source of many entries": put("source", value={str(key): "" for key in range(65)}),
    "many probes": put("probes", value=[[1, SUM]] * 65),
    "many fields": many_fields(4097, 1),
    "many checksums": many_fields(100, 2000),
    "endless rows without a byte": no_bytes(2**48),
    "too many rows without a byte": no_bytes(2**20 + 1),
    "most shards and no row in them": put("num_shards", value=2**16),
    "unknown key": put("extra", value=1),
    "unknown key of a field": put(*FIRST, "extra", value=1),
    "unknown key of a kind": put(*FIRST, "kind", value={"type": "numbers", "extra": 1}),
    "unknown key of the structure": put("structure", "extra", value=1),
    "unknown key of the fingerprint": put("fingerprint", "extra", value=1),
    "other format": put("format", value="another store"),
    "no format": drop("format"),
}


#: Some of them by key and value.
MESSAGES = {
    "negative rows": r"int.*\$\.num_rows.*num_rows=-1",
    "too many shards": r"int.*\$\.num_shards.*num_shards=65537",
    "checksums not in Base64": r"\$\.checksums.*checksums=.*x",
    "endless source": "4096.*source=.*dataset",
    "probe beyond the rows": "probes .* 100 rows",
    "unknown key": "unknown field `extra`",
    "unknown key of a field": r"unknown field `extra` .*structure",
}


@pytest.mark.parametrize("kind", LIES)
def test_open_manifest_that_lies_is_refused_and_nothing_touched(path: Path, kind: str) -> None:
    sign_manifest(path, LIES[kind])
    before = sizes(path)
    outside = sorted(os.listdir(path.parent))
    for read in (open_store, verify_store):
        with pytest.raises(StoreError, match=MESSAGES.get(kind)):
            read(path)
    assert sizes(path) == before
    assert sorted(os.listdir(path.parent)) == outside


def test_open_manifest_of_more_rows_with_files_that_fit_opens_them_as_they_are(
    path: Path,
) -> None:
    # Opening cannot find a lie that agrees with the files; verifying does.
    sign_manifest(path, put("num_rows", value=102))
    for file, row_bytes in (("x.memmap", 32), ("label.memmap", 8)):
        os.truncate(files_of(path) / file, 102 * row_bytes)
    assert len(open_store(path)) == 102
    assert verify_store(path)


def test_open_manifest_beyond_the_size_limit_is_not_read(path: Path) -> None:
    os.truncate(path / MANIFEST, 9 * 2**20)
    with pytest.raises(StoreError, match="is larger than 8388608 bytes"):
        open_store(path)


# Nothing is executed


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_open_directory_with_hostile_files_runs_nothing(path: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    hostile = pickle.dumps(Touch(mark))
    pickle.loads(hostile)
    assert mark.exists()  # It does run where something unpickles it.
    mark.unlink()

    for name in ("other.pickle", "x.pickle", "_pickle", "data.pkl"):
        (path / name).write_bytes(hostile)
    meta = {
        "_class": "tests.store.test_store:Touch",
        "_type": "<class 'tests.store.test_store.Touch'>",
        "shape": [100],
        "device": "cpu",
        "x": {"type": "Touch"},
        "non_tensor": {"type": "NonTensorData"},
    }
    (path / "meta.json").write_text(json.dumps(meta))
    (path / "non_tensor").mkdir()
    (path / "non_tensor" / "other.pickle").write_bytes(hostile)
    (path / "non_tensor" / "meta.json").write_text(
        '{"_type": "<class \'tensordict.NonTensorData\'>"}'
    )

    store = open_store(path)
    assert holds(store, DATASET)
    store[3]
    check_dataset(store, DATASET)
    assert verify_store(path) == []
    build_store(DATASET, path, num_shards=3, progress=False)
    assert not mark.exists()


# What is mapped


def test_open_tensor_written_in_process_leaves_the_file(path: Path) -> None:
    before = (files_of(path) / "x.memmap").read_bytes()
    store = open_store(path)
    store.mapped_columns[0].tensor.fill_(-1)
    assert (store.mapped_columns[0].tensor[0] == -1).all()
    assert (files_of(path) / "x.memmap").read_bytes() == before
    assert holds(open_store(path), DATASET)


def test_store_pickled_is_a_path_and_works(path: Path) -> None:
    data = pickle.dumps(open_store(path))
    assert len(data) < 1000
    store = pickle.loads(data)
    assert isinstance(store, Store)
    assert holds(store, DATASET)
    assert store.path == path
    build_store(Numbered(50), path, overwrite=True, progress=False)
    assert holds(store, DATASET)
    with pytest.raises(StoreError, match="was replaced"):
        pickle.loads(data)
    shutil.rmtree(path)
    with pytest.raises(StoreNotFoundError):
        pickle.loads(data)


def test_manifest_sizes_agree_with_the_files(path: Path) -> None:
    store = open_store(path)
    manifest = store.manifest
    assert manifest.row_bytes == 40
    assert manifest.num_bytes == sum(
        file.stat().st_size for file in files_of(path).glob("*.memmap")
    )
    for num_shards, rows in ((3, [34, 33, 33]), (6, [17] * 4 + [16] * 2)):
        pool = Pool.of(store.rows(), num_shards)
        assert compute_shard_bytes(manifest, pool, 1).tolist() == [40 * count for count in rows]
    for fold in (StridedRows(1, 3), StridedRows(0, 3, excluded=True)):
        pool = Pool.of(store.rows(fold.of(store.num_rows)), 2)
        assert compute_shard_bytes(manifest, pool, 1).tolist() == (pool.sizes * 40).tolist()
    assert manifest.source["dataset"] == "tests.support.datasets.Numbered"


def test_fields_are_found_by_what_they_are_called_in_a_sample(tmp_path: Path) -> None:
    number = torch.arange(40)
    samples = [
        {"a": {"b": 1, "km/h": row}, "a.b": row % 2, "width (cm)": row, "n": None if row else 1}
        for row in range(40)
    ]
    store = build_store(samples, tmp_path / "store", nullable=["n"], progress=False)
    # A sample's own key comes first.
    assert store.values("a.b").tolist() == (number % 2).tolist()
    for name in ("width (cm)", "a.km/h", "a.km~2Fh"):
        assert store.values(name).tolist() == number.tolist()
    assert store.given("n").tolist() == (number == 0).tolist()
    with pytest.raises(ValueError, match="field 'width': the store at"):
        store.given("width")
