"""Series: rows of a store that are cut into windows along their first dimension."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_memmap.sampling.factory import Fields
from lightning_memmap.sampling.identity import Numbers
from lightning_memmap.sampling.rows import Integers, Rows, WindowedRows
from lightning_memmap.schema.forms import Form, Windows
from lightning_memmap.store.open_columns import ItemRows, MappedRows, OpenColumn
from lightning_memmap.store.store import Store


class Series(NamedTuple):
    """Where series lie in the memory of a store."""

    begins: Integers
    """The step of the memory at which each begins, int64 of shape (series,)."""
    steps: Integers
    """Steps of each, int64 of shape (series,)."""


def windowed(store: Store, rows: Rows, variable: Mapping[str, Form]) -> Rows:
    """What a sampler orders: rows of a store, or the windows over them."""
    forms = {name: form for name, form in variable.items() if isinstance(form, Windows)}
    if not forms:
        return rows
    first, form = next(iter(forms.items()))
    fields = {field.name: field for field in store.schema.fields}
    for name, other in forms.items():
        if (other.length, other.stride) != (form.length, form.stride):
            raise ValueError(
                f"variable: {other} for field {name!r}, and {form} for field {first!r}: a row of a"
                " batch is one window, so give all of them the same length and stride"
            )
        if name not in fields:
            raise ValueError(f"variable: in the store, {store.schema.why_no_field(name)}")
        field = fields[name]
        if field.is_text or field.num_variable > 1 or not field.shape:
            raise ValueError(
                f"variable: field {name!r} is {field.kind if field.is_text else field}, which"
                " cannot be cut into windows: that needs rows of numbers of which no dimension but"
                " the first differs; store text as its bytes, uint8"
            )

    steps = Numbers(read_series(store, tuple(forms), rows).steps)
    every, whole = store.rows(), None
    if rows != every:
        all_steps = Numbers(read_series(store, (first,), every).steps)
        whole = WindowedRows(every, (first,), all_steps, form.length, form.stride)
    return WindowedRows(rows, tuple(forms), steps, form.length, form.stride, whole)


def read_series(store: Store, fields: tuple[str, ...], rows: Rows) -> Series:
    """Find the series that rows of a store are. No step is read."""
    places = store.in_memory(series_places(rows))
    store = store.completed()
    store.download(fields=fields)
    found = [_series(store.column(name), places) for name in fields]
    for name, other in zip(fields, found, strict=True):
        wrong = np.flatnonzero((other.steps != found[0].steps) | (other.begins != found[0].begins))
        if len(wrong):
            row = int(rows.dataset_rows(rows.numbers_at(wrong[:1]))[0])
            raise ValueError(
                f"variable: up to row {row}, field {name!r} has other steps than field"
                f" {fields[0]!r}: fields that are cut into windows together need as many in each"
                " row; store what differs as another field, and leave it out of the windows"
            )
    return found[0]


def series_places(rows: Rows) -> Integers:
    """The places of all rows in the order of their line, int64 of shape (rows,)."""
    index = np.arange(rows.num_rows, dtype=np.int64)
    return index if rows.is_file_order else rows.file_rows(rows.numbers_at(index))


def _series(column: OpenColumn, places: Integers) -> Series:
    if isinstance(column, ItemRows):
        begins, sizes = column.at(places)
        return Series(begins, sizes[:, 0])
    assert isinstance(column, MappedRows)
    size = column.tensor.shape[1]
    return Series(places * size, np.full_like(places, size))


def steps_of(column: OpenColumn) -> Tensor:
    """The steps of all rows of a column, one after the other."""
    if isinstance(column, ItemRows):
        return column.items
    assert isinstance(column, MappedRows)
    return column.tensor.as_subclass(Tensor).flatten(0, 1)


class _WindowFields:
    """The fields of series, with an entry for each window."""

    def __init__(self, series: Fields, windows: WindowedRows) -> None:
        self._series, self._windows = series, windows

    @property
    def num_rows(self) -> int:
        return (self._windows.whole or self._windows).num_rows

    def values(self, field: str, rows: Integers | None = None) -> NDArray[Any]:
        series = self._all_series
        found, windows = np.unique(series if rows is None else series[rows], return_inverse=True)
        return self._series.values(field, found)[windows]

    def given(self, field: str) -> NDArray[np.bool_]:
        return self._series.given(field)[self._all_series]

    def lengths(self, field: str) -> Integers:
        if field in self._windows.fields:
            raise ValueError(f"field {field!r}: it is cut into windows, which all have one length")
        return self._series.lengths(field)[self._all_series]

    @property
    def _all_series(self) -> Integers:
        """The row of the store that each window is of."""
        return self._windows.store_rows(np.arange(self.num_rows, dtype=np.int64))


def fields_of(store: Store, rows: Rows) -> Fields:
    """The fields of what a sampler orders: for windows, each has the values of its series."""
    return _WindowFields(store, rows) if isinstance(rows, WindowedRows) else store


def windows_over(steps: Tensor, length: int) -> Tensor:
    """All windows over steps, as a view."""
    stride = steps.stride()
    shape = (max(0, len(steps) - length + 1), length, *steps.shape[1:])
    return torch.as_strided(steps, shape, (stride[0], *stride), steps.storage_offset())
