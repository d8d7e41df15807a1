"""Decodes the encoded images of a field to one shape."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_memmap.errors import DatasetError
from lightning_memmap.images import ImageError, ImageMissingError, ImageSizeError, decode_image
from lightning_memmap.schema.forms import Decode
from lightning_memmap.store.store import Store


class Scaled(NamedTuple):
    """A batch of images decoded with ``Decode(size=..., with_scale=True)``.

    The point ``(x, y)`` of the upright image file, in pixels, is at ``(x, y) * scale + offset`` of
    the values, or outside of them if it was cropped. All tensors are on the device of the batch.
    """

    values: Tensor
    """The images, uint8 of shape (B, channels, height, width)."""
    scale: Tensor
    """The factor of each image, float32 of shape (B,)."""
    offset: Tensor
    """The position (x, y) of its upper left corner, 0 or negative, float32 of shape (B, 2)."""

    @classmethod
    def of(cls, pixels: Tensor, geometry: Tensor) -> "Scaled":
        """Combine images with their geometry: scale, x and y, of shape (B, 3)."""
        return cls(pixels, geometry[:, 0], geometry[:, 1:])


@dataclass(frozen=True)
class ImageDecoder:
    """Decodes the images of one field, all to one shape, (channels, height, width)."""

    field: str
    form: Decode
    shape: tuple[int, ...]

    @classmethod
    def like(
        cls, field: str, form: Decode, first: NDArray[np.uint8], row: int = 0
    ) -> "ImageDecoder":
        """Return a decoder for images of the form's size, or of the size of a first image."""
        try:
            return cls(field, form, decode_image(first, form.mode, form.size).shape)
        except ImageError as error:
            raise image_failure(field, f"row {row}", error) from error

    def decode(
        self,
        data: NDArray[np.uint8],
        out: NDArray[np.uint8],
        geometry: NDArray[np.float32],
        draws: Any = None,
    ) -> None:
        """Decode the centre of an image, or a random crop, and write its scale and offset."""
        out[...] = decode_image(data, self.form.mode, self.form.size, self.shape, geometry, draws)

    def decoded(self, rows: Sequence[NDArray[np.uint8]]) -> tuple[Tensor, Tensor]:
        """Decode images one by one.

        Returns:
            The pixels, uint8 of shape (B, *shape), and their scale, x and y, float32 of shape
            (B, 3).
        """
        out = torch.empty((len(rows), *self.shape), dtype=torch.uint8)
        geometry = torch.empty((len(rows), 3))
        targets = zip(rows, out.numpy(), geometry.numpy(), strict=True)
        for index, (data, pixels, image_geometry) in enumerate(targets):
            try:
                self.decode(data, pixels, image_geometry)
            except ImageError as error:
                raise image_failure(self.field, f"image {index} of a batch", error) from error
        return out, geometry


def image_failure(field: str, image: str, error: ImageError) -> DatasetError:
    """Return the error for an image that cannot be decoded."""
    remedy = "repair or remove it in the dataset, and build the store again"
    if isinstance(error, ImageSizeError):
        remedy = (
            "scale all images to one size with Decode(size=(height, width)), or store them decoded,"
            " as PIL images or tensors of one size in the dataset"
        )
    if isinstance(error, ImageMissingError):
        remedy = "repair it in the dataset, or return another image, and build the store again"
    return DatasetError(f"field {field!r}, {image}: {error}: {remedy}")


def image_decoders(store: Store, decode: Mapping[str, Decode]) -> dict[int, ImageDecoder]:
    """Make the decoders of encoded images."""
    decoders = {}
    for index, field in enumerate(store.schema.fields):
        form = decode.get(field.name)
        if form is not None:
            form.check(field)
            # All processes decode the same row, whether they hold it or not: the first with an
            # image, because rows without one may be in no split.
            num_rows = store.num_rows if field.num_variable else 1
            images = ((store.read_row(row, field.name)[0].numpy(), row) for row in range(num_rows))
            no_image = store.read_row(0, field.name)[0].numpy(), 0
            image, row = next((pair for pair in images if len(pair[0])), no_image)
            decoders[index] = ImageDecoder.like(field.name, form, image, row)
    return decoders
