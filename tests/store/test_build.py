import dataclasses
import errno
import itertools
import multiprocessing
import os
import re
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.utils.data import Dataset

from lightning_memmap import MemmapDataModule
from lightning_memmap.errors import DatasetError, SchemaError, StoreError, StoreNotFoundError
from lightning_memmap.schema.fields import DTYPES
from lightning_memmap.store import build_store, open_store, verify_store, writing
from lightning_memmap.store.samples import RandomDatasetError, choose_probe_rows
from tests.support.datasets import Counting, Numbered, Replaced, Wrapped, holds, in_dataset_order
from tests.support.store.layout import is_empty, names_in


def build(dataset: Any, path: Path, **arguments: Any) -> Any:
    return build_store(dataset, path, **{"num_shards": 3, "progress": False, **arguments})


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def assert_nothing_built(path: Path) -> None:
    with pytest.raises(StoreNotFoundError):
        open_store(path)


# Rows


@pytest.mark.parametrize(
    ("num_rows", "num_shards", "num_workers"),
    [
        *itertools.product([1, 5, 24, 2500], [1, 2, 3, 7, 24], [0]),
        *[(1, 1, 2), (5, 24, 2), (2500, 7, 2), (300, 2**16, 0)],
    ],
)
def test_build_any_counts_stores_each_row_in_its_place(
    tmp_path: Path, num_rows: int, num_shards: int, num_workers: int
) -> None:
    dataset = Numbered(num_rows)
    store = build(dataset, tmp_path / "s", num_shards=num_shards, num_workers=num_workers)
    assert len(store) == store.num_rows == num_rows
    assert store.num_shards == num_shards
    assert holds(store, dataset)
    assert verify_store(tmp_path / "s") == []
    for row in {0, 1, num_rows // 2, num_rows - 1} & set(range(num_rows)):
        sample, expected = store[row], dataset[row]
        assert torch.equal(sample["x"], expected["x"])
        assert sample["label"].item() == expected["label"]


def test_store_shards_hold_every_cth_row(tmp_path: Path) -> None:
    dataset = Numbered(50)
    store = build(dataset, tmp_path / "s", num_shards=7)
    found = store.as_tensordict()
    for name, rows in dataset.expected().items():
        assert torch.equal(found[name], torch.cat([rows[shard::7] for shard in range(7)]))


@pytest.mark.parametrize("row", [50, -51, 1000])
def test_store_row_outside_raises_index_error(tmp_path: Path, row: int) -> None:
    store = build(Numbered(50), tmp_path / "s")
    assert torch.equal(store[-1]["x"], store[49]["x"])
    assert torch.equal(store[-50]["x"], store[0]["x"])
    with pytest.raises(IndexError, match=f"row {row}: the store has 50 rows"):
        store[row]


# Dtypes and leaves


def random_rows(dtype: torch.dtype, num_rows: int) -> Tensor:
    """Rows of random bits, including NaN payloads, negative zeros and denormals."""
    generator = torch.Generator().manual_seed(0)
    if dtype == torch.bool:
        return torch.randint(0, 2, (num_rows, 2, 3), generator=generator).bool()
    raw = torch.randint(
        0, 256, (num_rows, 2, 3 * dtype.itemsize), dtype=torch.uint8, generator=generator
    )
    if dtype.is_floating_point:
        raw[0] = 255  # A NaN with every bit set.
    return raw.view(dtype)


# numpy has no bfloat16.
CARRIERS = [
    (name, carrier)
    for name in DTYPES
    for carrier in ("tensor", "array")
    if (name, carrier) != ("bfloat16", "array")
]


@pytest.mark.parametrize(("name", "carrier"), CARRIERS)
def test_build_any_dtype_comes_back_bit_for_bit(tmp_path: Path, name: str, carrier: str) -> None:
    assert len(DTYPES) == 15
    rows = random_rows(DTYPES[name], 10)
    dataset = list(rows.numpy()) if carrier == "array" else list(rows)
    store = build(dataset, tmp_path / "s")
    found = in_dataset_order(store)["value"]
    assert found.dtype == rows.dtype
    assert found.shape == rows.shape
    assert torch.equal(found.view(torch.uint8), rows.view(torch.uint8))
    again = build(dataset, tmp_path / "s")
    assert torch.equal(
        again[7].reshape(-1).view(torch.uint8), rows[7].reshape(-1).view(torch.uint8)
    )


class Pair(NamedTuple):
    image: Any
    label: Any


@dataclasses.dataclass
class Example:
    image: Any
    label: Any


def test_build_nested_samples_come_back_nested(tmp_path: Path) -> None:
    rows = [
        {
            "a.b": torch.full((2,), row),
            "pair": Pair(row, [row * 2]),
            3: (),
            "": Example(row / 2, (row % 2 == 0,)),
            "two words/é": {"..": row},
        }
        for row in range(10)
    ]
    store = build(rows, tmp_path / "s")
    sample = open_store(tmp_path / "s")[7]
    assert list(sample) == ["a.b", "pair", 3, "", "two words/é"]
    assert sample["a.b"].tolist() == [7, 7]
    assert type(sample["pair"]).__name__ == "Pair"
    assert sample["pair"].image.item() == 7
    assert [leaf.item() for leaf in sample["pair"].label] == [14]
    assert sample[3] == []
    assert type(sample[""]).__name__ == "Example"
    assert sample[""].image.item() == 3.5
    assert [leaf.item() for leaf in sample[""].label] == [False]
    assert sample["two words/é"][".."].item() == 7
    names = {field.name for field in store.schema.fields}
    assert set(store.as_tensordict().keys()) == {"a.b", "pair", "3", "", "two words/é"}
    assert store.as_tensordict()["pair", "label", "0"].shape == (10,)
    assert set(names_in(tmp_path / "s")) == {
        "manifest.json",
        *(f"{name}.memmap" for name in names),
    }


def test_build_field_without_elements_is_kept(tmp_path: Path) -> None:
    rows = [{"nothing": torch.zeros(0, 3), "label": row} for row in range(10)]
    store = build(rows, tmp_path / "s")
    assert store[4]["nothing"].shape == (0, 3)
    assert in_dataset_order(store)["label"].tolist() == list(range(10))
    assert verify_store(tmp_path / "s") == []
    only_nothing = build([np.zeros((2, 0), np.uint8)] * 10, tmp_path / "t")
    assert only_nothing[9].shape == (2, 0)
    assert only_nothing[9].dtype == torch.uint8


def test_build_rows_of_more_than_a_block_are_stored_whole(tmp_path: Path) -> None:
    # Rows of 40 MiB: each is larger than what is written at once.
    rows = [torch.full((40 * 2**20,), row, dtype=torch.uint8) for row in range(3)]
    store = build(rows, tmp_path / "s", num_shards=2)
    assert all(torch.equal(store[row], rows[row]) for row in range(3))


# A second build


class Processes(Wrapped):
    """Notes which process reads each row."""

    def __init__(self, dataset: Any, log: Path) -> None:
        super().__init__(dataset)
        self.log = log

    def __getitem__(self, row: int) -> Any:
        with open(self.log, "a", buffering=1) as file:
            file.write(f"{os.getpid()}\n")
        return super().__getitem__(row)


@pytest.mark.parametrize(
    "method",
    ["fork", pytest.param("spawn", marks=pytest.mark.slow)],  # It imports torch twice.
)
def test_build_starts_its_workers_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    context = multiprocessing.get_context(method)
    monkeypatch.setattr(multiprocessing, "get_context", lambda: context)
    # One process for all probe rows of quick rows, and a range for each.
    monkeypatch.setattr(writing, "_MAX_BLOCK_ROWS", 20)
    monkeypatch.setattr(writing, "_MAX_BLOCKS", 1)
    store = build(Processes(Numbered(400), tmp_path / "log"), tmp_path / "s", num_workers=2)
    assert holds(store, Numbered(400))
    readers = set((tmp_path / "log").read_text().splitlines())
    assert 1 <= len(readers) <= 2
    assert str(os.getpid()) not in readers


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "longer": (lambda: Numbered(101), "the dataset has 101 rows, the store 100"),
    "shorter": (lambda: Numbered(99), "the dataset has 99 rows, the store 100"),
    "first row": (
        lambda: Replaced(Numbered(100), {0: Numbered(100)[1]}),
        "row 0 of the dataset differs",
    ),
    "last row": (
        lambda: Replaced(Numbered(100), {99: Numbered(100)[1]}),
        "row 99 of the dataset differs",
    ),
    "dtype": (
        lambda: [{"x": row["x"].int(), "label": row["label"]} for row in Numbered(100)],
        r"row 0, field 'x': found int32 \(4,\), expected int64 \(4,\)",
    ),
    "structure": (
        lambda: [(row["x"], row["label"]) for row in Numbered(100)],
        "row 0, the sample: found tuple, expected dict",
    ),
    "raises": (
        lambda: Replaced(Numbered(100), {99: OSError("gone")}),
        "the dataset raised at row 99: OSError: gone",
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_rebuild_other_dataset_is_refused_and_the_store_unharmed(tmp_path: Path, kind: str) -> None:
    make, message = OTHERS[kind]
    build(Numbered(100), tmp_path / "s")
    before = contents(tmp_path / "s")
    with pytest.raises(DatasetError, match=message) as caught:
        build(make(), tmp_path / "s")
    if kind != "raises":
        assert "built from another dataset" in str(caught.value)
        assert "overwrite=True" in str(caught.value)
    assert contents(tmp_path / "s") == before
    assert holds(open_store(tmp_path / "s"), Numbered(100))


def test_rebuild_other_number_of_shards_is_refused(tmp_path: Path) -> None:
    build(Numbered(100), tmp_path / "s", num_shards=3)
    with pytest.raises(StoreError, match=r"num_shards=4: .* has 3 shards.*overwrite=True"):
        build(Numbered(100), tmp_path / "s", num_shards=4)
    assert holds(open_store(tmp_path / "s"), Numbered(100))


def test_rebuild_of_damaged_store_is_refused_without_overwrite(tmp_path: Path) -> None:
    build(Numbered(100), tmp_path / "s")
    (tmp_path / "s" / "manifest.json").write_text("{}")
    with pytest.raises(StoreError, match="cannot be trusted"):
        build(Numbered(100), tmp_path / "s")
    assert holds(build(Numbered(100), tmp_path / "s", overwrite=True), Numbered(100))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_build_takes_no_random_numbers_from_the_program(tmp_path: Path, num_workers: int) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    build(Numbered(30), tmp_path / "s", num_workers=num_workers)
    assert torch.equal(torch.rand(4), expected)


def test_build_through_a_link_reads_and_replaces_the_linked_store(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    build(Numbered(10), tmp_path / "disk" / "s")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "s")
    assert holds(open_store(tmp_path / "link"), Numbered(10))
    new = Numbered(20, version=1)
    assert holds(build(new, tmp_path / "link", overwrite=True), new)
    assert (tmp_path / "link").is_symlink()
    assert holds(open_store(tmp_path / "disk" / "s"), new)
    assert holds(build(new, tmp_path / "link"), new)


# Datasets that do not fit


@pytest.mark.parametrize("num_workers", [0, 2])
def test_build_empty_dataset_raises_value_error(tmp_path: Path, num_workers: int) -> None:
    with pytest.raises(ValueError, match="the dataset is empty"):
        build([], tmp_path / "s", num_workers=num_workers)
    assert_nothing_built(tmp_path / "s")


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"num_shards": 0}, ValueError, "num_shards=0"),
        ({"num_shards": 2**20 + 1}, ValueError, "num_shards=1048577: .* at most 65536"),
        ({"num_workers": -1}, ValueError, "-1"),
        ({"num_shards": 2.0}, TypeError, r"num_shards=2\.0"),
        ({"num_workers": "2"}, TypeError, "num_workers='2'"),
    ],
)
def test_build_bad_argument_is_named(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        build(Numbered(10), tmp_path / "s", **arguments)
    assert_nothing_built(tmp_path / "s")


@pytest.mark.parametrize(
    ("sample", "num_rows", "num_shards", "message"),
    [
        ({str(index): index for index in range(4097)}, 1, 24, "4097 fields: a store has 1 to 4096"),
        (list(range(3)), 9, 2**16, "num_shards=65536: .* 131072"),
        (torch.zeros([1] * 32 + [0]), 2**20 + 1, 24, "1048577 rows without any bytes"),
    ],
)
def test_build_of_what_could_not_be_opened_is_refused_when_the_probe_rows_are_read(
    tmp_path: Path, sample: Any, num_rows: int, num_shards: int, message: str
) -> None:
    with pytest.raises(StoreError, match=message):
        build(Repeated(sample, num_rows), tmp_path / "s", num_shards=num_shards)
    assert_nothing_built(tmp_path / "s")


class Repeated:
    """The same sample in all rows. Only the probe rows can be read."""

    def __init__(self, sample: Any, num_rows: int) -> None:
        self._sample, self._num_rows = sample, num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, row: int) -> Any:
        assert row in choose_probe_rows(self._num_rows)
        return self._sample


def test_build_at_what_is_no_place_for_a_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file is not a directory"):
        build(Numbered(10), tmp_path / "file" / "s")
    with pytest.raises(ValueError, match="path=''"):
        build(Numbered(10), "")
    with pytest.raises(ValueError, match="UTF-8"):
        build(Numbered(10), f"{tmp_path}/\udc80")
    # Nobody has the lock: it cannot be made.
    with pytest.raises(StoreError, match="cannot be locked"):
        build(Numbered(10), "/proc/s")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_build_sample_that_does_not_fit_names_row_field_found_and_expected(
    tmp_path: Path, num_workers: int
) -> None:
    sample = {"x": torch.zeros(4, dtype=torch.int64), "label": 1.5}
    message = r"row 2301, field 'label': found float64.* expected int64 \(\)"
    with pytest.raises(SchemaError, match=message):
        build(Replaced(Numbered(3000), {2301: sample}), tmp_path / "s", num_workers=num_workers)
    assert_nothing_built(tmp_path / "s")


class StrangeError(Exception):
    """An exception that cannot be sent to another process."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")

    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("row", [0, 1, 2999])
def test_build_dataset_that_raises_names_the_row(
    tmp_path: Path, row: int, num_workers: int
) -> None:
    dataset = Replaced(Numbered(3000), {row: StrangeError(3, 4)})
    with pytest.raises(DatasetError, match=f"raised at row {row}: StrangeError: 3 and 4") as caught:
        build(dataset, tmp_path / "s", num_workers=num_workers)
    # The cause shows where in the dataset it was raised.
    assert caught.value.__cause__ is not None
    if row == 1:
        shown = "".join(traceback.format_exception(caught.value.__cause__))
        assert "datasets.py" in shown
    assert_nothing_built(tmp_path / "s")


class Random(Wrapped):
    def __getitem__(self, row: int) -> Any:
        return torch.rand(3)


class RandomOnceRead(Wrapped):
    """Each row changes with each read."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self.reads: dict[int, int] = {}

    def __getitem__(self, row: int) -> Any:
        self.reads[row] = self.reads.get(row, 0) + 1
        sample = super().__getitem__(row)
        return {**sample, "label": sample["label"] + self.reads[row]}


@pytest.mark.parametrize("kind", [Random, RandomOnceRead])
def test_build_random_dataset_is_refused_and_points_to_transform(
    tmp_path: Path, kind: Callable[[Any], Any]
) -> None:
    with pytest.raises(DatasetError, match=r"(?s)row \d+.*random.*`transform=`"):
        build(kind(Numbered(100)), tmp_path / "s")
    assert_nothing_built(tmp_path / "s")
    assert is_empty(tmp_path / "s")


# Places that cannot be used


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", ["directory", "file", "tensordict", "web app"])
def test_build_path_that_is_no_store_is_refused_and_untouched(
    tmp_path: Path, kind: str, overwrite: bool
) -> None:
    path = tmp_path / "s"
    if kind == "file":
        path.write_text("mine")
    elif kind == "tensordict":
        TensorDict({"x": torch.arange(5)}, [5]).memmap(str(path))
    else:
        path.mkdir()
        # Browsers look for a manifest of this name, too.
        name = "manifest.json" if kind == "web app" else "mine.txt"
        (path / name).write_text('{"name": "mine"}')
    before = contents(path) if path.is_dir() else path.read_bytes()
    with pytest.raises(StoreError, match=r"choose another `path`"):
        build(Numbered(10), path, overwrite=overwrite)
    data = MemmapDataModule(Numbered(10), store_dir=path.parent / "d", overwrite=overwrite)
    path.rename(path.parent / "train")
    (path.parent / "d").mkdir()
    path = (path.parent / "train").rename(path.parent / "d" / "train")
    with pytest.raises(StoreError, match=r"choose another `store_dir`"):
        data.prepare_data()
    assert (contents(path) if path.is_dir() else path.read_bytes()) == before


MIB, BLOCK = 2**20, 4096


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that answers like a disk of one mebibyte, which needs a block besides for a file
    that is given its place."""
    allocate, usage = os.posix_fallocate, type(shutil.disk_usage(tmp_path))

    def used(but: int | None = None) -> int:
        states = [path.stat() for path in tmp_path.rglob("*") if path.is_file()]
        return sum(512 * state.st_blocks for state in states if state.st_ino != but)

    def posix_fallocate(file: int, offset: int, length: int) -> None:
        blocks = BLOCK * (1 - (-(offset + length) // BLOCK))
        if used(os.fstat(file).st_ino) + blocks > MIB:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(file, offset, length)

    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(MIB, used(), MIB - used()))
    monkeypatch.setattr(os, "posix_fallocate", posix_fallocate)
    return tmp_path


def sounds(num_bytes: int) -> list[Tensor]:
    """Rows that differ in length, of so many bytes in all."""
    lengths = [num_bytes // 200 + row % 3 - 1 for row in range(200)]
    return [torch.full((length,), row, dtype=torch.uint8) for row, length in enumerate(lengths)]


def test_build_on_full_disk_raises_enospc_with_both_numbers_and_leaves_nothing(
    small_disk: Path,
) -> None:
    path = small_disk / "s"

    def refused(rows: Any, **arguments: Any) -> int:
        """The bytes that are needed, as the error has them beside those that are free."""
        free = shutil.disk_usage(small_disk).free
        with pytest.raises(OSError, match=f"needs .* {free} are free") as caught:
            build(rows, path, **arguments)
        assert caught.value.errno == errno.ENOSPC
        return int(re.search(r"needs (\d+) bytes", str(caught.value))[1])  # type: ignore[index]

    large = [torch.zeros(MIB // 4, dtype=torch.uint8)] * 5
    assert refused(large) == 5 * MIB // 4
    assert is_empty(path)
    # As many bytes as are free: there is no room for the other files of a build.
    free = shutil.disk_usage(small_disk).free
    assert refused([torch.zeros(free // 4, dtype=torch.uint8)] * 4) == free // 4 * 4
    # There is room for these, but not for twice as many bytes: known before a row is written.
    counting = Counting(sounds(3 * MIB // 4))
    assert refused(counting) == pytest.approx(2 * 3 * MIB // 4 + 200 * 24, rel=0.02)
    assert len(counting.rows) <= 16
    assert is_empty(path)
    # The failed builds left nothing on the disk: there is room again.
    small = [torch.full((1000,), row) for row in range(5)]
    assert len(build(small, path)) == 5
    refused(large, overwrite=True)
    assert [int(row[0]) for row in open_store(path)] == [0, 1, 2, 3, 4]
    shutil.rmtree(path)
    assert len(build(sounds(3 * MIB // 8), path)) == 200


@pytest.mark.parametrize("num_workers", [0, 2])
def test_build_closes_every_file(tmp_path: Path, num_workers: int) -> None:
    build(Numbered(100), tmp_path / "warm", num_workers=num_workers)
    before = len(os.listdir("/proc/self/fd"))
    for index in range(2):
        build(Numbered(100), tmp_path / str(index), num_workers=num_workers)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_build_shows_progress_only_when_asked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    build(Numbered(100), tmp_path / "quiet", progress=False)
    assert capfd.readouterr() == ("", "")
    build(Numbered(100), tmp_path / "loud", progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "storing" in err
    assert "100/100 rows" in err
    assert "checksums" in err


class OpenFile(Dataset[np.ndarray]):
    """Numbers in a file that is open from the beginning."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def __len__(self) -> int:
        return 4_000

    def __getitem__(self, row: int) -> np.ndarray:
        self._file.seek(400 * row)
        return np.frombuffer(self._file.read(400), np.int64)


@pytest.mark.slow
@pytest.mark.parametrize("buffering", [0, 4096])
def test_workers_read_an_open_file_each_at_a_position_of_its_own(
    tmp_path: Path, buffering: int
) -> None:
    expected = np.arange(4_000 * 50).reshape(4_000, 50)
    expected.tofile(tmp_path / "file")
    with (tmp_path / "file").open("rb", buffering=buffering) as file:
        file.seek(40)
        store = build(OpenFile(file), tmp_path / "s", num_workers=2)
        # That of this process has not moved.
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == 40
    assert np.array_equal(np.stack([store[row].numpy() for row in range(4_000)]), expected)


def test_dataset_that_changes_is_noticed_where_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_MAX_BLOCK_ROWS", 100)
    dataset = RandomOnceRead(Numbered(3000))
    with pytest.raises(RandomDatasetError, match="row 0"):
        build(dataset, tmp_path / "s")
    # Besides the probe rows, only the first block was read.
    assert len(dataset.reads) < 200
