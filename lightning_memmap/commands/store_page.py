"""Pages of samples, with sizes for ``lightning-memmap store show``. They need nothing else."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from lightning_memmap.images import ImageError, decode_image, row_to_pixels
from lightning_memmap.integers import evenly_spaced
from lightning_memmap.schema.fields import Field
from lightning_memmap.schema.kinds import Bytes
from lightning_memmap.sizes import format_bytes
from lightning_memmap.store import Store

_NUM_SAMPLES = 24
#: The longest side of a picture.
_MAX_PIXELS = 192
#: Longer values and texts are cut off.
_MAX_VALUES = 8
_MAX_TEXT = 200


@dataclass(frozen=True)
class Value:
    """One field of a sample: its picture as a data address, or nothing, and its text."""

    name: str
    picture: str
    text: str


@dataclass(frozen=True)
class Section:
    """A part of a page: samples by name, and the bytes of each field, which are shown as bars."""

    title: str
    lines: Sequence[str]
    samples: Sequence[tuple[str, Sequence[Value]]]
    sizes: Mapping[str, int] = field(default_factory=dict)


def make_section(name: str, store: Store) -> Section:
    """Make a section of evenly spaced samples of a store, and its bytes by field."""
    manifest = store.manifest
    rows = evenly_spaced(store.num_rows, _NUM_SAMPLES)
    lines = [
        f"{store.num_rows:,} rows, {format_bytes(manifest.num_bytes)}, {store.num_shards} shards",
        store.location,
        ", ".join(f"{key} {value}" for key, value in manifest.source.items()),
    ]
    sizes = {
        f"{field.name} {field}": column.num_bytes
        for field, column in zip(store.schema.fields, manifest.columns, strict=True)
    }
    names = (f"row {row}" for row in rows)
    return Section(name, lines, [*zip(names, read_values(store, rows), strict=True)], sizes)


def read_values(store: Store, rows: Sequence[int]) -> list[list[Value]]:
    """Read the fields of rows."""
    fields = store.schema.fields
    return [[*map(make_value, fields, store.read_row(row))] for row in rows]


def make_value(field: Field, row: Tensor) -> Value:
    """Make the picture and text of one field of one row."""
    if field.kind == Bytes() and (pixels := _decoded(row)) is not None:
        shape = " x ".join(map(str, pixels.shape))
        return Value(field.name, _picture(pixels), f"{shape}, encoded in {len(row)} bytes")
    if field.is_text:
        # A lone half of a surrogate pair cannot be part of a page.
        text = str(field.value(row)).encode("utf-8", "replace").decode()
        return Value(field.name, "", text[:_MAX_TEXT] + "..." * (len(text) > _MAX_TEXT))
    shape = " x ".join(map(str, row.shape))
    if (pixels := row_to_pixels(row)) is not None:
        return Value(field.name, _picture(pixels), shape)
    text = ", ".join(map(field.kind.format_value, row.reshape(-1)[:_MAX_VALUES].tolist()))
    return Value(field.name, "", f"{shape}: {text}, ..." if row.numel() > _MAX_VALUES else text)


def _decoded(row: Tensor) -> np.ndarray | None:
    """Decode an image to pixels, channels last; return None if the bytes aren't an image."""
    try:
        return np.ascontiguousarray(decode_image(row.numpy(), "RGB").transpose(1, 2, 0))
    except ImageError:
        return None


def _picture(pixels: np.ndarray) -> str:
    from PIL import Image

    image = Image.fromarray(
        pixels[..., 0] if pixels.shape[-1] == 1 else np.ascontiguousarray(pixels)
    )
    image.thumbnail((_MAX_PIXELS, _MAX_PIXELS))
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
