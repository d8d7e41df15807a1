"""Samples of a store, as pictures and text."""

import base64
import io
from dataclasses import dataclass

import numpy as np
from PIL import Image
from torch import Tensor

from lightning_memmap.images import ImageError, decode_image
from lightning_memmap.pixels import pixels_of
from lightning_memmap.schema import Field
from lightning_memmap.schema.kinds import Bytes
from lightning_memmap.store import Store

_NUM_SAMPLES = 24
#: The longest side of a picture, and the most values that are written out.
_MAX_PIXELS, _MAX_VALUES = 192, 8
#: The most characters of text.
_MAX_TEXT = 200


@dataclass(frozen=True)
class Value:
    """One field of a sample.

    Args:
        name: The field.
        picture: A PNG file as a data address; empty where it is no picture.
        text: Its values, or its shape.
    """

    name: str
    picture: str
    text: str


def samples(store: Store) -> list[tuple[int, list[Value]]]:
    """Show evenly spaced rows.

    Returns:
        For each of them, its number and its fields.
    """
    last, count = store.num_rows - 1, min(_NUM_SAMPLES, store.num_rows)
    rows = sorted({round(index * last / max(count - 1, 1)) for index in range(count)})
    return [
        (
            row,
            [
                show(field, column.row(row))
                for field, column in zip(store.schema.fields, store.columns, strict=True)
            ],
        )
        for row in rows
    ]


def show(field: Field, row: Tensor) -> Value:
    """Show one field of one row.

    Args:
        field: The field.
        row: Its value.
    """
    if field.kind == Bytes() and (pixels := _decoded(row)) is not None:
        shape = " x ".join(map(str, pixels.shape))
        return Value(field.name, _picture(pixels), f"{shape}, encoded in {len(row)} bytes")
    if field.is_text:
        # A lone half of a surrogate pair cannot be part of a page.
        text = str(field.value(row)).encode("utf-8", "replace").decode()
        return Value(field.name, "", text[:_MAX_TEXT] + "..." * (len(text) > _MAX_TEXT))
    shape = " x ".join(map(str, row.shape))
    pixels = pixels_of(row)
    if pixels is not None:
        return Value(field.name, _picture(pixels), shape)
    values = row.reshape(-1)[:_MAX_VALUES].tolist()
    text = ", ".join(map(field.words, values))
    if row.numel() > _MAX_VALUES:
        text = f"{shape}: {text}, ..."
    return Value(field.name, "", text)


def _decoded(row: Tensor) -> np.ndarray | None:
    """The pixels of an encoded image, channels last; None where the bytes are none."""
    try:
        return np.ascontiguousarray(decode_image(row.numpy(), "RGB").transpose(1, 2, 0))
    except ImageError:
        return None


def _picture(pixels: np.ndarray) -> str:
    image = Image.fromarray(
        pixels[..., 0] if pixels.shape[-1] == 1 else np.ascontiguousarray(pixels)
    )
    image.thumbnail((_MAX_PIXELS, _MAX_PIXELS))
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
