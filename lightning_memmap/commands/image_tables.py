"""Encoded images against decoded ones, as a table: their bytes, and how fast they are decoded."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_memmap.images import ImageError, decode_image
from lightning_memmap.loading.decoding import default_threads
from lightning_memmap.placement import free_bytes
from lightning_memmap.schema.kinds import Bytes
from lightning_memmap.sizes import format_bytes
from lightning_memmap.store import Store
from lightning_memmap.tables import Cell, Column, Table

#: Images that are decoded, and seconds after which no further one is.
_MAX_IMAGES, _MOST_S = 512, 1.0


def image_tables(stores: Mapping[str, Store], budget_bytes: int) -> list[Table]:
    """Compare encoded images as they are stored with the same images stored decoded.

    Some images are decoded for it.

    Args:
        stores: The stores by name.
        budget_bytes: Memory of one device for its shards.

    Returns:
        A table with two rows for each field of images; none where there are no such fields.
    """
    free = free_bytes(torch.device("cpu"))
    rows = []
    for name, store in stores.items():
        for found in _samples(store):
            size = "of several sizes" if found.shape is None else "{1} x {2}".format(*found.shape)
            rate = f"{found.images_per_s:,.0f} by {found.num_threads} threads"
            others = store.manifest.num_bytes - found.encoded_bytes
            needed = str(-(-(found.decoded_bytes + others) // max(1, budget_bytes)))
            largest = max(1, found.encoded_bytes, found.decoded_bytes)
            for images, num_bytes, devices, decoding in (
                ("encoded", found.encoded_bytes, "-", rate),
                (f"decoded, RGB {size}", found.decoded_bytes, needed, "-"),
            ):
                fits = Cell("fits", "good")
                rows.append(
                    [
                        Cell(name),
                        Cell(found.field),
                        Cell(images),
                        Cell(format_bytes(num_bytes), bar=num_bytes / largest),
                        Cell(format_bytes(num_bytes // store.num_rows)),
                        fits
                        if num_bytes <= free
                        else Cell(f"no, {format_bytes(free)} are free", "unsure"),
                        Cell(devices),
                        Cell(decoding),
                    ]
                )
    title = "Encoded images, which stay in host memory, and the same images stored decoded"
    columns = [Column(label, is_text=True) for label in ("store", "field", "images")]
    labels = ("bytes", "bytes per image", "in host memory", "devices", "images/s")
    return [Table(title, [*columns, *map(Column, labels)], rows)] if rows else []


@dataclass(frozen=True)
class _Sample:
    """What a sample of encoded images shows of a field.

    Args:
        field: Name of the field.
        num_rows: Rows of the store.
        encoded_bytes: Bytes of all files.
        decoded_bytes: Bytes of all images decoded to RGB, from the mean of the sample.
        shape: The shape of each, (3, height, width); None where they differ in size.
        images_per_s: How many this machine has decoded in a second.
        num_threads: The threads that did so.
    """

    field: str
    num_rows: int
    encoded_bytes: int
    decoded_bytes: int
    shape: tuple[int, ...] | None
    images_per_s: float
    num_threads: int


def _samples(store: Store) -> Iterator[_Sample]:
    """Decode some images of each field of a store that has encoded images."""
    columns = zip(store.manifest.columns, store.columns, strict=True)
    for column, rows in columns:
        given = np.flatnonzero(store.given(column.field.name))
        is_image = column.field.kind == Bytes() and len(given) > 0
        if not is_image or _shape(rows.row(int(given[0])).numpy()) is None:
            continue
        count = min(_MAX_IMAGES, len(given))
        # Evenly spaced, and in an order in which any first part of them is too.
        chosen = np.random.default_rng(0).permutation(
            given[np.linspace(0, len(given) - 1, count).astype(np.int64)]
        )
        num_threads = default_threads(1)
        shapes: list[tuple[int, ...]] = []
        start = perf_counter()
        with ThreadPoolExecutor(num_threads) as threads:
            for first in range(0, count, 4 * num_threads):
                fetched = rows.fetch(chosen[first : first + 4 * num_threads])
                found = threads.map(_shape, [row.numpy() for row in fetched])
                shapes += [shape for shape in found if shape is not None]
                if perf_counter() - start > _MOST_S:
                    break
        if not shapes:
            continue
        rate = len(shapes) / (perf_counter() - start)
        mean = sum(int(np.prod(shape)) for shape in shapes) / len(shapes)
        yield _Sample(
            column.field.name,
            len(given),
            column.num_bytes(range(store.num_rows)),
            int(mean * len(given)),
            shapes[0] if len(set(shapes)) == 1 else None,
            rate,
            num_threads,
        )


def _shape(data: NDArray[np.uint8]) -> tuple[int, ...] | None:
    try:
        return decode_image(data, "RGB").shape
    except (ImageError, ImportError):
        return None
