"""The rows of a step, shown: by data device, with their values, and as a sheet of images."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_memmap.loading.image_decoder import image_decoders
from lightning_memmap.pixels import pixels_of
from lightning_memmap.schema import Decode, Field, Form
from lightning_memmap.store import Store
from lightning_memmap.store.open_columns import OpenColumn
from lightning_memmap.tables import printable

#: Rows of a contact sheet at most, and pixels between images.
_SHEET_ROWS, _MARGIN = 1024, 2
#: The most characters of a field.
_MAX_TEXT = 80
#: Wider than any table.
_MAX_WIDTH = 2**20


@dataclass(frozen=True)
class DeviceRows:
    """The rows that one data device gives in a step.

    Args:
        device: Number of the data device over all processes.
        rank: Data-parallel rank of its process.
        rows: The rows of its batch, in their order, as for `StepRows`.
    """

    device: int
    rank: int
    rows: list[Any]


@dataclass(frozen=True)
class StepRows:
    """The rows of a step.

    Args:
        epoch: The epoch.
        step: The step of the epoch.
        first: Its first position.
        last: One past its last position.
        rows: The rows of the global batch, in the order of positions: numbers, or as
            `lightning_memmap.sampling.Rows.names` has them.
        devices: The same by data device.
        run_step: The step, counted over all epochs as for ``skip_steps``.
        is_skipped: Whether ``skip_steps`` leaves it out.
    """

    epoch: int
    step: int
    first: int
    last: int
    rows: list[Any]
    devices: list[DeviceRows]
    run_step: int
    is_skipped: bool


def devices_table(step: StepRows) -> Table:
    """The rows of a step by device."""
    table = Table()
    for name in ("data device", "rank", "rows"):
        table.add_column(name, overflow="fold")
    for device in step.devices:
        rows = " ".join(map(_name, device.rows))
        table.add_row(str(device.device), str(device.rank), rows)
    return table


def print_values(console: Console, values: Sequence[Sequence[str]]) -> None:
    """Print the values of rows as a table, or field by field where that would be too wide.

    Args:
        console: Where to print.
        values: As of `values_of`.
    """
    names, *rows = values
    table = Table(*names)
    for row in rows:
        table.add_row(*row)
    if console.measure(table, options=console.options.update(width=_MAX_WIDTH)).minimum <= (
        console.width
    ):
        console.print(table)
        return
    for number, device, *fields in rows:
        console.print(f"row {number}, data device {device}", soft_wrap=True)
        for name, value in zip(names[2:], fields, strict=True):
            console.print(f"  {name}: {value}", soft_wrap=True)


def values_of(
    step: StepRows, numbers: Sequence[int], store: Store, forms: Mapping[str, Form]
) -> list[list[str]]:
    """The values that the rows of a step have in a store.

    Args:
        step: The step.
        numbers: Its rows in the store, in the order of positions.
        store: The store.
        forms: The forms of its fields.

    Returns:
        The names of what is shown, and then for each row its number, its data device and its
        fields.
    """
    names = [field.name for field in store.schema.fields]
    shown = [
        index
        for index, field in enumerate(store.schema.fields)
        if _is_short(field) and not isinstance(forms.get(field.name), Decode)
    ]
    own = ["row", "data device"]
    # A field of such a name would look like the row's number, or its device.
    heads = [f"field {name}" if name in own else name for name in (names[i] for i in shown)]
    found = [[*own, *heads]]
    for position, (name, row) in enumerate(zip(step.rows, numbers, strict=True), step.first):
        values = [
            _text(store.schema.fields[index], store.columns[index].row(row)) for index in shown
        ]
        found.append([_name(name), str(position % len(step.devices)), *values])
    return found


def write_sheet(store: Store, rows: Sequence[int], path: Path, forms: Mapping[str, Form]) -> bool:
    """Write the images of rows as one image, in their order, if the rows have any.

    Args:
        store: The store.
        rows: Its rows.
        path: The PNG file.
        forms: The forms of its fields.

    Returns:
        Whether there are any.

    Raises:
        ValueError: Nothing is installed that writes images.
    """
    rows = rows[:_SHEET_ROWS]
    decoders = image_decoders(store.manifest.columns, store.columns, forms)
    images = list[list[NDArray[np.uint8]]]()
    for index, (field, column) in enumerate(zip(store.schema.fields, store.columns, strict=True)):
        if index in decoders:
            decoded, _ = decoders[index].decoded([column.row(row).numpy() for row in rows])
            images.append([image.movedim(0, -1).numpy() for image in decoded])
        elif not field.num_variable and (found := _images(column, rows)):
            images.append(found)
    if not images:
        return False
    pixels = images[0]
    height, width, depth = pixels[0].shape
    across = math.ceil(math.sqrt(len(pixels) * height / width))
    down = -(-len(pixels) // across)
    cell = (height + _MARGIN, width + _MARGIN)
    sheet = np.full((down * cell[0], across * cell[1], depth), 255, np.uint8)
    for index, image in enumerate(pixels):
        top, left = index // across * cell[0], index % across * cell[1]
        sheet[top : top + height, left : left + width] = image
    try:
        from matplotlib.image import imsave
    except ImportError:
        raise ValueError(
            f"show={str(path)!r}: no package is installed that writes images: install matplotlib"
        ) from None
    path.parent.mkdir(parents=True, exist_ok=True)
    imsave(path, np.repeat(sheet, 3, axis=2) if depth == 1 else sheet)
    return True


def _images(column: OpenColumn, rows: Sequence[int]) -> list[NDArray[np.uint8]]:
    """The rows of a field as images; none where they are no images."""
    if not rows or pixels_of(column.row(rows[0])) is None:
        return []
    return [found for row in rows if (found := pixels_of(column.row(row))) is not None]


def _name(row: Any) -> str:
    """A row in a table: its number, or for a window the number of its series and its step."""
    if not isinstance(row, list):
        return str(row)
    return f"{_name(row[0])}:{row[1]}"


def _is_short(field: Field) -> bool:
    return field.is_text or (not field.num_variable and math.prod(field.item_shape) <= 8)


def _text(field: Field, row: Tensor) -> str:
    if field.is_text:
        text = str(field.value(row))
    else:
        text = " ".join(map(field.words, row.flatten().tolist()))
    return printable(shorten(text, _MAX_TEXT))
