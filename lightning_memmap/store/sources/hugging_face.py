"""Columns of Hugging Face datasets, which are read from their Arrow tables."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import override

from lightning_memmap.errors import SchemaError
from lightning_memmap.schema.fields import field_name
from lightning_memmap.schema.stack import Branch
from lightning_memmap.schema.structure import Node
from lightning_memmap.store.sources.arrow_facts import ArrowFacts, find_facts
from lightning_memmap.store.sources.arrow_rows import ArrowRows
from lightning_memmap.store.sources.arrow_types import (
    decode,
    is_list,
    list_lengths,
    suggest_fill_value,
)
from lightning_memmap.store.sources.column import TableColumn
from lightning_memmap.store.workers import RowNumbers

#: Formats whose samples have the values of the table, in types of Python, numpy or torch.
_FORMATS = {None, "numpy", "torch"}


class HuggingFaceColumn(TableColumn):
    """One column of a ``datasets.Dataset``, whose samples have Python's own numbers and lists."""

    are_python = True

    def __init__(self, dataset: Any, name: str) -> None:
        self._table = dataset.select_columns([name]).with_format("arrow")
        self.has_nan = dataset.format["type"] is not None
        self.is_direct = not self.has_nan and _is_stored_as_is(dataset.features[name])

    @override
    def find_facts(self) -> ArrowFacts:
        # filter() and select() leave all rows in the table.
        selection = getattr(self._table, "_indices", None)
        rows = None if selection is None else selection.column(0).to_numpy().astype(np.int64)
        return find_facts(self._table.data.column(0), rows)

    @override
    def rows(self, rows: RowNumbers) -> Branch:
        index = slice(rows.start, rows.stop) if isinstance(rows, range) else rows
        return ArrowRows(self._table[index].column(0), are_python=True)


def hugging_face_columns(dataset: Any, node: Node) -> dict[str, HuggingFaceColumn] | None:
    """Return the columns of a dataset by name; None if samples differ from rows of its table."""
    form = dataset.format
    if form["type"] not in _FORMATS or form["format_kwargs"] or node.kind != "dict":
        return None
    # Through numpy, a text loses its trailing zeros, and a list of texts becomes an array.
    if form["type"] is not None and any(field.is_text for field in node.fields):
        return None
    if not all(_is_stored_as_is(dataset.features[str(key)]) for key in node.keys):
        return None
    return {str(key): HuggingFaceColumn(dataset, str(key)) for key in node.keys}


def _is_stored_as_is(feature: Any) -> bool:
    """Return whether samples have the texts and numbers of the table, without decoding."""
    if isinstance(feature, dict):
        return all(map(_is_stored_as_is, feature.values()))
    kind = type(feature).__name__
    if kind in ("List", "LargeList", "Sequence"):
        return _is_stored_as_is(feature.feature)
    return kind in ("Value", "ClassLabel")


def table_columns(dataset: Any) -> dict[str, list[TableColumn]] | None:
    """Return the columns of a dataset by name; None if their values don't decide its samples.

    Raises:
        SchemaError: The format of the dataset turns None into NaN or NaT of another dtype.
    """
    form = dataset.format
    if form["type"] not in _FORMATS:
        return None
    for name in form["columns"] if form["type"] is not None else ():
        _check_nulls_keep_dtype(dataset, name)
    return {name: [HuggingFaceColumn(dataset, name)] for name in dataset.column_names}


def _check_nulls_keep_dtype(dataset: Any, name: str) -> None:
    """Raise a SchemaError if a format turns None into NaN or NaT of another dtype."""
    form = dataset.format["type"]
    column = dataset.data.column(name)
    are_lists = is_list(column.type)
    items = pc.list_flatten(column) if are_lists else column
    item_type = items.type
    is_double = form == "numpy" and pa.types.is_float64(item_type) and not are_lists
    is_time = pa.types.is_temporal(item_type) and not pa.types.is_time(item_type)
    if not items.null_count or not (is_double or is_time or pa.types.is_integer(item_type)):
        return
    array = decode(dataset.select_columns([name]).with_format("arrow")[:].column(0))
    row = (array.flatten() if are_lists else array).is_null().index(True).as_py()
    if row < 0:
        return
    if are_lists:
        row = int(np.searchsorted(np.cumsum(list_lengths(array)), row, "right"))
    raise SchemaError(
        f"row {row}, field {field_name((name,))!r}: it {'contains' if are_lists else 'is'} None,"
        f" which the format {form!r} replaces by NaN or NaT of another dtype than {item_type}:"
        f" replace it, such as with {suggest_fill_value(item_type)}, or remove the format with"
        " with_format(None), where rows may be None"
    )
