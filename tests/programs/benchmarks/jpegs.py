"""JPEG files that a program makes, with structure at all scales, as photographs have."""

import io

import numpy as np
from PIL import Image

#: Width and height, and the bytes of a file: those of ImageNet's training images on average.
SIZE, NUM_BYTES = (500, 375), 115_000


def make_jpeg(seed: int, size: tuple[int, int] = SIZE, num_bytes: int = NUM_BYTES) -> bytes:
    """Make a file of some size, with the quality that has the nearest number of bytes.

    Args:
        seed: Another image for each.
        size: Width and height in pixels.
        num_bytes: Bytes of the file.
    """
    image = _make_image(seed, size)
    least, most = 30, 98
    while least < most:  # The bytes grow with the quality.
        middle = (least + most) // 2
        if len(_encode(image, middle)) < num_bytes:
            least = middle + 1
        else:
            most = middle
    return _encode(image, least)


def _make_image(seed: int, size: tuple[int, int]) -> Image.Image:
    random = np.random.default_rng(seed)
    pixels = np.full((size[1], size[0], 3), 128, np.float32)
    for side in (4, 16, 64, 256):
        noise = random.normal(0, 160 / side**0.5, (side, side, 3)).clip(-127, 127) + 128
        layer = Image.fromarray(noise.astype(np.uint8)).resize(size, Image.Resampling.BICUBIC)
        pixels += np.asarray(layer, np.float32) - 128
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def _encode(image: Image.Image, quality: int) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()
