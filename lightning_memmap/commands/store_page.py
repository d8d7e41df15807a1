"""``lightning-memmap store show``: a page of samples and sizes, which needs nothing else."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from lightning_memmap.images import ImageError, decode_image
from lightning_memmap.pages import templates
from lightning_memmap.pixels import pixels_of
from lightning_memmap.schema import Field
from lightning_memmap.schema.kinds import Bytes
from lightning_memmap.store import Store

_NUM_SAMPLES = 24
#: The longest side of a picture, the most values that are written out, and characters of text.
_MAX_PIXELS, _MAX_VALUES, _MAX_TEXT = 192, 8, 200
#: More shards than these are summed up in groups.
_MAX_SHARDS = 48


@dataclass(frozen=True)
class Value:
    """One field of a sample: its picture as a data address, or nothing, and its text."""

    name: str
    picture: str
    text: str


def render_stores(stores: Mapping[str, Store]) -> str:
    """Make the page. Needs jinja2 and Pillow.

    Names and values of a store may come from a stranger: they are shown as text, whatever they look
    like.
    """
    found = [_describe(name, store) for name, store in stores.items()]
    return templates().get_template("stores.html").render(stores=found)


def _describe(name: str, store: Store) -> dict[str, Any]:
    manifest, every = store.manifest, range(store.num_rows)
    labels = [f"{field.name} {field}" for field in store.schema.fields]
    shard_bytes = manifest.shard_bytes().tolist()
    step = -(-len(shard_bytes) // _MAX_SHARDS)
    shards = {
        str(first) if step == 1 else f"{first} to {min(first + step, len(shard_bytes)) - 1}": sum(
            shard_bytes[first : first + step]
        )
        for first in range(0, len(shard_bytes), step)
    }
    return {
        "name": name,
        "store": store,
        "samples": samples(store),
        "fields": _bars(labels, [int(column.num_bytes(every)) for column in manifest.columns]),
        "shards": _bars([*shards], [*shards.values()]),
    }


def _bars(labels: Sequence[str], sizes: Sequence[int]) -> list[tuple[str, int, float]]:
    """A label, its bytes and their share of the most for each bar."""
    largest = max(1, *sizes)
    return [(label, size, size / largest) for label, size in zip(labels, sizes, strict=True)]


def samples(store: Store) -> list[tuple[int, list[Value]]]:
    """The numbers of evenly spaced rows, and their fields."""
    last, count = store.num_rows - 1, min(_NUM_SAMPLES, store.num_rows)
    rows = sorted({round(index * last / max(count - 1, 1)) for index in range(count)})
    fields = list(zip(store.schema.fields, store.columns, strict=True))
    return [(row, [show(field, column.row(row)) for field, column in fields]) for row in rows]


def show(field: Field, row: Tensor) -> Value:
    """Show one field of one row."""
    if field.kind == Bytes() and (pixels := _decoded(row)) is not None:
        shape = " x ".join(map(str, pixels.shape))
        return Value(field.name, _picture(pixels), f"{shape}, encoded in {len(row)} bytes")
    if field.is_text:
        # A lone half of a surrogate pair cannot be part of a page.
        text = str(field.value(row)).encode("utf-8", "replace").decode()
        return Value(field.name, "", text[:_MAX_TEXT] + "..." * (len(text) > _MAX_TEXT))
    shape = " x ".join(map(str, row.shape))
    if (pixels := pixels_of(row)) is not None:
        return Value(field.name, _picture(pixels), shape)
    text = ", ".join(map(field.words, row.reshape(-1)[:_MAX_VALUES].tolist()))
    return Value(field.name, "", f"{shape}: {text}, ..." if row.numel() > _MAX_VALUES else text)


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
