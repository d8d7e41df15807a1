"""A folder of images: classes by folder, decoded or encoded, and what is no image."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import Subset

from lightning_memmap import ImageFolder, build_store, open_store
from lightning_memmap.errors import DatasetError
from tests.support.datasets import EncodedImages, encoded, icons, photographs, plain
from tests.support.store.layout import fail_to_list

NAMES = ["zero", "one", "two"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits of scikit-learn as PNG files in folders of their class."""
    root = tmp_path_factory.mktemp("digits") / "digits"
    found: Any = load_digits(n_class=3)
    for index, (image, label) in enumerate(zip(found.images, found.target, strict=True)):
        path = root / NAMES[label] / f"{index:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded((image * 15).astype(np.uint8)))
    return root


def test_rows_are_the_images_of_each_class_in_the_order_of_names(digits: Path) -> None:
    dataset = ImageFolder(digits, "L")
    assert dataset.classes == sorted(NAMES)
    assert len(dataset) == len(dataset.files) == 537
    expected = sorted(path.relative_to(digits).as_posix() for path in digits.glob("*/*.png"))
    assert dataset.files == expected
    for row in (0, 200, 536, -1):
        sample, path = dataset[row], digits / expected[row]
        assert torch.equal(sample["image"], plain(path.read_bytes(), "L"))
        assert dataset.classes[sample["label"]] == path.parent.name
    with pytest.raises(IndexError):
        dataset[537]


def test_store_has_the_names_of_the_classes(digits: Path, tmp_path: Path) -> None:
    dataset = ImageFolder(digits, "L")
    for name, given in (("all", dataset), ("some", Subset(dataset, [3, 2]))):
        build_store(given, tmp_path / name, progress=False)
        assert open_store(tmp_path / name).classes == tuple(dataset.classes)
    rows = type("Rows", (list,), {})([{"x": 1}])
    for number, classes in enumerate(("text", ["a", 1], ["a\x1b"], ["a" * 1000], None, 5)):
        rows.classes = classes  # No names of classes.
        assert build_store(rows, tmp_path / str(number), progress=False).classes == ()


def test_store_has_the_names_of_the_one_column_of_labels(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    label = datasets.ClassLabel(names=["ant", "bee"])
    for name, columns in (("one", "x"), ("two", "xy"), ("none", "")):
        rows = {"n": [1, 2], **{each: [1, 0] for each in columns}}
        features = datasets.Features(
            {"n": datasets.Value("int64"), **dict.fromkeys(columns, label)}
        )
        given = datasets.Dataset.from_dict(rows, features=features)
        store = build_store(given, tmp_path / name, progress=False)
        assert store.classes == (("ant", "bee") if name == "one" else ())


def test_photographs_and_icons_are_scaled_to_one_size(tmp_path: Path) -> None:
    for path in (*photographs(), *icons()):
        folder = tmp_path / "in" / ("photo" if path.suffix == ".jpg" else "icon") / "deeper"
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder)
    dataset = ImageFolder(tmp_path / "in", "RGBA", size=(20, 30))
    assert dataset.classes == ["icon", "photo"]
    store = build_store(dataset, tmp_path / "s", progress=False)
    assert store.schema.fields[0].shape == (4, 20, 30)
    assert store.values("label").tolist() == [0] * len(icons()) + [1] * len(photographs())


def test_hidden_files_links_and_other_endings_are_left_out(tmp_path: Path) -> None:
    image = encoded(np.zeros((2, 2, 3), np.uint8))
    for name in [
        "a/1.PNG",
        "a/._1.png",
        "a/notes.txt",
        "a/.thumbs/1.png",
        ".git/1.png",
        "b/x/2.png",
    ]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
    (tmp_path / "c.png").write_bytes(image)
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    assert ImageFolder(tmp_path).files == ["a/1.PNG", "b/x/2.png"]
    with pytest.raises(ValueError, match="mode='P'"):
        ImageFolder(tmp_path, "P")


@pytest.mark.parametrize("mode", ["RGB", None])
@pytest.mark.parametrize("data", [b"", b"no image", EncodedImages(2)[1]["image"][:150]])
def test_broken_file_is_named_when_the_store_is_built(
    tmp_path: Path, data: bytes, mode: str | None
) -> None:
    for row in range(30):
        path = tmp_path / "in" / "a" / f"{row:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if row == 11 else encoded(np.zeros((4, 4, 3), np.uint8)))
    with pytest.raises(DatasetError, match=r"row 11: ImageError: .*/in/a/11\.png: it .*repair or"):
        build_store(ImageFolder(tmp_path / "in", mode), tmp_path / "s", progress=False)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"root": "missing"}, FileNotFoundError, "there is no such folder"),
        ({"root": "."}, ValueError, "it has no folders"),
        ({"root": "..", "mode": "BGR"}, ValueError, "mode='BGR': choose one of RGB"),
        ({"root": "..", "mode": None, "size": 4}, ValueError, r"size=4 with mode=None"),
        ({"root": "..", "size": 0}, ValueError, "size=0"),
        ({"root": ".."}, ValueError, "class 'empty' has no images"),
    ],
)
def test_arguments_that_cannot_be_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(error, match=words):
        ImageFolder(**arguments)


def test_folder_that_cannot_be_listed_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("cat/a", "cat/b"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "0.png").write_bytes(encoded(np.zeros((2, 2, 3), np.uint8)))
    assert len(ImageFolder(tmp_path)) == 2
    fail_to_list(monkeypatch, tmp_path / "cat" / "b")
    with pytest.raises(OSError, match=str(tmp_path / "cat" / "b")):
        ImageFolder(tmp_path)
