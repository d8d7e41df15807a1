"""Random-resized crops: where they are, and images decoded only as large as a crop needs.

A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size, which skips most of the work. libjpeg-turbo,
through the package ``simplejpeg``, decodes faster than Pillow, which is used without that package.
libjpeg-turbo knows other eighths too, but at these it is slower than at the full size.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Range of the area of a crop, as a fraction of the image.
_SCALE = 0.08, 1.0
#: Range of width / height of a crop.
_RATIO = 3 / 4, 4 / 3
#: Crops that are drawn until one fits, each from four numbers.
DRAWS = 10, 4
_EXIF_ORIENTATION = 0x0112


class Box(NamedTuple):
    """A part of an upright image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def choose_box(draws: Sequence[Sequence[float]], height: int, width: int) -> Box:
    """Choose the crop of an image, as ``RandomResizedCrop`` of torchvision does.

    Args:
        draws: Numbers in [0, 1) of shape `DRAWS`.
        height: Height of the image in pixels.
        width: Width of the image in pixels.
    """
    low, high = (math.log(ratio) for ratio in _RATIO)
    for scale, ratio, top, left in draws:
        area = height * width * (_SCALE[0] + scale * (_SCALE[1] - _SCALE[0]))
        aspect = math.exp(low + ratio * (high - low))
        columns = round(math.sqrt(area * aspect))
        rows = round(math.sqrt(area / aspect))
        if 0 < columns <= width and 0 < rows <= height:
            # Numbers below 1 that are rounded to float32 may have become 1.
            free = height - rows, width - columns
            start = [min(int(u * (n + 1)), n) for u, n in zip((top, left), free, strict=True)]
            return Box(start[0], start[1], rows, columns)
    # The largest crop in the centre whose ratio is in the range.
    columns = min(width, max(1, round(height * _RATIO[1])))
    rows = min(height, max(1, round(width / _RATIO[0])))
    return Box((height - rows) // 2, (width - columns) // 2, rows, columns)


def decode_crop(
    image: Any,
    data: Any,
    mode: str,
    size: tuple[int, int],
    draws: Sequence[Sequence[float]],
) -> Any:
    """Decode a random-resized crop of an image.

    Args:
        image: The image as Pillow has opened it, not yet decoded.
        data: The bytes of its file, or its path.
        mode: Mode of the result.
        size: Height and width of the result.
        draws: See `choose_box`.

    Returns:
        An image of Pillow.
    """
    from PIL import Image, ImageOps

    orientation = image.getexif().get(_EXIF_ORIENTATION, 1)
    width, height = image.size
    is_turned = orientation > 4
    box = choose_box(draws, *((width, height) if is_turned else (height, width)))
    # The crop isn't smaller than the result at the file's size divided by this.
    shrink = min(box.height / size[0], box.width / size[1])
    divisor = max(each for each in (1, 2, 4, 8) if each <= max(1.0, shrink))
    decode = _turbo_decoder()
    is_turbo = decode is not None and not hasattr(data, "open")
    if is_turbo and image.format == "JPEG" and image.mode in ("L", "RGB") and orientation == 1:
        colorspace = "GRAY" if image.mode == "L" else "RGB"
        pixels: NDArray[np.uint8] = decode(
            data, colorspace, min_width=-(-width // divisor), min_height=-(-height // divisor)
        )
        image = Image.fromarray(pixels[..., 0] if colorspace == "GRAY" else pixels)
    else:
        image.draft(None, (width // divisor, height // divisor))
        image.load()
        if orientation != 1:
            image = ImageOps.exif_transpose(image)
    if mode != image.mode:
        if mode != "RGBA":
            # Otherwise Pillow warns that transparency is lost.
            image.info.pop("transparency", None)
        image = image.convert(mode)
    by_width = image.width / (height if is_turned else width)
    by_height = image.height / (width if is_turned else height)
    part = (
        box.left * by_width,
        box.top * by_height,
        (box.left + box.width) * by_width,
        (box.top + box.height) * by_height,
    )
    return image.resize(size[::-1], Image.Resampling.BILINEAR, part)


@cache
def _turbo_decoder() -> Any:
    """Return the function of simplejpeg that decodes a JPEG; None without the package."""
    try:
        from simplejpeg import decode_jpeg
    except ImportError:
        return None
    return decode_jpeg
