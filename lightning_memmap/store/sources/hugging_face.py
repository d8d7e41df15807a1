"""Columns of a ``datasets.Dataset`` of Hugging Face, read from its Arrow table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import override

from lightning_memmap.sampling import Integers
from lightning_memmap.schema import Field, Node
from lightning_memmap.schema.numbers import TO_NUMPY
from lightning_memmap.schema.rows import arrays_of_lists
from lightning_memmap.store.sources.field_array import (
    FieldArray,
    NullableRows,
    PartOfRows,
    object_array,
)
from lightning_memmap.store.sources.from_arrow import to_numpy

#: Formats whose samples have the values of the table, in a type of Python, numpy or torch.
_FORMATS = {None, "numpy", "torch"}


def is_dataset(dataset: Any) -> bool:
    """Whether a dataset is exactly of the class ``datasets.Dataset``."""
    kind = type(dataset)
    return kind.__module__ == "datasets.arrow_dataset" and kind.__name__ == "Dataset"


def arrays_of(dataset: Any, node: Node, fields: Sequence[Field]) -> list[FieldArray] | None:
    """Find the columns of the table in which the rows of a dataset lie.

    Args:
        dataset: A ``datasets.Dataset``.
        node: The structure of its samples.
        fields: The fields in it.

    Returns:
        One array for each field; None where samples have another form than the table, such as
        images, or nested features.
    """
    if dataset.format["type"] not in _FORMATS or dataset.format["format_kwargs"]:
        return None
    paths = [path for path, part in node.walk() if part.is_field]
    widths = {path: len(part.children) for path, part in node.walk() if part.is_list}
    arrays: list[FieldArray] = []
    for path, field in zip(paths, fields, strict=True):
        if field.kind == "mask":  # Of the column before.
            arrays.append(PartOfRows(arrays[-1], is_mask=True))
            arrays[-2] = PartOfRows(arrays[-2], is_mask=False)
            continue
        # A short list of numbers has a field for each of its items.
        name, item = path[0], path[1] if len(path) == 2 else None
        if len(path) > 2 or isinstance(item, str):
            return None
        if field.num_variable and not _is_as_in_table(dataset.features[name]):
            return None
        # On its way through numpy, a text loses zeros at its end.
        if field.is_text and dataset.format["type"] is not None:
            return None
        column = dataset.select_columns([name]).with_format("arrow")
        arrays.append(_ArrowColumn(column, str(name), item, widths.get(path[:1], 0), field))
    return arrays


def _is_as_in_table(feature: Any) -> bool:
    """Whether samples have the texts and numbers that the table has, and nothing made of them."""
    kind = type(feature).__name__
    if kind in ("List", "LargeList", "Sequence"):
        return _is_as_in_table(feature.feature)
    return kind in ("Value", "ClassLabel")


def nullable_columns(dataset: Any) -> list[str]:
    """The columns whose samples are None in some rows.

    Args:
        dataset: A ``datasets.Dataset``.
    """
    if dataset.format["type"] is not None:  # NaN, or whatever a transform makes of it.
        return []
    table = dataset.data
    return [name for name in dataset.format["columns"] if table.column(name).null_count]


@dataclass(frozen=True, eq=False)
class _ArrowColumn(FieldArray):
    """One column, or one item of the lists in it.

    Args:
        dataset: A dataset of this column alone, which gives tables.
        name: Name of the column.
        item: Which item; None for the whole column.
        width: How many items there are.
        field: The field. Samples may have another type than the table: a number of Python, or one
            of the default types of torch.
    """

    dataset: Any
    name: str
    item: int | None
    width: int
    field: Field

    @override
    def read(self, first: int, end: int) -> np.ndarray | NullableRows:
        return self._values(self.dataset[first:end])

    @override
    def take(self, rows: Integers) -> np.ndarray | NullableRows:
        return self._values(self.dataset[rows])

    def _values(self, table: Any) -> np.ndarray | NullableRows:
        found = to_numpy(table.column(self.name))
        if isinstance(found, NullableRows):
            return NullableRows(self._wanted(found.values), found.is_given)
        return self._wanted(found)

    def _wanted(self, values: np.ndarray) -> np.ndarray:
        if values.dtype == object and self.field.num_variable:
            # Lists of numbers are arrays already, unless some are None.
            rows = arrays_of_lists(self.field, values.tolist()) or [
                self._wanted(row) if isinstance(row, np.ndarray) else row for row in values
            ]
            return object_array(rows)
        if self.item is not None and values.ndim == 2 and values.shape[1] == self.width:
            values = values[:, self.item]
        wanted = TO_NUMPY[self.field.sample_dtype]
        if values.dtype.kind in "mM" and ":" in self.field.kind:
            unit = self.field.kind.partition(":")[2].removesuffix(";UTC")
            times = np.dtype(f"{values.dtype.str[1:3]}[{unit}]")
            return values.astype(times) if np.can_cast(values.dtype, times, "safe") else values
        kinds = values.dtype.kind + wanted.kind
        # What does not fit is left as it is, and then read item by item.
        fits = kinds in ("bb", "ff") or (
            kinds in ("ii", "ui") and np.can_cast(values.dtype, wanted, "safe")
        )
        return values.astype(wanted, copy=False) if fits else values
