"""Columns of a ``datasets.Dataset`` of Hugging Face, read from its Arrow table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import override

from lightning_memmap.schema import Field, Node, Values
from lightning_memmap.schema.fields import TO_NUMPY
from lightning_memmap.schema.kinds import Duration
from lightning_memmap.store.sources.arrow import arrow_values
from lightning_memmap.store.sources.column import Column, Rows

#: Formats whose samples have the values of the table, in a type of Python, numpy or torch.
_FORMATS = {None, "numpy", "torch"}


@dataclass(frozen=True, eq=False)
class HuggingFaceColumn(Column):
    """One column of a dataset of this column alone, which gives tables."""

    dataset: Any
    name: str

    @override
    def take(self, rows: Rows) -> Any:
        found = (
            self.dataset[rows.start : rows.stop] if isinstance(rows, range) else self.dataset[rows]
        )
        return found.column(self.name)

    @override
    def values(self, found: Any, node: Node, fields: Sequence[Field]) -> list[Values]:
        return arrow_values(found, node, fields, _wanted)


def is_dataset(dataset: Any) -> bool:
    """Whether a dataset is exactly of the class ``datasets.Dataset``."""
    kind = type(dataset)
    return kind.__module__ == "datasets.arrow_dataset" and kind.__name__ == "Dataset"


def columns_of(dataset: Any, node: Node, fields: Sequence[Field]) -> dict[str, Any] | None:
    """The columns of a dataset by name; None where its samples are made of more than the table."""
    form = dataset.format
    if form["type"] not in _FORMATS or form["format_kwargs"] or node.kind != "dict":
        return None
    # On its way through numpy, a text loses zeros at its end, and a list what it consists of.
    is_plain = form["type"] is None
    if not is_plain and any(field.is_text for field in fields):
        return None
    names = [str(key) for key in node.keys]
    if not all(_is_as_in_table(dataset.features[name]) for name in names):
        return None
    return {
        name: HuggingFaceColumn(dataset.select_columns([name]).with_format("arrow"), name)
        for name in names
    }


def _is_as_in_table(feature: Any) -> bool:
    """Whether samples have the texts and numbers that the table has, and nothing made of them."""
    if isinstance(feature, dict):
        return all(map(_is_as_in_table, feature.values()))
    kind = type(feature).__name__
    if kind in ("List", "LargeList", "Sequence"):
        return _is_as_in_table(feature.feature)
    return kind in ("Value", "ClassLabel")


def nullable_columns(dataset: Any) -> list[str]:
    """The columns of a ``datasets.Dataset`` whose samples are None in some rows."""
    if dataset.format["type"] is not None:  # NaN, or whatever a transform makes of it.
        return []
    table = dataset.data
    return [name for name in dataset.format["columns"] if table.column(name).null_count]


def _wanted(field: Field, values: np.ndarray) -> np.ndarray:
    """Values of a table as samples have them: in types of Python, or the default ones of torch."""
    wanted = TO_NUMPY[field.dtype]
    if values.dtype.kind in "mM" and isinstance(field.kind, Duration):
        times = field.kind.numpy_dtype
        return values.astype(times) if np.can_cast(values.dtype, times, "safe") else values
    kinds = values.dtype.kind + wanted.kind
    fits = kinds in ("bb", "ff") or (
        kinds in ("ii", "ui", "uu") and np.can_cast(values.dtype, wanted, "safe")
    )
    return values.astype(wanted, copy=False) if fits else values
