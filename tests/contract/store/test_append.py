"""Rows that are appended to a store: a new version, beside which the old one is undisturbed."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from lightning_memmap.errors import DatasetError, SchemaError, StoreError, StoreNotFoundError
from lightning_memmap.store import append_store, build_store, open_store, verify_store
from tests.support.datasets import Counting, Mixed, Numbered, Replaced, holds

pytestmark = pytest.mark.slow


QUIET: Any = {"progress": False}


@settings(max_examples=20)
@given(
    counts=st.tuples(st.integers(4, 20), st.integers(1, 9), st.integers(1, 20)),
    num_shards=st.integers(1, 7),
)
def test_store_that_was_appended_to_is_that_of_all_rows_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory, counts: tuple[int, ...], num_shards: int
) -> None:
    directory = tmp_path_factory.mktemp("append")
    rows = list(Mixed(sum(counts)))
    options = {"num_shards": num_shards, **Mixed.declared, **QUIET}
    ends = np.cumsum(counts).tolist()
    build_store(rows[: ends[0]], directory / "s", **options)
    for first, end in pairwise(ends):
        append_store(rows[first:end], directory / "s", **QUIET)
    build_store(rows, directory / "one", **options)
    found, expected = open_store(directory / "s").manifest, open_store(directory / "one").manifest
    assert found.content == expected.content
    assert found.probes == expected.probes
    assert verify_store(directory / "s") == []
    names = {path.name for path in directory.iterdir()}
    assert names == {"s", "one"}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_rows_of_arrays_are_appended(tmp_path: Path, num_workers: int) -> None:
    one, other = (
        TensorDataset(torch.arange(number, number + 3000).view(-1, 3)) for number in (0, 7)
    )
    build_store(one, tmp_path / "s", **QUIET)
    store = append_store(other, tmp_path / "s", num_workers=num_workers, **QUIET)
    rows = torch.stack([store[row][0] for row in range(2000)])
    assert torch.equal(rows, torch.cat([one.tensors[0], other.tensors[0]]))


def test_store_that_was_appended_to_is_recognised_as_that_of_both(tmp_path: Path) -> None:
    old = build_store(Numbered(50, 1), tmp_path / "s", **QUIET)
    new = append_store(Numbered(30, 2), tmp_path / "s", **QUIET)
    assert len(new) == len(open_store(tmp_path / "s")) == 80
    # What was open keeps its rows.
    assert holds(old, Numbered(50, 1))
    both = ConcatDataset([Numbered(50, 1), Numbered(30, 2)])
    assert len(build_store(both, tmp_path / "s", **QUIET)) == 80
    with pytest.raises(DatasetError, match="another dataset"):
        build_store(ConcatDataset([Numbered(50, 1), Numbered(30, 3)]), tmp_path / "s", **QUIET)


def test_fingerprint_of_all_rows_decides_after_append(tmp_path: Path) -> None:
    build_store(Numbered(50), tmp_path / "s", fingerprint="v1", **QUIET)
    append_store(Numbered(30), tmp_path / "s", fingerprint="v2", **QUIET)
    both = Counting(ConcatDataset([Numbered(50), Numbered(30)]))
    build_store(both, tmp_path / "s", fingerprint="v2", **QUIET)
    assert both.rows == []


def test_damaged_store_is_not_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "s"
    build_store(Numbered(50), path, num_shards=4, **QUIET)
    (file,) = path.rglob("label.memmap")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(StoreError, match=r"'label', shard 3.*label\.memmap"):
        append_store(Numbered(30), path, **QUIET)
    # The damage is not signed with new checksums.
    assert [damage.field for damage in verify_store(path)] == ["label"]
    assert len(list(path.glob("g-*"))) == 1


def test_row_that_does_not_fit_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    build_store(Numbered(50), tmp_path / "s", **QUIET)
    broken = Replaced(Numbered(30), {17: {"x": torch.zeros(5, dtype=torch.int64), "label": 0}})
    with pytest.raises(SchemaError, match=r"row 17.*'x'"):
        append_store(broken, tmp_path / "s", **QUIET)
    assert holds(open_store(tmp_path / "s"), Numbered(50))
    assert {path.name for path in tmp_path.iterdir()} == {"s"}


def test_dataset_that_has_grown_at_its_end_is_told_how_to_append(tmp_path: Path) -> None:
    build_store(Numbered(50), tmp_path / "s", **QUIET)
    with pytest.raises(DatasetError, match=r"append_store\(Subset\(dataset, range\(50, 60\)\)"):
        build_store(Numbered(60), tmp_path / "s", **QUIET)
    append_store(Subset(Numbered(60), range(50, 60)), tmp_path / "s", **QUIET)
    assert holds(build_store(Numbered(60), tmp_path / "s", **QUIET), Numbered(60))


class Named(Numbered):
    """Rows whose labels have names."""

    def __init__(self, num_rows: int, classes: list[str]) -> None:
        super().__init__(num_rows)
        self.classes = classes


def test_appended_labels_of_other_classes_are_refused(tmp_path: Path) -> None:
    build_store(Named(50, ["cat", "dog"]), tmp_path / "s", **QUIET)
    for classes in (["dog", "cat"], ["cat", "cow", "dog"]):
        with pytest.raises(DatasetError, match="'dog'"):
            append_store(Named(30, classes), tmp_path / "s", **QUIET)
        assert len(open_store(tmp_path / "s")) == 50
    for classes in (["cat"], [], ["cat", "dog"], ["cat", "dog", "cow"]):
        append_store(Named(3, classes), tmp_path / "s", **QUIET)
    assert open_store(tmp_path / "s").classes == ("cat", "dog", "cow")


def test_names_of_classes_that_have_changed_are_those_of_the_dataset(tmp_path: Path) -> None:
    build_store(Named(50, ["cat", "dog"]), tmp_path / "s", **QUIET)
    assert build_store(Named(50, ["Katze", "Hund"]), tmp_path / "s", **QUIET).num_rows == 50
    assert open_store(tmp_path / "s").classes == ("Katze", "Hund")


class _Random(Numbered):
    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"x": torch.randint(9, (4,)), "label": 1}


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        (iter([1]), ValueError, "only a map-style dataset can be appended"),
        ([], ValueError, "the dataset is empty"),
        (_Random(30), DatasetError, "random"),
    ],
    ids=["stream", "empty", "random"],
)
def test_what_cannot_be_appended_is_refused(
    tmp_path: Path, dataset: Any, error: type[Exception], message: str
) -> None:
    build_store(Numbered(50), tmp_path / "s", **QUIET)
    with pytest.raises(error, match=message):
        append_store(dataset, tmp_path / "s", **QUIET)
    assert holds(open_store(tmp_path / "s"), Numbered(50))


def test_append_to_nothing_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError):
        append_store(Numbered(50), tmp_path / "s", **QUIET)
    assert not list(tmp_path.iterdir())
