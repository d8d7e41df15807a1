"""The command line on encoded images: built, trained, and looked at by class path."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_memmap import TarDataset, open_store
from lightning_memmap.cli import main
from lightning_memmap.compare.prepare import prepare_store
from lightning_memmap.compare.variant_data import comparable_datamodule
from lightning_memmap.data.module import MemmapDataModule
from tests.store.sources.test_tar_dataset import FIELDS, image_members, write_tar
from tests.support.datasets import DECODE, HEIGHT, WIDTH, EncodedImages
from tests.support.preloaded import run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve random images of two classes."""
    for row in range(12):
        path = tmp_path / "in" / ("cat", "dog")[row % 2] / f"{row:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(EncodedImages(12)[row]["image"])
    return tmp_path / "in"


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main([*map(str, arguments)])
    found = capsys.readouterr()
    assert end.value.code in (0, None), found.err
    return found.out


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_folder_is_stored_encoded_and_shown(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s"
    out = command(
        capsys, "store", "build", path, "--dataset", "lightning_memmap.ImageFolder",
        "--dataset.root", folder, "--dataset.mode", "null",
    )  # fmt: skip
    assert "2 classes: cat, dog" in out
    assert open_store(path).num_rows == 12
    page = tmp_path / "store.html"
    command(capsys, "store", "show", path, "--out", page)
    assert page.read_text().count("data:image/png") == 12
    assert f"{HEIGHT} x {WIDTH} x 3, encoded in" in page.read_text()


def write_config(path: Path, dataset: dict[str, Any], decode: dict[str, Any]) -> Path:
    options = {
        "train_dataset": dataset,
        "store_dir": str(path / "stores"),
        "batch_size": 4,
        "decode": decode,
    }
    trainer = {
        "strategy": "memmap_superbatch",
        "devices": 2,
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    config = {
        "model": {"class_path": "tests.support.models.Brightness"},
        "data": {"class_path": "lightning_memmap.MemmapDataModule", "init_args": options},
        "trainer": trainer,
    }
    (path / "train.yaml").write_text(yaml.safe_dump(config))
    return path / "train.yaml"


@pytest.mark.slow
def test_config_trains_on_tar_files_and_their_rows_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tar(tmp_path / "ds-0.tar", image_members(0, 30))
    dataset = {
        "class_path": "lightning_memmap.TarDataset",
        "init_args": {"tars": str(tmp_path / "ds-{0..0}.tar"), "fields": {**FIELDS, "row": "cls"}},
    }
    config = write_config(tmp_path, dataset, {"image": {}, "mask": {"mode": "L"}})
    done = run("-m", "lightning_memmap", "fit", "--config", config, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    store = open_store(tmp_path / "stores" / "train")
    assert store.num_rows == len(list(TarDataset(str(tmp_path / "ds-{0..0}.tar"))))
    page = tmp_path / "rows.html"
    command(capsys, "rows", "--config", config, "--step", 1, "--show", page)
    shown = page.read_text(encoding="utf-8")
    assert shown.count("data:image/png") == 2 * 8  # An image and its mask.
    assert "rows/00" in shown


@pytest.mark.parametrize(
    ("decode", "words"),
    [
        ({"image": {"mode": "BGR"}}, r"decode\['image'\].*mode='BGR'"),
        ({"image": {"size": [4]}}, r"decode\['image'\].*size"),
        ({"image": {"num_threads": 0}}, r"decode\['image'\].*num_threads=0"),
        ({"image": {"form": "decode"}}, r"decode\['image'\].*form"),
        ({"image": "decode"}, r"decode\['image'\]='decode'"),
        (["image"], r"decode=\['image'\]"),
    ],
)
def test_wrong_decode_is_rejected_by_name(tmp_path: Path, decode: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        MemmapDataModule(EncodedImages(4), store_dir=tmp_path, decode=decode)


def test_comparison_expects_decoded_images(tmp_path: Path) -> None:
    hashes = []
    for decoded in (False, True):
        data = MemmapDataModule(
            EncodedImages(40, decoded),
            store_dir=tmp_path / str(decoded),
            batch_size=4,
            decode=None if decoded else DECODE,
        )
        hashes.append(prepare_store(comparable_datamodule(data), 2, 4)[1])
    assert hashes[0] == hashes[1]
    assert len(set(hashes[0])) == 4
