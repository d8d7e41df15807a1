"""Images: the bytes of a JPEG, PNG or other file as uint8 pixels, and rows as pixels to show.

Pillow is imported when the first image is decoded.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_memmap.errors import describe_error
from lightning_memmap.image_crop import decode_crop

#: The channels of each mode.
CHANNELS = {"RGB": 3, "RGBA": 4, "L": 1}
#: Endings of the names of image files.
EXTENSIONS = (
    ".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff",
)  # fmt: skip
#: Formats that Pillow decodes by itself. For others, such as EPS, it starts programs.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM", "TIFF")
#: A file of a few bytes can claim any number of pixels.
MAX_PIXELS = 2**26
_ORIENTATION = 0x0112
#: A row of two dimensions that is smaller is a table of numbers rather than an image.
_MIN_PIXELS = 5


class ImageError(ValueError):
    """An image cannot be decoded in this mode or size. The message has the reason."""


class ImageSizeError(ImageError):
    """An image differs in size from the first one."""


class ImageMissingError(ImageError):
    """A value is None or an empty file instead of an image."""


def check_mode(mode: object) -> None:
    """Check the mode that images are decoded to."""
    if mode not in CHANNELS:
        raise ValueError(f"mode={mode!r}: choose one of {', '.join(CHANNELS)}")


def parse_size(size: Any) -> tuple[int, int] | None:
    """Read the size that images are scaled to: height and width, or one number for both."""
    if size is None:
        return None
    both = (size, size) if isinstance(size, int) else size
    is_pair = isinstance(both, (tuple, list)) and len(both) == 2
    if not is_pair or any(type(pixels) is not int or pixels < 1 for pixels in both):
        raise ValueError(f"size={size!r}: must be height and width in pixels, such as (224, 224)")
    if both[0] * both[1] > MAX_PIXELS:
        raise ValueError(f"size={size!r}: must be at most {MAX_PIXELS} pixels")
    return both[0], both[1]


def parse_decoding(mode: object, size: Any) -> tuple[int, int] | None:
    """Check the mode and read the size of a dataset's images, which may stay encoded."""
    if mode is not None:
        check_mode(mode)
    elif size is not None:
        raise ValueError(
            f"size={size!r} with mode=None: images stay encoded. Set a mode, or pass the size to"
            " Decode(size=...), which decodes them"
        )
    return parse_size(size)


def decode_image(
    source: bytes | NDArray[np.uint8] | Path,
    mode: str,
    size: tuple[int, int] | None = None,
    shape: tuple[int, ...] | None = None,
    # Receives the scale, and x and y of the upright image's corner in the result.
    place: NDArray[np.float32] | None = None,
    # Random numbers of a random-resized crop; see `choose_box`.
    draws: Sequence[Sequence[float]] | None = None,
) -> NDArray[np.uint8]:
    """Decode an image, turned upright if its EXIF orientation says how it was taken."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise ImportError(
            "images are decoded by Pillow: pip install 'lightning_memmap[images]'"
        ) from error
    if not isinstance(source, Path) and not len(source):
        raise ImageMissingError("it is None or an empty file")
    data = source.data if isinstance(source, np.ndarray) else source
    file: Any = data if isinstance(data, Path) else io.BytesIO(data)
    try:
        with Image.open(file, formats=_FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise ImageError(f"its {width} x {height} pixels are more than {MAX_PIXELS}")
            if size is None and shape is not None and {width, height} != {*shape[1:]}:
                raise _size_error((height, width), shape)
            if draws is not None:
                assert size is not None
                _check_depth(image)
                return _to_array(decode_crop(image, data, mode, size, draws), shape)
            return _pixels(image, mode, size, shape, place)
    except UnidentifiedImageError as error:
        raise ImageError(f"it isn't an image of a known format ({', '.join(_FORMATS)})") from error
    except (ImageError, FileNotFoundError):
        raise
    except Exception as error:  # Each format has its own errors for damaged files.
        raise ImageError(f"it cannot be decoded ({describe_error(error)})") from error


def _pixels(
    image: Any,
    mode: str,
    size: tuple[int, int] | None,
    shape: tuple[int, ...] | None,
    place: NDArray[np.float32] | None,
) -> NDArray[np.uint8]:
    from PIL import Image, ImageOps

    _check_depth(image)
    image.load()
    if image.getexif().get(_ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if mode != image.mode:
        if mode != "RGBA":
            # Otherwise Pillow warns that transparency is lost.
            image.info.pop("transparency", None)
        image = image.convert(mode)
    if place is not None:
        width, height = image.size
        scale = 1.0 if size is None else max(size[0] / height, size[1] / width)
        rows, columns = size or (height, width)
        place[:] = scale, (columns - scale * width) / 2, (rows - scale * height) / 2
    if size is not None and image.size != size[::-1]:
        image = ImageOps.fit(image, size[::-1], Image.Resampling.BILINEAR)
    return _to_array(image, shape)


def _check_depth(image: Any) -> None:
    """Check that 8 bits are enough for the values of an image."""
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        raise ImageError(
            f"its mode {image.mode!r} has more than 8 bits, which would be lost. Store it decoded"
        )


def _to_array(image: Any, shape: tuple[int, ...] | None) -> NDArray[np.uint8]:
    """Convert an image of Pillow to (channels, height, width), and check its shape."""
    pixels: NDArray[np.uint8] = np.asarray(image)
    pixels = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    if shape is not None and pixels.shape != shape:
        raise _size_error(pixels.shape[1:], shape)
    return pixels


def _size_error(size: tuple[int, ...], shape: tuple[int, ...]) -> ImageSizeError:
    return ImageSizeError(
        f"it has {size[0]} x {size[1]} pixels, but the first image has {shape[1]} x {shape[2]}"
    )


def row_to_pixels(row: Tensor) -> NDArray[np.uint8] | None:
    """Convert a row with the shape of an image to pixels; return None for any other row."""
    if row.is_complex() or row.dim() not in (2, 3) or 0 in row.shape:
        return None
    if row.dim() == 2:
        if min(row.shape) < _MIN_PIXELS:
            return None
        row = row[None]
    if row.shape[0] in (1, 3, 4):
        row = row.movedim(0, -1)
    if row.shape[-1] not in (1, 3, 4):
        return None
    numbers = row.double()
    if row.dtype != torch.uint8:
        numbers = numbers.nan_to_num(0.0, 0.0, 0.0)
        low = numbers.min()
        high = numbers.max()
        numbers = (numbers - low) * (255 / (high - low if high > low else 1))
    pixels: NDArray[np.uint8] = numbers.numpy().astype(np.uint8)
    return pixels
