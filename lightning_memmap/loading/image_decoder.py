"""Decodes the images of one field of a store."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_memmap.errors import DatasetError
from lightning_memmap.images import ImageError, ImageMissingError, ImageSizeError, decode_image
from lightning_memmap.schema import Decode


@dataclass(frozen=True)
class ImageDecoder:
    """Decodes the images of one field, all to one shape.

    Args:
        field: Name of the field.
        form: How they are decoded.
        shape: The shape of each, (channels, height, width).
    """

    field: str
    form: Decode
    shape: tuple[int, ...]

    @classmethod
    def like(
        cls, field: str, form: Decode, first: NDArray[np.uint8], row: int = 0
    ) -> "ImageDecoder":
        """A decoder of images that have the size of the first one, or that of the form.

        Args:
            field: Name of the field.
            form: How they are decoded.
            first: The bytes of the first row that is not None.
            row: The number of this row, for messages.

        Raises:
            DatasetError: The first one cannot be decoded.
            ImportError: Pillow is not installed.
        """
        try:
            return cls(field, form, decode_image(first, form.mode, form.size).shape)
        except ImageError as error:
            raise _failed(field, f"row {row}", error) from error

    def decode(self, data: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        """Decode an image.

        Args:
            data: The bytes of its file.
            out: Where its pixels go, uint8 of ``shape``.

        Raises:
            ImageError: It cannot be decoded, or has another size.
        """
        out[...] = decode_image(data, self.form.mode, self.form.size, self.shape)

    def decoded(self, rows: Sequence[NDArray[np.uint8]]) -> Tensor:
        """Decode images one by one.

        Args:
            rows: The bytes of each file.

        Returns:
            uint8 of shape (number of rows, *shape), on the CPU.

        Raises:
            DatasetError: One of them cannot be decoded, or has another size. The message counts the
                rows that are given.
        """
        out = torch.empty((len(rows), *self.shape), dtype=torch.uint8)
        for index, (data, pixels) in enumerate(zip(rows, out.numpy(), strict=True)):
            try:
                self.decode(data, pixels)
            except ImageError as error:
                raise _failed(self.field, f"image {index} of a batch", error) from error
        return out

    def failed(self, row: int, error: ImageError) -> DatasetError:
        """Make the error for a row that cannot be decoded.

        Args:
            row: The row in dataset order.
            error: Why it cannot.
        """
        return _failed(self.field, f"row {row}", error)


def _failed(field: str, which: str, error: ImageError) -> DatasetError:
    remedy = "repair it in the dataset or leave it out, and build the store anew"
    if isinstance(error, ImageSizeError):
        remedy = (
            "scale all images to one size with Decode(size=(height, width)), or store them decoded,"
            " as PIL images or tensors of one size in the dataset"
        )
    if isinstance(error, ImageMissingError):
        remedy = (
            "repair it in the dataset; where it is None, give an image in its place, or use the"
            f" other rows alone, with subset=Subset(field='{field}.mask', values=[True])"
        )
    return DatasetError(f"field {field!r}, {which}: {error}: {remedy}")
