"""Decoding of images: modes, sizes, orientation, and files that are none."""

import io
import struct
import sys
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lightning_memmap.images import (
    CHANNELS,
    MAX_PIXELS,
    ImageError,
    ImageSizeError,
    decode_image,
    parse_size,
)
from tests.support.datasets import encoded, icons, photographs, plain


def saved(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)  # type: ignore[arg-type]
    return file.getvalue()


@given(
    height=st.integers(1, 20),
    width=st.integers(1, 20),
    kept=st.sampled_from(["L", "RGB", "RGBA", "P", "1", "LA", "CMYK"]),
    mode=st.sampled_from(["L", "RGB", "RGBA"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_mode_is_converted_as_pillow_does(
    height: int, width: int, kept: str, mode: str, seed: int
) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).convert(kept)
    data = saved(image, "TIFF" if kept == "CMYK" else "PNG")
    found = decode_image(data, mode)
    assert found.shape == (CHANNELS[mode], height, width)
    assert found.dtype == np.uint8
    assert torch.equal(torch.tensor(found), plain(data, mode))
    assert np.array_equal(
        decode_image(np.frombuffer(data, np.uint8), mode, None, found.shape), found
    )


@pytest.mark.parametrize("path", [*photographs(), *icons()[:6]], ids=lambda path: path.name)
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_files_of_other_packages_are_decoded_as_pillow_does(path: Path, mode: str) -> None:
    expected = plain(path.read_bytes(), mode)
    assert torch.equal(torch.tensor(decode_image(path.read_bytes(), mode)), expected)
    assert torch.equal(torch.tensor(decode_image(path, mode)), expected)


def test_transparency_is_left_out_or_kept() -> None:
    pixels = np.zeros((2, 2, 4), np.uint8)
    pixels[..., 0], pixels[0, :, 3] = 200, 255
    data = encoded(pixels)
    assert decode_image(data, "RGB").tolist() == [[[200] * 2] * 2, [[0] * 2] * 2, [[0] * 2] * 2]
    assert decode_image(data, "RGBA")[3].tolist() == [[255, 255], [0, 0]]


@pytest.mark.parametrize("transparency", [1, bytes([255, 0, 100])])
def test_palette_becomes_its_colours(transparency: int | bytes) -> None:
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8), "P")
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    data = saved(image, transparency=transparency)
    assert decode_image(data, "RGB")[:, 0].T.tolist() == [[10, 20, 30], [40, 50, 60], [70, 80, 90]]
    alpha = [255, 0, 255] if transparency == 1 else [255, 0, 100]
    assert decode_image(data, "RGBA")[3].tolist() == [alpha]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_image_is_upright_whatever_its_orientation(orientation: int) -> None:
    upright = np.zeros((16, 24, 3), np.uint8)
    upright[:8, :8] = 255
    image = Image.fromarray(upright)
    turned = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    for kind in ("PNG", "JPEG"):
        data = saved(image if turned is None else image.transpose(turned), kind, exif=exif)
        found = decode_image(data, "RGB", None, (3, 16, 24))
        assert (found > 127).tolist() == (upright.transpose(2, 0, 1) > 127).tolist()


@given(
    height=st.integers(1, 40), width=st.integers(1, 40), size=st.tuples(*[st.integers(1, 20)] * 2)
)
def test_scaled_image_has_the_size_that_is_asked_for(
    height: int, width: int, size: tuple[int, int]
) -> None:
    found = decode_image(encoded(np.full((height, width, 3), 77, np.uint8)), "RGB", size)
    assert found.shape == (3, *size)
    assert (found == 77).all()


def test_scaled_image_is_its_middle_and_not_distorted() -> None:
    pixels = np.zeros((30, 90), np.uint8)
    pixels[:, 30:60] = 255
    found = decode_image(encoded(pixels), "L", (10, 10))
    # What lies beside it counts at its edges, as in any scaling.
    assert (found[..., 1:-1] == 255).all()
    assert (found > 200).all()


@pytest.mark.parametrize(
    ("given_size", "size"), [(None, None), (8, (8, 8)), ([4, 5], (4, 5)), ((4, 5), (4, 5))]
)
def test_size_is_one_number_or_two(given_size: object, size: object) -> None:
    assert parse_size(given_size) == size


@pytest.mark.parametrize(
    "size", [0, -1, (4,), (4, 5, 6), (4, 0), "8", 4.0, (True, 4), (2**20, 2**20)]
)
def test_other_sizes_are_refused(size: object) -> None:
    with pytest.raises(ValueError, match=r"^size="):
        parse_size(size)


def png_that_claims(height: int, width: int) -> bytes:
    """A PNG file of a few bytes with a header of any size."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(b"\0" * 100))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + data + chunk(b"IEND", b"")


def test_file_that_claims_many_pixels_is_refused_before_it_is_decoded() -> None:
    assert MAX_PIXELS < 8200**2
    for height, width in ((8200, 8200), (2**31 - 1, 2**31 - 1), (1, 2**31 - 1)):
        with pytest.raises(ImageError, match=r"pixels are more than|DecompressionBomb"):
            decode_image(png_that_claims(height, width), "RGB")
    with pytest.raises(ImageSizeError, match=r"5000 x 4000 .* 4 x 4"):
        decode_image(png_that_claims(5000, 4000), "RGB", None, (3, 4, 4))


@given(
    kind=st.sampled_from(["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM"]),
    cut=st.integers(0, 400),
    changes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4),
)
def test_damaged_file_is_an_error_of_this_package_or_an_image(
    kind: str, cut: int, changes: list[tuple[int, int]]
) -> None:
    data = bytearray(encoded(np.arange(192, dtype=np.uint8).reshape(8, 8, 3), kind))
    for place, value in changes:
        if place < len(data):
            data[place] = value
    if cut < len(data):
        del data[cut:]
    with suppress(ImageError):
        assert decode_image(bytes(data), "RGB").shape[0] == 3


def test_values_of_more_than_8_bits_are_refused() -> None:
    data = saved(Image.fromarray(np.full((2, 2), 60_000, np.uint16)))
    with pytest.raises(ImageError, match="more than 8 bits"):
        decode_image(data, "L")


def test_missing_pillow_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning_memmap\[images\]'"):
        decode_image(b"", "RGB")
