"""Decodes the encoded images of a field to one shape."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_memmap.errors import DatasetError
from lightning_memmap.images import ImageError, ImageMissingError, ImageSizeError, decode_image
from lightning_memmap.schema.forms import Decode, Form
from lightning_memmap.store.store import Store


class Scaled(NamedTuple):
    """What a batch has for images decoded with ``Decode(size=..., with_scale=True)``.

    A point ``(x, y)`` of the upright image file, in pixels, lies at ``(x, y) * scale + offset`` of
    its values, or outside of them if it was cut off.
    """

    values: Tensor
    """The images, uint8 of shape (B, channels, height, width)."""
    scale: Tensor
    """By how much each was scaled, float32 of shape (B,)."""
    offset: Tensor
    """Where its left upper corner lies: x and y, not above 0, float32 of shape (B, 2)."""

    @classmethod
    def of(cls, pixels: Tensor, places: Tensor) -> "Scaled":
        """Images, and by how much each was scaled and where its corner lies, side by side."""
        return cls(pixels, places[:, 0], places[:, 1:])


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
        """A decoder of images that have the size of the first one, or that of the form."""
        try:
            return cls(field, form, decode_image(first, form.mode, form.size).shape)
        except ImageError as error:
            raise image_failure(field, f"row {row}", error) from error

    def decode(
        self, data: NDArray[np.uint8], out: NDArray[np.uint8], place: NDArray[np.float32]
    ) -> None:
        """Decode the bytes of a file."""
        out[...] = decode_image(data, self.form.mode, self.form.size, self.shape, place)

    def decoded(self, rows: Sequence[NDArray[np.uint8]]) -> tuple[Tensor, Tensor]:
        """Decode images one by one: their pixels, and their places."""
        out = torch.empty((len(rows), *self.shape), dtype=torch.uint8)
        places = torch.empty((len(rows), 3))
        targets = zip(rows, out.numpy(), places.numpy(), strict=True)
        for index, (data, pixels, place) in enumerate(targets):
            try:
                self.decode(data, pixels, place)
            except ImageError as error:
                raise image_failure(self.field, f"image {index} of a batch", error) from error
        return out, places


def image_failure(field: str, which: str, error: ImageError) -> DatasetError:
    """The error for an image that cannot be decoded."""
    remedy = "repair it in the dataset or leave it out, and build the store again"
    if isinstance(error, ImageSizeError):
        remedy = (
            "scale all images to one size with Decode(size=(height, width)), or store them decoded,"
            " as PIL images or tensors of one size in the dataset"
        )
    if isinstance(error, ImageMissingError):
        remedy = (
            "repair it in the dataset, or give an image in its place, and build the store again"
        )
    return DatasetError(f"field {field!r}, {which}: {error}: {remedy}")


def image_decoders(store: Store, forms: Mapping[str, Form]) -> dict[int, ImageDecoder]:
    """Make the decoders of encoded images."""
    decoders = {}
    for index, field in enumerate(store.schema.fields):
        form = forms.get(field.name)
        if isinstance(form, Decode):
            form.check(field)
            # All processes decode the same row, whether they hold it or not: the first with an
            # image, because rows without one may be in no split.
            num_rows = store.num_rows if field.num_variable else 1
            images = ((store.read_row(row, field.name)[0].numpy(), row) for row in range(num_rows))
            no_image = store.read_row(0, field.name)[0].numpy(), 0
            image, row = next((pair for pair in images if len(pair[0])), no_image)
            decoders[index] = ImageDecoder.like(field.name, form, image, row)
    return decoders
