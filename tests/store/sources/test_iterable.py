"""Datasets that are iterated over are stored in the order in which their rows arrive."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from lightning_memmap import MemmapDataModule, build_store
from lightning_memmap.errors import DatasetError, SchemaError
from lightning_memmap.store import samples, writing
from lightning_memmap.store.sources import iterable as iterable_module
from tests.support.datasets import Numbered, Ragged, column_files, holds
from tests.support.models import set_up
from tests.support.store.layout import is_empty


class Stream(IterableDataset[Any]):
    """The rows of a map-style dataset, one after the other."""

    def __init__(self, dataset: Any, num_rows: int) -> None:
        self.dataset = dataset
        self.num_rows = num_rows

    def __iter__(self) -> Iterator[Any]:
        return (self.dataset[row] for row in range(self.num_rows))


def raising() -> Iterator[int]:
    yield from range(7)
    raise ValueError("the end of the tape")


def ragged(num_rows: int) -> list[Any]:
    """Rows with text and fields that differ in length, of which the first two have numbers."""
    rows = [Ragged(num_rows)[row] for row in range(num_rows)]
    for row in rows[:2]:
        row["ids"] = [1] * (3 + row["row"])
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("is_ragged", [False, True])
@given(num_rows=st.integers(2, 70), num_shards=st.integers(1, 9), piece_rows=st.integers(1, 20))
def test_stream_of_any_length_is_stored_as_its_rows_in_a_list_are(
    tmp_path_factory: pytest.TempPathFactory,
    is_ragged: bool,
    num_rows: int,
    num_shards: int,
    piece_rows: int,
) -> None:
    path = tmp_path_factory.mktemp("store")
    rows = ragged(num_rows) if is_ragged else [Numbered(num_rows)[row] for row in range(num_rows)]
    options: dict[str, Any] = {"num_shards": num_shards, "progress": False}
    if is_ragged:
        options["variable"] = {"sound": 1, "ids": 1, "image": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "_MAX_HELD_ROWS", piece_rows)
        patch.setattr(writing, "_SLICE_BYTES", 1000)
        store = build_store(iter(rows), path / "s", **options)
    expected = build_store(rows, path / "e", **options)
    assert store.schema == expected.schema
    assert store.manifest.probes == expected.manifest.probes
    assert column_files(store) == column_files(expected)
    assert {child.name for child in path.iterdir()} == {"s", "e"}


def test_rows_of_a_stream_that_differ_late_are_refused_with_a_declaration_that_helps(
    tmp_path: Path,
) -> None:
    rows = [{"x": torch.zeros(3 if row < 700 else 4), "row": row} for row in range(800)]
    with pytest.raises(SchemaError, match=r"row 700, .* variable=\['x'\]"):
        build_store(iter(rows), tmp_path / "s", progress=False)
    store = build_store(iter(rows), tmp_path / "s", variable=["x"], progress=False)
    assert [len(store[row]["x"]) for row in (0, 699, 700)] == [3, 3, 4]


@pytest.mark.parametrize(
    ("samples", "error", "message"),
    [
        ([], ValueError, "the dataset is empty.*generator"),
        ([1, 2, "three"], SchemaError, "row 2, the sample: found"),
        ([{"x": 1}, {"y": 1}], SchemaError, "row 1, the sample: found dict"),
        ([object()], SchemaError, "row 0, the sample: found object"),
        (raising(), DatasetError, "raised at row 7: ValueError: the end of the tape"),
    ],
)
def test_stream_that_cannot_be_stored_leaves_nothing(
    tmp_path: Path, samples: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build_store(iter(samples), tmp_path / "s", progress=False)
    assert is_empty(tmp_path / "s")


def test_stream_that_fills_the_disk_says_where_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(iterable_module.pickle, "dump", is_full)
    with pytest.raises(OSError, match=r"0 rows of the iterable.*No space left") as found:
        build_store(Stream(Numbered(50), 50), tmp_path / "s", progress=False)
    assert str(found.value.filename) == str(tmp_path / "s")
    assert is_empty(tmp_path / "s")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Stream(Numbered(40, version=1), 40), "row 0 of the dataset differs"),
        (Stream(Numbered(40), 39), "the dataset has 39 rows, the store 40"),
        (Stream(Numbered(41), 41), "more rows than the store .40"),
        (Stream([*map(Numbered(39).__getitem__, range(39)), Numbered(1)[0]], 40), "row 39 of"),
        (Stream([1] * 40, 40), "row 0, the sample: found int"),
    ],
    ids=["first row", "shorter", "longer", "last row", "structure"],
)
def test_store_of_the_same_stream_is_used_and_of_another_one_refused(
    tmp_path: Path, other: Stream, message: str
) -> None:
    build_store(Stream(Numbered(40), 40), tmp_path / "s", progress=False)
    manifest = (tmp_path / "s" / "manifest.json").read_bytes()
    found = build_store(Stream(Numbered(40), 40), tmp_path / "s", progress=False)
    assert holds(found, Numbered(40))
    assert (tmp_path / "s" / "manifest.json").read_bytes() == manifest
    with pytest.raises(DatasetError, match=message):
        build_store(other, tmp_path / "s", progress=False)
    with pytest.raises(ValueError, match=r"num_workers=2 with a Stream"):
        build_store(other, tmp_path / "s", num_workers=2)


def test_generator_is_recognised_by_a_fingerprint_alone(tmp_path: Path) -> None:
    def rows() -> Iterator[Any]:
        return (Numbered(9)[row] for row in range(9))

    build_store(rows(), tmp_path / "s", fingerprint="one", progress=False)
    assert holds(build_store(rows(), tmp_path / "s", fingerprint="one"), Numbered(9))
    with pytest.raises(DatasetError, match=r"fingerprint='two'.*'one'"):
        build_store(rows(), tmp_path / "s", fingerprint="two")
    with pytest.raises(DatasetError, match=r"a generator .* fingerprint"):
        build_store(rows(), tmp_path / "s")


def test_data_module_serves_an_iterable_dataset(tmp_path: Path) -> None:
    for _ in range(2):
        data = MemmapDataModule(
            Stream(Numbered(50), 50), store_dir=tmp_path, batch_size=8, shuffle=False
        )
        set_up(data, "fit")
        batches = [batch["x"] for batch in data.train_dataloader()]
        assert torch.cat(batches).equal(Numbered(50).expected()["x"])
        data.teardown("fit")
    data = MemmapDataModule(Stream(list(pairs()), 20), store_dir=tmp_path / "p", batch_size=8)
    set_up(data, "fit")
    assert type(next(iter(data.train_dataloader()))) is Pair


class Pair(NamedTuple):
    """A sample with a class of its own."""

    number: int
    text: str


def pairs() -> Iterator[Pair]:
    return (Pair(row, "x" * row) for row in range(20))


def test_data_module_reads_a_generator_once(tmp_path: Path) -> None:
    rows = pairs()
    data = MemmapDataModule(rows, store_dir=tmp_path, batch_size=8, shuffle=False)
    for _ in range(2):
        set_up(data, "fit")
        batches = list(data.train_dataloader())
        assert torch.cat([batch.number for batch in batches]).tolist() == list(range(20))
        assert batches[0].text[:3] == ["", "x", "xx"]
        data.teardown("fit")
    assert next(rows, None) is None


def test_data_module_of_a_stored_generator_needs_its_fingerprint(tmp_path: Path) -> None:
    for is_built in (False, True):
        data = MemmapDataModule(pairs(), store_dir=tmp_path / "a", fingerprint="v1")
        set_up(data, "fit")
        assert (next(data.train_dataset, None) is not None) == is_built  # It was not read.
    MemmapDataModule(pairs(), store_dir=tmp_path / "b").prepare_data()
    with pytest.raises(DatasetError, match=r"fingerprint"):
        MemmapDataModule(pairs(), store_dir=tmp_path / "b").prepare_data()


def test_several_generators_are_several_datasets(tmp_path: Path) -> None:
    data = MemmapDataModule(
        val_dataset={"one": pairs(), "two": iter([1, 2, 3])}, store_dir=tmp_path, batch_size=2
    )
    set_up(data, "validate")
    assert [len(store) for store in data.stores.values()] == [20, 3]


def test_generator_function_is_refused_with_the_way_out(tmp_path: Path) -> None:
    def rows() -> Iterator[int]:
        yield 1

    for _ in range(2):  # Whether or not a store is there.
        with pytest.raises(TypeError, match="rows is a generator function: call it"):
            build_store(rows, tmp_path / "s")
        build_store(rows(), tmp_path / "s", fingerprint="v1", progress=False)
    with pytest.raises(TypeError, match="rows is a generator function: call it"):
        MemmapDataModule(rows, store_dir=tmp_path)
    with pytest.raises(TypeError, match="Stream is a class"):
        MemmapDataModule(Stream, store_dir=tmp_path)
