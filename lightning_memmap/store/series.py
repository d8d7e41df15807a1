"""Series: rows of a store that are cut into windows along their first dimension, time."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_memmap.integers import Integers
from lightning_memmap.sampling.factory import Fields
from lightning_memmap.sampling.identity import FrozenArray
from lightning_memmap.sampling.rows import Rows, WindowedRows
from lightning_memmap.schema.forms import Windows
from lightning_memmap.store.open_columns import IndexedItems, MappedRows, OpenColumn
from lightning_memmap.store.store import Store


class Series(NamedTuple):
    """Series as ranges of the mapped steps of a store, in storage order."""

    starts: Integers
    """The first step of each series, int64 of shape (series,)."""
    steps: Integers
    """The number of steps of each series, int64 of shape (series,)."""


def cut_into_windows(store: Store, rows: Rows, windows: Windows | None) -> Rows:
    """Return the windows over rows, if any field is cut into windows, or else the rows."""
    if windows is None:
        return rows
    fields = {field.name: field for field in store.schema.fields}
    for name in windows.fields:
        if name not in fields:
            raise ValueError(f"windows: in the store, {store.schema.missing_field_message(name)}")
        field = fields[name]
        if field.is_text or field.num_variable > 1 or not field.shape:
            raise ValueError(
                f"windows: field {name!r} is {field.kind if field.is_text else field}, which"
                " cannot be cut into windows. Only numbers can, if no dimension but the first"
                " differs in length. Store text as its bytes, uint8."
            )

    names = tuple(windows.fields)
    length = windows.length
    stride = windows.stride
    steps = FrozenArray(read_series(store, names, rows).steps)
    all_rows = store.rows()
    all_windows = None
    if rows != all_rows:
        all_steps = FrozenArray(read_series(store, names[:1], all_rows).steps)
        all_windows = WindowedRows(all_rows, names[:1], all_steps, length, stride)
    return WindowedRows(rows, names, steps, length, stride, all_windows)


def read_series(store: Store, fields: tuple[str, ...], rows: Rows) -> Series:
    """Find the series that rows of a store are, and check that all fields agree. Reads no step."""
    file_rows = store.memory_rows(find_file_rows(rows))
    store = store.completed()
    store.download(fields=fields)
    all_series = [_find_series(store.column(name), file_rows) for name in fields]
    series = all_series[0]
    for name, other in zip(fields, all_series, strict=True):
        is_other = (other.steps != series.steps) | (other.starts != series.starts)
        if is_other.any():
            rank = np.flatnonzero(is_other)[:1]
            row = int(rows.dataset_rows(rows.subset_index_at(rank))[0])
            raise ValueError(
                f"windows: up to row {row}, field {name!r} has other numbers of steps than field"
                f" {fields[0]!r}. Fields that are cut into windows together need the same number in"
                " each row. Store the rest as another field that is not cut."
            )
    return series


def find_file_rows(rows: Rows) -> Integers:
    """Return the file rows of all rows, in storage order, int64 of shape (rows,)."""
    index = np.arange(rows.num_rows, dtype=np.int64)
    return index if rows.is_file_order else rows.file_rows(rows.subset_index_at(index))


def _find_series(column: OpenColumn, file_rows: Integers) -> Series:
    if isinstance(column, IndexedItems):
        starts, sizes = column.locate(file_rows)
        return Series(starts, sizes[:, 0])
    assert isinstance(column, MappedRows)
    num_steps = column.tensor.shape[1]
    return Series(file_rows * num_steps, np.full_like(file_rows, num_steps))


def view_steps(column: OpenColumn) -> Tensor:
    """Return the steps of all rows of a column, concatenated, as a view."""
    if isinstance(column, IndexedItems):
        return column.items
    assert isinstance(column, MappedRows)
    return column.tensor.as_subclass(Tensor).flatten(0, 1)


class _WindowFields:
    """The fields of series, with one entry per window."""

    def __init__(self, series: Fields, windows: WindowedRows) -> None:
        self._series = series
        self._windows = windows

    @property
    def num_rows(self) -> int:
        return (self._windows.all_windows or self._windows).num_rows

    @property
    def contents(self) -> dict[str, str]:
        windows = self._windows
        cut = f"{', '.join(windows.fields)} by {windows.length}, stride {windows.stride}"
        return {**self._series.contents, "windows": cut}

    def values(self, field: str, rows: Integers | None = None) -> NDArray[Any]:
        series = self._all_series if rows is None else self._all_series[rows]
        distinct_series, windows = np.unique(series, return_inverse=True)
        return self._series.values(field, distinct_series)[windows]

    def given(self, field: str) -> NDArray[np.bool_]:
        return self._series.given(field)[self._all_series]

    def lengths(self, field: str) -> Integers:
        if field in self._windows.fields:
            raise ValueError(f"field {field!r}: it is cut into windows, which all have one length")
        return self._series.lengths(field)[self._all_series]

    @property
    def _all_series(self) -> Integers:
        """The row of the store of each window."""
        return self._windows.store_rows(np.arange(self.num_rows, dtype=np.int64))


def make_fields(store: Store, rows: Rows) -> Fields:
    """Return the fields that a sampler may read: a window has the values of its series."""
    return _WindowFields(store, rows) if isinstance(rows, WindowedRows) else store


def view_windows(steps: Tensor, length: int) -> Tensor:
    """Return all windows over steps, as a view of shape (windows, length, *step shape)."""
    stride = steps.stride()
    shape = (max(0, len(steps) - length + 1), length, *steps.shape[1:])
    return torch.as_strided(steps, shape, (stride[0], *stride), steps.storage_offset())
