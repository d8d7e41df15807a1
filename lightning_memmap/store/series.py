"""Series: rows of a store that are cut into windows along their first dimension."""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_memmap.sampling import Fields, Integers, Shards, WindowShards
from lightning_memmap.schema import Form, Windows
from lightning_memmap.store.columns import ItemRows, OpenColumn
from lightning_memmap.store.store import Store


class Series(NamedTuple):
    """Where series lie in the memory of a store."""

    begins: Integers
    """The step of the memory at which each begins, int64 of shape (series,)."""
    steps: Integers
    """Steps of each, int64 of shape (series,)."""


def division_of(store: Store, variable: Mapping[str, Form]) -> Callable[[Shards], Shards] | None:
    """What divides the rows of a store, or the windows over them, into shards.

    Args:
        store: The store.
        variable: The form of fields by name.

    Returns:
        A function of the shards of rows; None where these are what a sampler orders: no field is
        cut into windows, and the store is one.

    Raises:
        ValueError: A field cannot be cut into windows, or fields are cut in different ways.
    """
    forms = {name: form for name, form in variable.items() if isinstance(form, Windows)}
    if not forms:
        return store.shards_of if store.has_gaps else None
    first, form = next(iter(forms.items()))
    fields = {field.name: field for field in store.schema.fields}
    for name, other in forms.items():
        if (other.length, other.stride) != (form.length, form.stride):
            raise ValueError(
                f"variable: {other} for field {name!r}, and {form} for field {first!r}: a row of a"
                " batch is one window, so give all of them the same length and stride"
            )
        if name not in fields:
            raise ValueError(
                f"variable: in the store, {store.schema.why_no_field(name)}: leave it out"
            )
        field = fields[name]
        if field.is_text or field.num_variable > 1 or not field.shape:
            raise ValueError(
                f"variable: field {name!r} is {field.kind if field.is_text else field}, which"
                " cannot be cut into windows: that needs rows of numbers of which no dimension but"
                " the first differs; store text as its bytes, uint8"
            )

    def divide(shards: Shards) -> Shards:
        shards = store.shards_of(shards)
        steps = read_series(store, tuple(forms), shards).steps
        all_steps = None
        if shards.subset is not None:
            every = store.shards_of(Shards(store.num_rows, shards.num_shards))
            places = every.locate(range(store.num_rows))
            all_steps = read_series(store, (first,), every).steps[places]
        return WindowShards.of(shards, tuple(forms), steps, form.length, form.stride, all_steps)

    return divide


def read_series(store: Store, fields: tuple[str, ...], shards: Shards) -> Series:
    """Find the series that rows of a store are. No step is read.

    Args:
        store: The store.
        fields: The names of the fields that are cut into windows.
        shards: The rows, and the shards that they are divided into.

    Returns:
        The series in the order of a file of these rows, shard after shard.

    Raises:
        ValueError: The fields differ in the steps of a row.
        StoreError: The index of the store is damaged.
    """
    homes, offsets = shards.all_offsets()
    places = store.in_memory(shards.locations_in(store.manifest.shards, homes, offsets))
    # Of a store at a URL, all shards are fetched: a few bytes of each row are needed.
    opened = [*chain(*(store.provide([name], range(store.num_shards)) for name in fields))]
    found = [_series(column, places) for column in opened]
    for name, other in zip(fields, found, strict=True):
        wrong = np.flatnonzero((other.steps != found[0].steps) | (other.begins != found[0].begins))
        if len(wrong):
            row = int(shards.dataset_rows(homes[wrong[:1]], offsets[wrong[:1]])[0])
            raise ValueError(
                f"variable: up to row {row}, field {name!r} has other steps than field"
                f" {fields[0]!r}: fields that are cut into windows together need as many in each"
                " row; store what differs as another field, and leave it out of the windows"
            )
    return found[0]


def _series(column: OpenColumn, places: Integers) -> Series:
    if isinstance(column, ItemRows):
        begins, sizes = column.at(places)
        return Series(begins, sizes[:, 0])
    size = column.tensor.shape[1]
    return Series(places * size, np.full_like(places, size))


def steps_of(column: OpenColumn) -> Tensor:
    """The steps of all rows of a column, one after the other.

    Args:
        column: Its rows are series.

    Returns:
        A mapped tensor of shape (steps, *step shape).
    """
    if isinstance(column, ItemRows):
        return column.items
    return column.tensor.as_subclass(Tensor).flatten(0, 1)


class _WindowFields:
    """The fields of series, with an entry for each window."""

    def __init__(self, series: Fields, shards: WindowShards) -> None:
        self._series, self._shards = series, shards

    @property
    def num_rows(self) -> int:
        return self._shards.num_rows

    def values(self, field: str, rows: Integers | None = None) -> NDArray[Any]:
        series = self._all_series
        found, windows = np.unique(series if rows is None else series[rows], return_inverse=True)
        return self._series.values(field, found)[windows]

    def given(self, field: str) -> NDArray[np.bool_]:
        return self._series.given(field)[self._all_series]

    def lengths(self, field: str) -> Integers:
        if field in self._shards.fields:
            raise ValueError(f"field {field!r}: it is cut into windows, which all have one length")
        return self._series.lengths(field)[self._all_series]

    @property
    def _all_series(self) -> Integers:
        """The row of the store that each window is of."""
        return self._shards.stored_rows(np.arange(self.num_rows, dtype=np.int64))


def fields_of(store: Store, shards: Shards) -> Fields:
    """The fields of what a sampler orders.

    Args:
        store: The store.
        shards: Its rows or the windows over them, divided into shards.

    Returns:
        The store itself for rows. For windows, each has the values of its series.
    """
    return _WindowFields(store, shards) if isinstance(shards, WindowShards) else store


def windows_over(steps: Tensor, length: int) -> Tensor:
    """All windows over steps, as a view.

    Args:
        steps: Of shape (steps, *step shape), contiguous.
        length: Steps of a window.

    Returns:
        Of shape (steps - length + 1, length, *step shape): element ``i`` begins at step ``i``.
    """
    stride = steps.stride()
    shape = (max(0, len(steps) - length + 1), length, *steps.shape[1:])
    return torch.as_strided(steps, shape, (stride[0], *stride), steps.storage_offset())
