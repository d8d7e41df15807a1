"""Random-resized crops of encoded images: where they are, and what is decoded of them."""

import importlib.util
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn  # noqa: F401  # Sets environment variables when it is imported.
import torch
from PIL import Image, ImageOps
from scipy import stats

from lightning_memmap import MemmapDataModule, image_crop
from lightning_memmap.errors import DatasetError
from lightning_memmap.image_crop import Box, choose_box
from lightning_memmap.images import decode_image
from lightning_memmap.loading.row_random import RowRandom
from lightning_memmap.schema import Decode
from lightning_memmap.schema.forms import use_center_crops
from tests.support.datasets import Wrapped, photographs
from tests.support.models import Brightness, make_trainer, set_up

DECODERS = [
    pytest.param(
        True,
        id="simplejpeg",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("simplejpeg") is None, reason="simplejpeg isn't installed"
        ),
    ),
    pytest.param(False, id="pillow"),
]
#: A box of the upper left part: a quarter of the area, and width / height 1.
QUARTER = [[(0.25 - 0.08) / 0.92, 0.5, 0.0, 0.0]] * 10


def draws(rows: int, seed: int = 0) -> list[Any]:
    numbers: list[Any] = RowRandom(range(rows), seed=seed).uniform(*image_crop.DRAWS).tolist()
    return numbers


def photo(size: tuple[int, int], kind: str = "JPEG", mode: str = "RGB", **options: Any) -> bytes:
    file = io.BytesIO()
    with Image.open(photographs()[0]) as image:
        image.resize(size, Image.Resampling.LANCZOS).convert(mode).save(file, kind, **options)
    return file.getvalue()


class TestBox:
    @pytest.mark.parametrize("size", [(60, 80), (500, 333), (7, 5), (1, 1)])
    def test_box_is_inside_and_has_a_drawn_area_and_ratio(self, size: tuple[int, int]) -> None:
        height, width = size
        boxes = [choose_box(each, height, width) for each in draws(2000)]
        for box in boxes:
            assert box.height >= 1 <= box.width
            assert 0 <= box.top <= height - box.height
            assert 0 <= box.left <= width - box.width
        if height < 50:
            return
        areas = np.array([box.height * box.width for box in boxes]) / (height * width)
        ratios = np.array([box.width / box.height for box in boxes])
        # Sides are rounded to pixels.
        assert 0.07 < areas.min() < 0.12 < 0.85 < areas.max() <= 1
        assert 0.72 < ratios.min() < 0.76 < 1.3 < ratios.max() < 1.38
        # Small boxes always fit, so their place is uniform.
        small = [box for box in boxes if box.height * box.width < 0.3 * height * width]
        for place in (
            [(box.top + 0.5) / (height - box.height + 1) for box in small],
            [(box.left + 0.5) / (width - box.width + 1) for box in small],
        ):
            assert stats.kstest(place, "uniform").pvalue > 1e-4

    @pytest.mark.parametrize(
        ("size", "box"),
        [
            ((1000, 10), Box(493, 0, 13, 10)),
            ((10, 1000), Box(0, 493, 10, 13)),
        ],
    )
    def test_box_of_a_long_image_is_in_its_centre(self, size: tuple[int, int], box: Box) -> None:
        # A large area does not fit.
        assert choose_box([[0.9, 0.5, 0.3, 0.3]] * 10, *size) == box

    def test_first_box_that_fits_is_taken(self) -> None:
        large, small = [1.0, 1.0, 0.0, 0.0], [0.1, 0.5, 0.999999, 0.0]
        box = choose_box([large, small, [0.0] * 4], 50, 60)
        assert box.top + box.height == 50
        assert box.left == 0
        area = 50 * 60 * (0.08 + 0.1 * 0.92)
        assert box.height == box.width == round(area**0.5)


def expected_crop(data: bytes, mode: str, size: tuple[int, int], numbers: Any) -> np.ndarray:
    """The crop of the whole image, decoded and upright."""
    with Image.open(io.BytesIO(data)) as file:
        image = ImageOps.exif_transpose(file).convert(mode)
    box = choose_box(numbers, image.height, image.width)
    corner = box.left + box.width, box.top + box.height
    part = image.resize(size[::-1], Image.Resampling.BILINEAR, (box.left, box.top, *corner))
    return np.asarray(part if mode != "L" else part.convert("L"))


@pytest.mark.parametrize("is_turbo", DECODERS)
class TestDecoding:
    @pytest.fixture(autouse=True)
    def _choose_decoder(self, is_turbo: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        if not is_turbo:
            monkeypatch.setattr(image_crop, "_turbo_decoder", lambda: None)

    @pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
    @pytest.mark.parametrize("size", [(64, 64), (30, 50), (300, 200)])
    @pytest.mark.parametrize(
        "stored", [{"kind": "JPEG"}, {"mode": "L"}, {"mode": "CMYK"}, {"kind": "PNG"}]
    )
    def test_crop_is_that_of_the_whole_image(
        self, mode: str, size: tuple[int, int], stored: dict[str, Any]
    ) -> None:
        data = photo((400, 300), **stored)
        for numbers in draws(12, seed=1):
            found = decode_image(data, mode, size, None, None, numbers)
            expected = expected_crop(data, mode, size, numbers)
            difference = found.transpose(1, 2, 0).astype(float).squeeze() - expected
            # A part of a JPEG is smoothed by another filter.
            limit = 1e-9 if stored.get("kind") == "PNG" else 6
            assert np.abs(difference).mean() < limit
        assert expected.std() > 10

    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_crop_is_upright(self, orientation: int) -> None:
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = photo((400, 300), exif=exif)
        numbers = QUARTER
        found = decode_image(data, "RGB", (40, 60), None, None, numbers).transpose(1, 2, 0)
        expected = expected_crop(data, "RGB", (40, 60), numbers)
        assert np.abs(found.astype(float) - expected).mean() < 6

    def test_no_more_is_decoded_than_needed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sizes = list[tuple[int, int]]()
        plain = Image.Image.resize

        def noted(image: Any, *arguments: Any) -> Any:
            sizes.append(image.size)
            return plain(image, *arguments)

        data = photo((800, 600))
        monkeypatch.setattr(Image.Image, "resize", noted)
        # The box has half of the height and as many columns: 346 x 346 pixels.
        for size, decoded in (
            ((300, 300), (800, 600)),
            ((173, 173), (400, 300)),
            ((174, 174), (800, 600)),
            ((60, 60), (200, 150)),
            ((40, 40), (100, 75)),
            ((500, 500), (800, 600)),
        ):
            decode_image(data, "RGB", size, None, None, QUARTER)
            assert sizes.pop() == decoded

    def test_damaged_image_raises_with_its_row(self, tmp_path: Path) -> None:
        files = [photo((60, 50)) for _ in range(24)]
        files[7] = files[7][:400]
        data = MemmapDataModule(
            stored(files),
            store_dir=tmp_path,
            batch_size=8,
            decode={"image": Decode(size=16, crop="random_resized")},
        )
        set_up(data, "fit")
        with pytest.raises(DatasetError, match="'image', row 7"):
            list(data.train_dataloader())


def stored(files: list[bytes]) -> Wrapped:
    return Wrapped([{"row": row, "image": data, "copy": data} for row, data in enumerate(files)])


@pytest.fixture(scope="module")
def files() -> list[bytes]:
    """Images of many sizes and formats."""
    return [photo((40 + row, 90 - row), "PNG" if row % 5 == 0 else "JPEG") for row in range(48)]


class Noting(Brightness):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[int, int], bytes] = {}
        self.evaluated: dict[int, bytes] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert torch.equal(batch["image"], batch["copy"])
        for row, image in zip(batch["row"].tolist(), batch["image"], strict=True):
            self.found[self.current_epoch, row] = image.numpy().tobytes()
        return self.net(batch["image"].float().flatten(1)[:, :4] / 255).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for row, image in zip(batch["row"].tolist(), batch["image"], strict=True):
            self.evaluated[row] = image.numpy().tobytes()


def fit(path: Path, files: list[bytes], strategy: str, devices: int, **options: Any) -> Noting:
    decode = Decode(size=(12, 16), crop="random_resized")
    data = MemmapDataModule(
        stored(files),
        stored(files[:6]),
        store_dir=path / "stores",
        batch_size=12 // devices,
        decode={"image": decode, "copy": decode},
        **options,
    )
    module = Noting()
    trainer = make_trainer(path, strategy=strategy, devices=devices, max_epochs=2)
    trainer.fit(module, data)
    return module


def test_row_is_cropped_alike_on_any_number_of_devices(tmp_path: Path, files: list[bytes]) -> None:
    runs = [
        fit(tmp_path, files, "auto", 1),
        fit(tmp_path, files, "memmap_superbatch", 2, transform=lambda batch: batch),
        fit(tmp_path, files, "memmap_superbatch", 4),
        fit(tmp_path, files, "memmap_dp", 2, shuffle=False),
    ]
    assert all(run.found == runs[0].found for run in runs)
    found = runs[0].found
    assert len(found) == 96
    assert sum(found[0, row] != found[1, row] for row in range(48)) > 44
    # Batches that are evaluated have the centre.
    for row, pixels in runs[0].evaluated.items():
        assert pixels == np.ascontiguousarray(decode_image(files[row], "RGB", (12, 16))).tobytes()
    assert len(runs[0].evaluated) == 6


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Decode(size=8, crop="random"), "crop='random'"),
        (lambda: Decode(crop="random_resized"), "size=None"),
        (lambda: Decode(size=8, crop="random_resized", with_scale=True), "with_scale=True"),
    ],
)
def test_invalid_crop_raises(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_center_crops_replaces_random_crops_alone() -> None:
    decode = {"image": Decode(size=8, crop="random_resized"), "mask": Decode(mode="L", size=4)}
    assert use_center_crops(decode) == {"image": Decode(size=8), "mask": Decode(mode="L", size=4)}
