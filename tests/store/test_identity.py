"""The identity of a dataset: it differs where the rows may, and is the same where they cannot."""

import os
import pickle
import subprocess
import sys
import threading
from array import array
from collections import deque
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lightning_memmap import ImageFolder, build_store
from lightning_memmap.errors import DatasetError
from lightning_memmap.store import identity as module
from lightning_memmap.store.identity import Identity
from tests.support.datasets import Numbered, Wrapped, encoded, texts


class Holder(Dataset[int]):
    """Has the attributes that it is given, and rows that must not be read."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, row: int) -> int:
        raise AssertionError("a row was read")


def change(one: Any, other: Any) -> str | None:
    return Identity.of(one).difference(Identity.of(other))


def test_options_of_an_object_of_a_library_change_the_identity() -> None:
    class Resize:
        def __init__(self, size: int) -> None:
            self.size = size

    Resize.__module__ = "torchvision.transforms"
    assert change(Holder(transform=Resize(224)), Holder(transform=Resize(224))) is None
    assert change(Holder(transform=Resize(224)), Holder(transform=Resize(256)))


def test_replaced_image_of_a_folder_changes_the_identity(tmp_path: Path) -> None:
    root = tmp_path / "images"
    (root / "cat").mkdir(parents=True)
    for name in ("0.png", "1.png"):
        (root / "cat" / name).write_bytes(encoded(np.zeros((2, 2, 3), np.uint8)))
    dataset, before = ImageFolder(root), Identity.of(ImageFolder(root))
    assert before.difference(Identity.of(dataset)) is None
    (root / "cat" / "1.png").write_bytes(encoded(np.ones((2, 2, 3), np.uint8)))
    os.utime(root / "cat" / "1.png", ns=(1, 1))
    assert before.difference(Identity.of(dataset)) == "the files changed"
    store = tmp_path / "store"
    build_store(dataset, store, progress=False)
    (root / "cat" / "0.png").write_bytes(encoded(np.full((2, 2, 3), 7, np.uint8)))
    os.utime(root / "cat" / "0.png", ns=(2, 2))
    with pytest.raises(DatasetError, match="row 0"):
        build_store(ImageFolder(root), store, progress=False)


class Slotted:
    """A dataset whose attributes are in slots."""

    __slots__ = ("_labels", "labels")

    def __init__(self, labels: Any) -> None:
        self.labels = labels
        self._labels = labels

    def __len__(self) -> int:
        return 3


def adding(number: int) -> Any:
    return lambda row: row + number


#: Attributes that differ.
ATTRIBUTES: dict[str, tuple[Any, Any]] = {
    "array": (np.zeros(3), np.array([0, 0, 1.0])),
    "texts": (np.array(["a", "bc"], object), np.array(["ab", "c"], object)),
    "dtype": (np.zeros(3, "<i4"), np.zeros(3, "<f4")),
    "path": (Path("/a"), Path("/b")),
    "nested": ({"size": [1, {2: (3, None)}]}, {"size": [1, {2: (3, 4)}]}),
    "bytes": (b"a", b"b"),
    "memory": (memoryview(b"ab"), memoryview(b"ac")),
    "type": (None, torch.nn.ReLU()),
    "keys": ({np.int64(1): 1}, {np.int64(2): 1}),
    "deque": (deque([1, {2: 3}]), deque([1, {2: 4}])),
    "packed": (array("q", [1]), array("q", [2])),
    "object": (Slotted([1]), Slotted([2])),
    "partial": (partial(max, 1), partial(max, 2)),
    "code": (lambda row: row, lambda row: -row),
    "default": (lambda row, by=1: row * by, lambda row, by=2: row * by),
    "closure": (adding(1), adding(2)),
    "method": (Path().exists, Path().is_dir),
    "datasets by name": ({"a": Numbered(3)}, {"a": Numbered(3, 1)}),
}
CHANGED: dict[str, tuple[Any, Any, str]] = {
    "length": (Numbered(10), Numbered(11), "the length"),
    "number": (Numbered(10), Numbered(10, 1), "attribute version"),
    "class": (Numbered(10), Wrapped(Numbered(10)), "the class"),
    "within": (Wrapped(Numbered(9)), Wrapped(Numbered(9, 1)), "attribute version of dataset"),
    "subset": (Subset(Numbered(9), [1, 2]), Subset(Numbered(9), [1, 3]), "attribute indices"),
    "concatenated": (
        ConcatDataset([Numbered(2), Numbered(2)]),
        ConcatDataset([Numbered(2), Numbered(2, 1)]),
        "attribute version of datasets.1",
    ),
    "tensors": (
        TensorDataset(torch.zeros(4, 2), torch.tensor([0, 1, 2, 3])),
        TensorDataset(torch.zeros(4, 2), torch.tensor([0, 1, 2, 4])),
        "attribute tensors",
    ),
    "private": (Holder(_labels=[1, 2]), Holder(_labels=[1, 3]), "attribute _labels"),
    "slots": (Slotted([1]), Slotted([2]), "attribute labels"),
    "bare tensor": (torch.zeros(3), torch.tensor([0, 0, 1.0]), "the items"),
    "list": ([{"x": torch.zeros(2)}], [{"x": torch.ones(2)}], "the items"),
}


@pytest.mark.parametrize("kind", ATTRIBUTES)
def test_fingerprint_of_another_attribute_differs(kind: str) -> None:
    one, other = ATTRIBUTES[kind]
    assert change(Holder(a=one), Holder(a=other)) == "attribute a changed"
    assert change(Holder(a=one), Holder(a=one)) is None


@pytest.mark.parametrize("kind", CHANGED)
def test_fingerprint_of_a_changed_dataset_names_what_changed(kind: str) -> None:
    one, other, name = CHANGED[kind]
    found = change(one, other)
    assert found is not None
    assert name in found.removesuffix(" changed").split(" and ")[0].split(", ")
    assert change(one, pickle.loads(pickle.dumps(one))) is None


@pytest.mark.slow
def test_fingerprint_of_sets_is_the_same_in_every_process() -> None:
    program = """
import tests.support.without_lightning
from lightning_memmap.store.identity import Identity
class Rows(list): pass
rows = Rows([1])
rows.names, rows.by_class = {"a", "b", "c", "d"}, {0: {"e", "f", "g", "h"}}
print(Identity.of(rows).parts)
"""
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            check=True,
            capture_output=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
        ).stdout
        for seed in (1, 2)
    }
    assert len(found) == 1


def test_fingerprint_of_a_changed_class_names_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    kinds = []
    for name, value in (("before", 1), ("after", 2)):
        (tmp_path / f"{name}.py").write_text(
            "class Rows:\n"
            "    def __len__(self):\n        return 3\n\n"
            f"    def __getitem__(self, row):\n        return row * {value}\n\n"
            f"unrelated = {value}\n"
        )
        kinds.append(__import__(name).Rows)
    before, after = kinds
    assert change(before(), after()) == "the source of class Rows changed"
    # An edit elsewhere in the same file does not concern the dataset.
    text = (tmp_path / "before.py").read_text().replace("unrelated", "irrelevant")
    (tmp_path / "again.py").write_text(text)
    assert change(before(), __import__("again").Rows()) is None


@pytest.mark.parametrize("is_relative", [False, True])
def test_fingerprint_of_a_file_that_was_written_again_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_relative: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("labels.csv") if is_relative else tmp_path / "labels.csv"
    path.write_text("1,2,3")
    dataset = Holder(labels=str(path), root=str(tmp_path), split="train")
    before = Identity.of(dataset)
    (tmp_path / "store").mkdir()
    assert before.difference(Identity.of(dataset)) is None
    path.write_text("1,2,4")
    os.utime(path, ns=(1, 1))
    assert before.difference(Identity.of(dataset)) == "the file of attribute labels changed"


def test_fingerprint_is_not_changed_by_what_reading_leaves_behind(tmp_path: Path) -> None:
    unread = Holder(root="/data", file=None, _file=None, _cache={}, lock=None)
    with open(tmp_path / "file", "wb") as file:
        read = Holder(root="/data", file=file, _file=file, _cache={1: 2}, lock=None)
        vars(read)["_length"] = 7
        assert change(unread, read) is None
        assert change(read, unread) is None


def test_fingerprint_of_anything_odd_is_made_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_HASHED_BYTES", 100)
    monkeypatch.setattr(module, "_MAX_ITEMS", 10)
    circle: list[Any] = []
    circle.append(circle)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    large = np.zeros(3 * 2**20, np.uint8)
    odd = Holder(circle=circle, deep=deep, keys={(1, 2): 3}, large=large, many=list(range(99)))
    odd.myself = odd  # type: ignore[attr-defined]
    odd.one, odd.lock = SimpleNamespace(), threading.Lock()  # type: ignore[attr-defined]
    odd.one.other = SimpleNamespace(other=odd.one)  # type: ignore[attr-defined]
    assert change(odd, odd) is None
    assert change(Holder(large=large), Holder(large=large + 1)) == "attribute large changed"
    many = Holder(**{f"a{index}": index for index in range(3000)})
    assert len(Identity.of(many).parts) <= 513


@given(st.dictionaries(texts(20), texts(20)), st.none() | texts(20))
def test_identity_comes_back_from_json(parts: dict[str, str], given: str | None) -> None:
    identity = Identity(parts, given)
    again = msgspec.convert(msgspec.to_builtins(identity), Identity)
    assert again == identity
    assert again.difference(identity) is None
