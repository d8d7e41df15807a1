"""Encoded images against decoded ones, as a table."""

from collections.abc import Mapping

import torch

from lightning_memmap.loading.image_sample import image_samples
from lightning_memmap.placement import free_bytes
from lightning_memmap.sizes import format_bytes
from lightning_memmap.store import Store
from lightning_memmap.tables import Cell, Column, Table


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
        for found in image_samples(store):
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
