"""``lightning-memmap store show``: a page of samples and sizes."""

import base64
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from markupsafe import escape
from PIL import Image
from torch.utils.data import Dataset

from lightning_memmap import build_store
from lightning_memmap.cli import main
from lightning_memmap.commands.store_page import Section, make_section, make_value
from lightning_memmap.schema.fields import Field
from lightning_memmap.store import Store
from lightning_memmap.tables import render_page

HOSTILE = "<script>alert(1)</script>"


class Rows(Dataset[dict[str, Any]]):
    """Rows from columns: sample ``i`` has entry ``i`` of each."""

    def __init__(self, **columns: Any) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return min(map(len, self.columns.values()))

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {name: column[row] for name, column in self.columns.items()}


def store_of(path: Path, dataset: Any = None, **columns: Any) -> Store:
    return build_store(dataset or Rows(**columns), path / "s", num_shards=2, progress=False)


def render(section: Section) -> str:
    return render_page("samples.html", sections=[section])


def rows_of(store: Store) -> list[int]:
    return [int(name.removeprefix("row ")) for name, _ in make_section("", store).samples]


def test_text_and_numbers_are_written_out_as_text(tmp_path: Path) -> None:
    tokens = [torch.arange(length) for length in (1, 2, 2, 5)]
    store = store_of(tmp_path, tokens=tokens, text=["a", "b", "<i>", "ä" * 300], raw=[b"\0<b>"] * 4)
    shown = {value.name: value.text for value in make_section("", store).samples[3][1]}
    assert shown["text"] == "ä" * 200 + "..."
    assert shown["raw"] == "b'\\x00<b>'"
    assert shown["tokens"] == "0, 1, 2, 3, 4"
    page = render(make_section("train", store))
    assert "<i>" not in page.replace("<i style", "")
    assert "<b>&#39;" not in page


def test_samples_are_spread_over_the_rows(tmp_path: Path) -> None:
    rows = rows_of(store_of(tmp_path, x=list(range(100))))
    assert len(rows) == 24
    assert (rows[0], rows[-1]) == (0, 99)
    assert max(np.diff(rows)) <= 5
    assert rows_of(store_of(tmp_path / "one", x=[1.0])) == [0]


@pytest.mark.parametrize(
    ("row", "size", "mode"),
    [
        (torch.zeros(3, 20, 30, dtype=torch.uint8), (30, 20), "RGB"),
        (torch.zeros(20, 30, 4, dtype=torch.uint8), (30, 20), "RGBA"),
        (torch.zeros(1, 20, 30), (30, 20), "L"),
        (torch.full((20, 30), float("nan")), (30, 20), "L"),
        (torch.zeros(3, 400, 800, dtype=torch.int16), (192, 96), "RGB"),
    ],
)
def test_images_are_shown(row: torch.Tensor, size: tuple[int, int], mode: str) -> None:
    address = make_value(Field("image", row.dtype, tuple(row.shape)), row).picture
    picture = Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2])))
    assert (picture.size, picture.mode) == (size, mode)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (5, 20, 20), (3, 0, 9), (2, 2, 20, 20)])
def test_other_rows_are_written_out(shape: tuple[int, ...]) -> None:
    row = torch.ones(shape)
    value = make_value(Field("x", row.dtype, shape), row)
    assert not value.picture
    assert value.text == "" if 0 in shape else "1" in value.text


def test_pixels_are_those_of_the_store(tmp_path: Path) -> None:
    image = torch.randint(256, (2, 3, 16, 24), dtype=torch.uint8)
    ((_, (first,)), _) = make_section("", store_of(tmp_path, image=image)).samples
    picture = Image.open(io.BytesIO(base64.b64decode(first.picture.partition(",")[2])))
    assert np.array_equal(np.array(picture), image[0].movedim(0, -1).numpy())


def test_page_escapes_whatever_a_store_says(tmp_path: Path) -> None:
    store = store_of(tmp_path, dataset=Hostile())
    page = render(make_section(HOSTILE, store))
    assert "<script" not in page
    assert "<img src=x" not in page
    assert page.count(str(escape(HOSTILE))) == 2
    for field in store.schema.fields:
        assert page.count(str(escape(field.name))) > 3
    # Nothing is loaded from elsewhere.
    assert not re.search(r"(src|href)=\"(?!data:image/png)", page)
    assert "@import" not in page
    assert "url(" not in page


class Hostile(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {HOSTILE: row, '"><img src=x onerror=alert(1)>': torch.zeros(3, 8, 8)}


def test_store_show_writes_a_page_of_all_splits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "val"):
        build_store(Rows(label=[1, 2, 3]), tmp_path / "all" / split, progress=False)
    out = tmp_path / "page.html"
    with pytest.raises(SystemExit) as end:
        main(["store", "show", str(tmp_path / "all"), "--out", str(out)])
    assert end.value.code == 0
    assert capsys.readouterr().out.strip() == str(out)
    page = out.read_text(encoding="utf-8")
    assert "<h1>train</h1>" in page
    assert "<h1>val</h1>" in page
    assert "3 rows" in page
    assert "24 shards" in page
