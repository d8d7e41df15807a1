"""Samples in tar files, grouped and read by the rules of WebDataset."""

import gzip
import io
import json
import os
import pickle
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Subset

from lightning_memmap import MemmapDataModule, TarDataset, build_store
from lightning_memmap.errors import DatasetError
from lightning_memmap.store import TarStream, verify_store
from lightning_memmap.store.paths import CACHE
from lightning_memmap.store.sources import tar_index
from tests.support.datasets import EncodedImages, encoded, plain
from tests.support.models import set_up


def write_tar(path: Path, members: list[tuple[str, bytes]], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as file:  # type: ignore[call-overload]
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return path


def array_bytes(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def image_members(first: int, last: int) -> list[tuple[str, bytes]]:
    dataset = EncodedImages(last)
    return [
        member
        for row in range(first, last)
        for member in (
            (f"rows/{row:04}.{'png' if row % 3 else 'jpg'}", dataset[row]["image"]),
            (f"rows/{row:04}.cls", str(row % 5).encode()),
            (f"rows/{row:04}.seg.png", dataset[row]["mask"]),
            (f"rows/{row:04}.json", json.dumps({"row": row, "note": "x" * (row % 4)}).encode()),
        )
    ]


KINDS = [TarDataset, TarStream]
both = pytest.mark.parametrize("kind", KINDS)


FIELDS = {"image": "jpg;png", "label": "cls", "mask": "seg.png", "name": "__key__"}


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 samples in 4 tar files."""
    path = tmp_path_factory.mktemp("tars")
    for index in range(4):
        write_tar(path / f"ds-{index:03}.tar", image_members(10 * index, 10 * index + 10))
    return path


@both
def test_each_ending_is_read_as_what_it_stands_for(tmp_path: Path, kind: Any) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    image = encoded(np.full((2, 3, 3), 9, np.uint8))
    members = [
        ("a/1.cls", b"7"),
        ("a/1.TXT", "żółw".encode()),
        ("a/1.json", b'{"x": [1, 2]}'),
        ("a/1.npy", array_bytes(array)),
        ("a/1.png", image),
        ("a/1.left.png", image),
        ("a/1.bin", b"\0\1"),
    ]
    path = write_tar(tmp_path / "a.tar", members)
    (sample,) = kind(path)
    assert list(sample) == ["__key__", "cls", "txt", "json", "npy", "png", "left.png", "bin"]
    assert (sample["__key__"], sample["cls"], sample["txt"]) == ("a/1", 7, "żółw")
    assert sample["json"] == {"x": [1, 2]}
    assert sample["npy"].dtype == np.float32
    assert (sample["npy"] == array).all()
    assert sample["png"] == image
    assert sample["bin"] == b"\0\1"
    (sample,) = kind(path, mode="RGB", size=(4, 4))
    assert sample["left.png"].shape == (3, 4, 4)


@both
def test_members_are_grouped_as_webdataset_does(tmp_path: Path, kind: Any) -> None:
    """Expectations by its rules: base and ending are divided at the first dot of the name, only
    neighbours make a sample, and none reaches into the next tar file."""
    names = [
        "x.a",
        "x.b.c",
        "d.e/x.a",
        "d.e/y.a",
        "d.e/y.B",
        "x.a",
        "noending",
        "__meta__",
        "z.",
        "./q.a",
    ]
    first = write_tar(tmp_path / "1.tar", [(name, name.encode()) for name in names])
    second = write_tar(tmp_path / "2.tar", [("./q.b", b"")])
    found = [(sample.pop("__key__"), list(sample)) for sample in kind([first, second])]
    assert found == [
        ("x", ["a", "b.c"]),
        ("d.e/x", ["a"]),
        ("d.e/y", ["a", "b"]),
        ("x", ["a"]),
        ("z", [""]),
        ("./q", ["a"]),
        ("./q", ["b"]),
    ]


names = st.lists(
    st.tuples(st.sampled_from(["a", "b", "d/a", "d.x/a"]), st.sampled_from(["x", "y", "x.y"])),
    max_size=12,
)


@given(names=names)
def test_every_member_is_in_the_sample_of_its_key(
    tmp_path_factory: pytest.TempPathFactory, names: list[tuple[str, str]]
) -> None:
    names = [pair for pair, before in zip(names, [None, *names], strict=False) if pair != before]
    runs: list[tuple[str, list[str]]] = []
    for key, ending in names:
        if not runs or runs[-1][0] != key:
            runs.append((key, []))
        runs[-1][1].append(ending)
    members = [
        (f"{key}.{ending}", str(index).encode()) for index, (key, ending) in enumerate(names)
    ]
    path = write_tar(tmp_path_factory.mktemp("t") / "a.tar", members)
    has_twice = any(len(set(endings)) < len(endings) for _, endings in runs)
    for kind in KINDS:
        if has_twice:
            with pytest.raises(DatasetError, match="has two such members"):
                list(kind(path))
            continue
        samples = list(kind(path))
        assert [(s["__key__"], [*s][1:]) for s in samples] == runs
        values = [int(value) for s in samples for name, value in s.items() if name != "__key__"]
        assert values == [*range(len(names))]


@pytest.mark.parametrize(
    "pattern",
    ["ds-{000..003}.tar", "ds-*.tar", "ds-00{0,1,2,3}.tar", "ds-00{0..3}.tar"],
)
def test_patterns_stand_for_files_in_order(
    tars: Path, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tars)
    expected = [f"ds-{index:03}.tar" for index in range(4)]
    assert TarDataset(pattern).tars == expected
    assert TarDataset([pattern, "ds-001.tar"]).tars == [*expected, "ds-001.tar"]


@pytest.mark.parametrize(
    ("pattern", "error", "words"),
    [
        ("none-*.tar", ValueError, "no file matches"),
        ("ds-{0..3}.tar", FileNotFoundError, "ds-0.tar"),
        ("{a,{b,c}}.tar", ValueError, "tars=.*braces"),
        ([], ValueError, "tars="),
        ("https://example.com/a.tar", ValueError, "tars="),
    ],
)
def test_files_that_are_not_there_are_refused(
    tars: Path, pattern: Any, error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tars)
    with pytest.raises(error, match=words):
        TarDataset(pattern)


def test_data_module_gives_the_images_of_the_tar_files(tars: Path, tmp_path: Path) -> None:
    data = MemmapDataModule(
        TarDataset(str(tars / "ds-{000..003}.tar"), FIELDS),
        store_dir=tmp_path,
        batch_size=8,
        decode={"image": {}, "mask": {"mode": "L"}},
    )
    set_up(data, "fit")
    dataset, seen = EncodedImages(40, decoded=True), []
    for batch in data.train_dataloader():
        rows = [int(name.removeprefix("rows/")) for name in batch["name"]]
        assert batch["label"].tolist() == [row % 5 for row in rows]
        for name in ("image", "mask"):
            assert torch.equal(batch[name], torch.stack([dataset[row][name] for row in rows]))
        seen += rows
    assert sorted(seen) == [*range(40)]
    # The same tar files are recognised, and others are refused.
    same = TarDataset(str(tars / "ds-{000..003}.tar"), FIELDS)
    MemmapDataModule(same, store_dir=tmp_path).prepare_data()
    other = TarDataset([*same.tars[:3], same.tars[0]], FIELDS)
    with pytest.raises(DatasetError, match="was built from another dataset"):
        MemmapDataModule(other, store_dir=tmp_path).prepare_data()


def test_tar_files_may_be_compressed_and_images_decoded_once(tmp_path: Path) -> None:
    for mode in ("w:gz", "w:bz2", "w:xz"):
        path = write_tar(tmp_path / f"a.{mode[2:]}", image_members(0, 5), mode)
        samples = list(TarStream(path, {"image": "jpg;png"}, mode="RGB"))
        for row, sample in enumerate(samples):
            assert isinstance(sample["image"], Tensor)
            assert torch.equal(sample["image"], plain(EncodedImages(5)[row]["image"]))
        store = build_store(TarStream(path, FIELDS, "L"), tmp_path / mode[2:], progress=False)
        assert store.num_rows == 5


class _Evil:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('it was run')",)


@both
@pytest.mark.parametrize("ending", ["pyd", "pkl", "pickle", "pth", "pt", "left.pkl"])
def test_pickles_are_refused_and_never_read(tmp_path: Path, kind: Any, ending: str) -> None:
    members = [("1.cls", b"1"), (f"1.{ending}", pickle.dumps(_Evil()))]
    path = write_tar(tmp_path / "a.tar", members)
    with pytest.raises(DatasetError, match=r"which can run any code, and is never read"):
        list(kind(path))
    assert list(kind(path, {"label": "cls"})) == [{"label": 1}]
    objects = array_bytes(np.array([_Evil()], object), allow_pickle=True)
    path = write_tar(tmp_path / "b.tar", [("1.npy", objects)])
    with pytest.raises(DatasetError, match=r"'1\.npy' cannot be read: ValueError"):
        list(kind(path))


@both
def test_links_and_devices_are_left_out_and_names_lead_nowhere(tmp_path: Path, kind: Any) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as file:
        kinds = (
            tarfile.SYMTYPE,
            tarfile.LNKTYPE,
            tarfile.FIFOTYPE,
            tarfile.CHRTYPE,
            tarfile.DIRTYPE,
        )
        for number, kind_of_link in enumerate(kinds):
            info = tarfile.TarInfo(f"{number}.txt")
            info.type, info.linkname = kind_of_link, str(secret)
            file.addfile(info)
        for name in (str(secret), "../../up.txt"):
            info = tarfile.TarInfo(name)
            info.size = 2
            file.addfile(info, io.BytesIO(b"ok"))
    before = sorted(tmp_path.rglob("*"))
    found = list(kind(path))
    assert [sample["txt"] for sample in found] == ["ok", "ok"]
    assert secret.read_text() == "secret"
    assert sorted(tmp_path.rglob("*")) == before


@both
@pytest.mark.parametrize("where", ["header", "data", "middle", "nothing", "gzip", "no tar", "huge"])
def test_damaged_tar_file_is_named(tmp_path: Path, kind: Any, where: str) -> None:
    path = write_tar(tmp_path / "a.tar", [("1.bin", bytes(5000)), ("2.bin", bytes(5000))])
    data, huge = path.read_bytes(), tarfile.TarInfo("1.bin")
    huge.size = 2**40
    damaged = {
        "header": data[: 512 + 5120 + 100],
        "data": data[: 512 + 5120 + 512 + 1000],
        "middle": data[: 512 + 5120] + b"x" * 100 + data[512 + 5120 + 100 :],
        "nothing": b"",
        "gzip": gzip.compress(data)[:60],
        "no tar": b"no tar" * 1000,
        "huge": huge.tobuf() + bytes(2**16),
    }[where]
    path.write_bytes(damaged)
    if where == "gzip" and kind is TarDataset:
        with pytest.raises(ValueError, match=r"a\.tar.*TarStream"):
            kind(path)
        return
    words = r".*'1\.bin' has 1099511627776 bytes: at most" if where == "huge" else ""
    with pytest.raises(DatasetError, match=rf"a\.tar{words}"):
        list(kind(path))


@both
@pytest.mark.parametrize("num_members", [1, 2])
@pytest.mark.parametrize("is_compressed", [False, True])
def test_tar_file_that_is_cut_off_between_members_is_named(
    tmp_path: Path, kind: Any, num_members: int, is_compressed: bool
) -> None:
    members = [("1.txt", b"a" * 600), ("2.txt", b"b" * 512), ("3.txt", b"c")]
    path = write_tar(tmp_path / "a.tar", members)
    cut = path.read_bytes()[: 512 + 1024 + (num_members - 1) * 1024]

    def write(data: bytes) -> None:
        path.write_bytes(gzip.compress(data) if is_compressed else data)

    if is_compressed and kind is TarDataset:
        return
    write(cut)
    with pytest.raises(DatasetError, match=rf"a\.tar.*'{num_members}\.txt'.*1024"):
        list(kind(path))
    # The way out, of which one block is enough.
    for end in (1024, 512):
        write(cut + bytes(end))
        assert len(list(kind(path))) == num_members


@both
@pytest.mark.parametrize("options", [(), ("--format=ustar",), ("-b", "1")])
def test_archives_of_gnu_tar_are_whole(tmp_path: Path, kind: Any, options: Any) -> None:
    (tmp_path / "1.txt").write_bytes(b"a" * 512)
    (tmp_path / f"{'2' * 90}.txt").write_bytes(b"")
    names = sorted(each.name for each in tmp_path.iterdir())
    path = tmp_path / "a.tar"
    subprocess.run(["tar", *options, "-cf", path, "-C", tmp_path, *names], check=True)
    assert [len(sample["txt"]) for sample in kind(path)] == [512, 0]


@both
@pytest.mark.parametrize(
    ("members", "fields", "words"),
    [
        ([("1.cls", b"x")], None, r"'1\.cls' cannot be read: ValueError"),
        ([("1.json", b"{" * 10000)], None, r"'1\.json' cannot be read"),
        ([("1.png", b"x")], None, r"'1\.png' cannot be read: ImageError: "),
        ([("1.png", b"x")], {"label": "cls"}, r"sample '1' has 0 members 'cls' for the field"),
        ([("1.a", b""), ("1.A", b"")], None, r"'1\.A': the sample '1' has two such members"),
    ],
)
def test_member_that_cannot_be_read_is_named(
    tmp_path: Path, kind: Any, members: Any, fields: Any, words: str
) -> None:
    path = write_tar(tmp_path / "a.tar", members)
    with pytest.raises(DatasetError, match=words):
        list(kind(path, fields, mode="RGB"))


@given(
    changes=st.lists(st.tuples(st.integers(0, 2600), st.integers(0, 255)), max_size=5),
    cut=st.integers(0, 3000),
)
def test_any_damage_is_an_error_of_this_package_or_gives_samples(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]], cut: int
) -> None:
    path = tmp_path_factory.mktemp("t") / "a.tar"
    data = bytearray(write_tar(path, [("1.txt", b"a" * 600), ("2.txt", b"b")]).read_bytes())
    for place, value in changes:
        data[place] = value
    path.write_bytes(data[:cut])
    for kind in KINDS:
        try:
            samples = list(kind(path))
        except DatasetError:
            continue
        except ValueError:
            # The first bytes may be those of a compressed file.
            assert kind is TarDataset
            continue
        assert len(samples) <= 2


# By index


def test_rows_are_read_in_any_order(tars: Path) -> None:
    dataset = TarDataset(str(tars / "*.tar"), FIELDS)
    rows = list(TarStream(str(tars / "*.tar"), FIELDS))
    assert len(dataset) == len(rows) == 40
    for row in (39, 0, 10, 9, 25):
        assert dataset[row] == rows[row]
    assert dataset[-1] == rows[39]
    assert [dict(Subset(dataset, [7, 3])[index]) for index in (0, 1)] == [rows[7], rows[3]]
    for row in (40, -41):
        with pytest.raises(IndexError, match=str(row)):
            dataset[row]


def test_dataset_is_pickled_with_its_index(tars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = TarDataset(str(tars / "*.tar"), FIELDS)
    assert len(dataset) == 40
    data = pickle.dumps(dataset)
    monkeypatch.setattr(tar_index, "index_tar", None)
    assert pickle.loads(data)[39] == dataset[39]


def test_tar_without_samples_is_among_others(tmp_path: Path) -> None:
    paths = [write_tar(tmp_path / f"{name}.tar", []) for name in "ac"]
    paths.insert(1, write_tar(tmp_path / "b.tar", [("1.cls", b"1"), ("2.cls", b"2")]))
    assert [sample["cls"] for sample in TarDataset([*paths])] == [1, 2]
    assert len(TarDataset(paths[0])) == 0


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The tar files that are scanned, with a cache of the test's own."""
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    seen: list[str] = []
    scan = tar_index._scan

    def noted(tar: str, *arguments: Any) -> Any:
        seen.append(Path(tar).name)
        return scan(tar, *arguments)

    monkeypatch.setattr(tar_index, "_scan", noted)
    return seen


def iterate_samples(path: Path) -> list[Any]:
    return [sample["cls"] for sample in TarDataset(path)]


def test_tar_file_is_scanned_once_until_it_changes(tmp_path: Path, scans: list[str]) -> None:
    path = write_tar(tmp_path / "a.tar", [("1.cls", b"1")])
    before = sorted(tmp_path.glob("*"))
    for _ in range(2):
        assert iterate_samples(path) == [1]
    assert scans == ["a.tar"]
    assert {*tmp_path.glob("*")} - {*before} == {tmp_path / "cache"}
    (tmp_path / "link.tar").symlink_to(path)
    assert iterate_samples(tmp_path / "link.tar") == [1]
    assert scans == ["a.tar"]
    write_tar(path, [("1.cls", b"1"), ("2.cls", b"2")])
    os.utime(path, ns=(0, 0))
    assert iterate_samples(path) == [1, 2]
    assert scans == ["a.tar"] * 2


def test_tar_file_that_changes_after_its_scan_is_an_error(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("1.cls", b"1")])
    dataset = TarDataset(path)
    assert dataset[0]["cls"] == 1
    os.utime(path, ns=(0, 0))
    with pytest.raises(DatasetError, match=r"a\.tar has changed"):
        dataset[0]
    path.unlink()
    with pytest.raises(DatasetError, match=r"a\.tar"):
        dataset[0]


@pytest.mark.parametrize("damage", ["cut", "other", "empty", "byte", "link"])
def test_damaged_index_is_made_again(tmp_path: Path, scans: list[str], damage: str) -> None:
    path = write_tar(tmp_path / "a.tar", [("1.cls", b"1"), ("2.cls", b"2")])
    assert iterate_samples(path) == [1, 2]
    (kept,) = (tmp_path / "cache" / "tars").iterdir()
    data = kept.read_bytes()
    changed = {
        "cut": data[:-5],
        "other": b"\xc3",
        "empty": b"",
        "byte": data[:-5] + bytes([data[-5] ^ 1]) + data[-4:],
        "link": data,
    }[damage]
    kept.unlink()
    kept.write_bytes(changed)
    if damage == "link":
        kept.rename(tmp_path / "elsewhere")
        kept.symlink_to(tmp_path / "elsewhere")
    assert iterate_samples(path) == [1, 2]
    assert scans == ["a.tar"] * 2
    assert iterate_samples(path) == [1, 2]
    assert scans == ["a.tar"] * 2


def test_index_that_others_could_change_is_not_used(tmp_path: Path, scans: list[str]) -> None:
    path = write_tar(tmp_path / "a.tar", [("1.cls", b"1")])
    assert iterate_samples(path) == [1]
    (tmp_path / "cache" / "tars").chmod(0o777)
    assert iterate_samples(path) == [1]
    assert scans == ["a.tar"] * 2


def test_cache_that_cannot_be_written_costs_a_scan(tmp_path: Path, scans: list[str]) -> None:
    path = write_tar(tmp_path / "a.tar", [("1.cls", b"1")])
    (tmp_path / "cache").write_text("a file")
    for _ in range(2):
        assert iterate_samples(path) == [1]
    assert scans == ["a.tar"] * 2


def test_sparse_member_needs_a_stream(tmp_path: Path) -> None:
    with open(tmp_path / "1.bin", "wb") as file:
        file.truncate(2**20)
        file.seek(2**19)
        file.write(b"x")
    command = ["tar", "--sparse", "-cf", "a.tar", "1.bin"]
    if subprocess.run(command, cwd=tmp_path, check=False).returncode:
        pytest.skip("this tar writes no sparse files")
    (sample,) = TarStream(tmp_path / "a.tar")
    assert sample["bin"] == (tmp_path / "1.bin").read_bytes()
    with pytest.raises(DatasetError, match="TarStream"):
        len(TarDataset(tmp_path / "a.tar"))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_store_is_built_by_workers_and_resumed(
    tars: Path, tmp_path: Path, num_workers: int
) -> None:
    dataset = TarDataset(str(tars / "*.tar"), FIELDS)
    store = build_store(dataset, tmp_path / "s", num_workers=num_workers, progress=False)
    assert [store[row]["name"] for row in range(40)] == [f"rows/{row:04}" for row in range(40)]
    assert store[17]["image"] == dataset[17]["image"]
    assert verify_store(store.path) == []
