"""Datasets that are iterated over are stored in the order in which their rows arrive."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from lightning_memmap import MemmapDataModule, build_store
from lightning_memmap.errors import DatasetError, SchemaError
from lightning_memmap.store.sources import stream as streams
from tests.datasets import Numbered, holds


class Stream(IterableDataset[Any]):
    """The rows of a map-style dataset, one after the other."""

    def __init__(self, dataset: Any, num_rows: int) -> None:
        self.dataset = dataset
        self.num_rows = num_rows

    def __iter__(self) -> Iterator[Any]:
        return (self.dataset[row] for row in range(self.num_rows))


@settings(max_examples=40, deadline=None)
@given(num_rows=st.integers(1, 70), num_shards=st.integers(1, 9), piece_rows=st.integers(1, 20))
def test_stream_of_any_length_is_stored_as_its_rows_in_a_list_are(
    tmp_path_factory: pytest.TempPathFactory, num_rows: int, num_shards: int, piece_rows: int
) -> None:
    path, numbered = tmp_path_factory.mktemp("store"), Numbered(num_rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "_MAX_PIECE_ROWS", piece_rows)
        options: dict[str, Any] = {"num_shards": num_shards, "progress": False}
        store = build_store((numbered[row] for row in range(num_rows)), path / "s", **options)
    assert holds(store, numbered)
    expected = build_store(numbered, path / "e", **options)
    for file in expected.path.glob("*.memmap"):
        assert (store.path / file.name).read_bytes() == file.read_bytes()
    assert store.manifest.probes == expected.manifest.probes
    assert store.manifest.checksums == expected.manifest.checksums
    assert {child.name for child in path.iterdir()} == {"s", "e", ".s.lock", ".e.lock"}


def test_stream_samples_of_mixed_kinds_come_back(tmp_path: Path) -> None:
    rows = [
        {
            "big-endian": np.arange(3, dtype=">f4") + row,
            "bfloat16": torch.full((2,), 0.1 + row).bfloat16(),
            "empty": np.empty((0, 3)),
            "nested": (row, [float(row), row % 2 == 0]),
            "numbers": [row + k for k in range(20)],
            "parameter": torch.nn.Parameter(torch.full((2,), 0.1 + row)),
        }
        for row in range(50)
    ]
    found = build_store(iter(rows), tmp_path / "stream", progress=False)
    expected = build_store(rows, tmp_path / "list", progress=False)
    assert found.schema == expected.schema
    assert found.manifest.checksums == expected.manifest.checksums


@pytest.mark.parametrize(
    ("samples", "error", "message"),
    [
        ([], ValueError, "the dataset is empty"),
        ([1, 2, "three"], SchemaError, "row 2, field 'value': found"),
        ([{"x": 1}, {"y": 1}], SchemaError, "row 1, field 'value': found dict"),
        ([object()], SchemaError, "row 0, field 'value': found object"),
    ],
)
def test_stream_that_cannot_be_stored_leaves_nothing(
    tmp_path: Path, samples: list[Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build_store(iter(samples), tmp_path / "s", progress=False)
    assert [child.name for child in tmp_path.iterdir()] == [".s.lock"]


def test_stream_that_raises_names_the_row(tmp_path: Path) -> None:
    def rows() -> Iterator[int]:
        yield from range(7)
        raise ValueError("the end of the tape")

    with pytest.raises(DatasetError, match="raised at row 7: ValueError: the end of the tape"):
        build_store(rows(), tmp_path / "s", progress=False)
    assert [child.name for child in tmp_path.iterdir()] == [".s.lock"]


def test_stream_is_refused_with_workers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"num_workers=2 with a Stream: .* give num_workers=0"):
        build_store(Stream(Numbered(9), 9), tmp_path / "s", num_workers=2)


def test_store_of_the_same_stream_is_used(tmp_path: Path) -> None:
    build_store(Stream(Numbered(40), 40), tmp_path / "s", progress=False)
    manifest = (tmp_path / "s" / "manifest.json").read_bytes()
    assert holds(build_store(Stream(Numbered(40), 40), tmp_path / "s"), Numbered(40))
    assert (tmp_path / "s" / "manifest.json").read_bytes() == manifest


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Stream(Numbered(40, version=1), 40), "row 0 of the dataset differs"),
        (Stream(Numbered(40), 39), "the dataset has 39 rows, the store 40"),
        (Stream(Numbered(41), 41), "the dataset has 41 rows, the store 40"),
        (Stream([*map(Numbered(39).__getitem__, range(39)), Numbered(1)[0]], 40), "row 39 of"),
        (Stream([1] * 40, 40), "row 0, field 'value': found int"),
    ],
    ids=["first row", "shorter", "longer", "last row", "structure"],
)
def test_store_of_another_stream_is_refused(tmp_path: Path, other: Stream, message: str) -> None:
    build_store(Stream(Numbered(40), 40), tmp_path / "s", progress=False)
    with pytest.raises(DatasetError, match=message):
        build_store(other, tmp_path / "s", progress=False)


def test_generator_is_recognised_by_a_fingerprint_alone(tmp_path: Path) -> None:
    def rows() -> Iterator[Any]:
        return (Numbered(9)[row] for row in range(9))

    build_store(rows(), tmp_path / "s", fingerprint="one", progress=False)
    assert holds(build_store(rows(), tmp_path / "s", fingerprint="one"), Numbered(9))
    assert holds(build_store(rows(), tmp_path / "s", check="off"), Numbered(9))
    with pytest.raises(DatasetError, match="fingerprint='two', and that of the store is 'one'"):
        build_store(rows(), tmp_path / "s", fingerprint="two")
    with pytest.raises(DatasetError, match=r"a generator gives its rows once.* fingerprint"):
        build_store(rows(), tmp_path / "s")


def test_data_module_serves_an_iterable_dataset(tmp_path: Path) -> None:
    for _ in range(2):
        data = MemmapDataModule(
            Stream(Numbered(50), 50), store_dir=tmp_path, batch_size=8, shuffle=False
        )
        data.prepare_data()
        data.setup("fit")
        batches = [batch["x"] for batch in data.train_dataloader()]
        assert torch.cat(batches).equal(Numbered(50).expected()["x"])
        data.teardown("fit")
