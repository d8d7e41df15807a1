"""Encoded images against decoded ones, as a table."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_memmap.images import ImageError, decode_image
from lightning_memmap.placement import free_bytes
from lightning_memmap.schema.kinds import Bytes
from lightning_memmap.sizes import format_bytes
from lightning_memmap.store import Store
from lightning_memmap.tables import Cell, Column, Table

#: Images that are decoded to learn the sizes of all.
_MAX_IMAGES = 64


def image_tables(stores: Mapping[str, Store], budget_bytes: int) -> list[Table]:
    """Compare encoded images as they are stored with the same images stored decoded.

    Returns:
        A table with two rows for each field of images; none where there are no such fields.
    """
    free = free_bytes(torch.device("cpu"))
    rows = []
    for name, store in stores.items():
        for index, column in enumerate(store.manifest.columns):
            given = np.flatnonzero(store.given(column.field.name))
            shapes = _shapes(store, index, given) if column.field.kind == Bytes() else []
            if not shapes:
                continue
            mean = sum(int(np.prod(shape)) for shape in shapes) / len(shapes)
            encoded, decoded = column.num_bytes(range(store.num_rows)), int(mean * len(given))
            needed = -(-(decoded + store.manifest.num_bytes - encoded) // max(1, budget_bytes))
            _, height, width = shapes[0]
            size = f"{height} x {width}" if len(set(shapes)) == 1 else "of several sizes"
            for images, num_bytes, devices in (
                ("encoded", encoded, "-"),
                (f"decoded, RGB {size}", decoded, str(needed)),
            ):
                lack = Cell(f"no, {format_bytes(free)} are free", "unsure")
                rows.append(
                    [
                        *map(Cell, (name, column.field.name, images)),
                        Cell(format_bytes(num_bytes), bar=num_bytes / max(1, encoded, decoded)),
                        Cell(format_bytes(num_bytes // store.num_rows)),
                        Cell("fits", "good") if num_bytes <= free else lack,
                        Cell(devices),
                    ]
                )
    title = "Encoded images, which stay in host memory, and the same images stored decoded"
    columns = [Column(label, is_text=True) for label in ("store", "field", "images")]
    labels = ("bytes", "bytes per image", "in host memory", "devices")
    return [Table(title, [*columns, *map(Column, labels)], rows)] if rows else []


def _shapes(store: Store, index: int, given: NDArray[np.int64]) -> list[tuple[int, ...]]:
    """The shapes of evenly spaced images; none where the first row is no image."""
    places = np.linspace(0, len(given) - 1, min(_MAX_IMAGES, len(given))).astype(np.int64)
    shapes = list[tuple[int, ...]]()
    for row in given[places].tolist():
        try:
            shapes.append(decode_image(store.columns[index].row(row).numpy(), "RGB").shape)
        except (ImageError, ImportError):
            if not shapes:
                break
    return shapes
