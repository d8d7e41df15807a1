"""What a dataset gives comes back from its store, with every value."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_memmap import build_store
from lightning_memmap.errors import SchemaError

#: Modes whose images are their pixels and nothing else.
MODES = (
    "1", "L", "LA", "La", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "F",
    "I;16", "I;16L", "I;16B", "I;16N",
)  # fmt: skip


def noise(mode: str, row: int) -> Image.Image:
    """An image of any bytes, 5 wide and 3 high."""
    size = len(Image.new(mode, (5, 3)).tobytes())
    values = np.random.default_rng(row).integers(0, 255, size, np.uint8)
    return Image.frombytes(mode, (5, 3), values.tobytes())


def read_back(path: Path, rows: list[Any]) -> list[Any]:
    store = build_store(rows, path, progress=False)
    return [store[row] for row in range(len(rows))]


def test_image_of_every_mode_comes_back_as_numpy_has_it(tmp_path: Path) -> None:
    rows = [[noise(mode, row) for mode in MODES] for row in range(3)]
    for found, images in zip(read_back(tmp_path / "store", rows), rows, strict=True):
        for pixels, image in zip(found, images, strict=True):
            expected = np.asarray(image)
            channels_last = expected if expected.ndim == 3 else expected[..., None]
            has_nan = image.mode == "F"
            assert np.array_equal(
                pixels.movedim(0, -1).numpy(), channels_last, equal_nan=has_nan
            ), image.mode


@pytest.mark.parametrize("mode", ["P", "PA"])
def test_image_with_a_palette_is_refused_at_its_row_with_the_way_out(
    tmp_path: Path, mode: str
) -> None:
    grey, coloured = Image.new("L", (5, 3)), Image.new(mode, (5, 3))
    message = rf"row 9, field 'image': found an image of mode '{mode}'.*convert\('RGB'\)"
    with pytest.raises(SchemaError, match=message):
        build_store([{"image": grey}] * 9 + [{"image": coloured}], tmp_path / "store")


def test_arrays_and_tensors_of_every_kind_come_back_with_their_values(tmp_path: Path) -> None:
    complex_tensor = torch.tensor([1 + 2j, 3 - 1j])
    rows = [
        {
            "big-endian": np.arange(3, dtype=">f4") + row,
            "big-endian scalar": np.arange(3, dtype=">i8")[row],
            "0-d array": np.array(row, np.uint16),
            "big-endian complex": np.array([row + 1j], ">c8"),
            "strided": (np.arange(12).reshape(3, 4) + row)[::-1, ::-2],
            "fortran order": np.asfortranarray(np.arange(12).reshape(3, 4) + row),
            "read-only": np.broadcast_to(np.int32(row), (3, 6)),
            "transposed": torch.arange(6).reshape(2, 3).T + row,
            "expanded": torch.tensor([row]).expand(4),
            "one strided element": torch.arange(9.0)[row::3][:1],
            "strided number": torch.fft.fft(torch.ones(1)).real,
            "conjugate": complex_tensor.conj() * row,
            "lazy conjugate": complex_tensor.conj(),
            "negative": complex_tensor.conj().imag,
            "parameter": torch.nn.Parameter(torch.full((2,), 0.1 + row)),
            "bfloat16": torch.full((2,), 0.1 + row).bfloat16(),
            "uint16": torch.tensor([2**16 - 1 - row], dtype=torch.uint16),
            "uint32": torch.tensor([2**32 - 1 - row], dtype=torch.uint32),
            "uint64": np.array([2**64 - 1 - row], np.uint64),
            "not a number": torch.tensor([float("nan"), -0.0, float("inf")]),
        }
        for row in range(3)
    ]
    for found, given in zip(read_back(tmp_path / "store", rows), rows, strict=True):
        for name, value in given.items():
            if isinstance(value, torch.Tensor):
                expected = value.detach().resolve_conj().resolve_neg()
            else:
                expected = torch.from_numpy(
                    np.array(value, value.dtype.newbyteorder("="), order="C")
                )
            assert found[name].dtype == expected.dtype, name
            assert found[name].shape == expected.shape, name
            one, other = (
                each.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
                for each in (found[name], expected)
            )
            assert torch.equal(one, other), name


def test_error_names_the_field_that_differs_and_none_that_may_be_none(tmp_path: Path) -> None:
    rows = [
        {"maybe": None if row % 5 == 0 else "yes", "mixed": 3 if row % 10 == 0 else "x"}
        for row in range(1, 400)
    ]
    with pytest.raises(SchemaError, match=r"row \d+, field 'mixed': found int64 .*expected uint8"):
        build_store(rows, tmp_path / "s", progress=False)
    for each in rows:
        each["mixed"] = "x"
    build_store(rows, tmp_path / "s", progress=False)


def test_advice_for_a_late_row_that_is_longer_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [(row,) * (3 if row == 37 else 2) for row in range(60)]
    with pytest.raises(SchemaError, match=r"row 37, the sample.*variable=\['value'\]"):
        build_store(rows, tmp_path / "store", progress=False)
    store = build_store(rows, tmp_path / "store", variable=["value"], progress=False)
    assert [len(store[row]) for row in (36, 37, 38)] == [2, 3, 2]
    assert "it has field '0'=int64 (), and this one field '0'=None" in caplog.text
