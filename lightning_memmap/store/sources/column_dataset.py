"""A dataset of named columns: arrays in memory or in files, or a table of another library."""

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_memmap.errors import DatasetError, describe_error
from lightning_memmap.schema.leaves import is_missing
from lightning_memmap.store.places import local_path
from lightning_memmap.store.sources import from_arrow, from_pandas, from_polars
from lightning_memmap.store.sources.field_array import NullableRows, object_array
from lightning_memmap.store.sources.names import chosen
from lightning_memmap.store.sources.parquet import ParquetColumn, parquet_columns
from lightning_memmap.store.sources.refusals import (
    as_table,
    is_dict_of_splits,
    is_frame,
    library_of,
    way_out,
)

#: What makes an array of a column, by the library that it is of.
_TO_NUMPY = {
    "pandas": from_pandas.to_numpy,
    "polars": from_polars.to_numpy,
    "pyarrow": from_arrow.to_numpy,
}


class ColumnDataset(Dataset[dict[str, Any]]):
    """A map-style dataset of columns: row ``i`` is ``{name: column[i], ...}``.

    It is stored by slices of its columns, and not item by item.

    Args:
        columns: A dict of columns, each a tensor, a numpy array or memmap, an array of h5py or
            zarr, a list, a Series of pandas or polars, an array of pyarrow, or anything else with
            ``shape``, ``dtype`` and slices, read by position; or a DataFrame of pandas or
            polars, a LazyFrame, a Table, RecordBatch or Dataset of pyarrow, or a relation of
            DuckDB; or the path of a Parquet file, or of a directory of such
            files. Parquet files are read by row groups when they are needed; other tables become
            one array per column now, without a copy where their memory allows it.
        names: The columns to keep, in this order; all of them by default.

    Attributes:
        columns: The columns by name.

    Raises:
        TypeError: ``columns`` is none of these, or a column has no rows.
        ValueError: There is no column, columns differ in length, or a name is not among them or
            there twice.
        DatasetError: A file cannot be read.
    """

    def __init__(self, columns: Any, names: Sequence[str] | None = None) -> None:
        found = _columns(columns, names)
        self.columns: dict[str, Any] = {
            name: _by_position(name, column) for name, column in found.items()
        }
        sizes = {name: _length(name, column) for name, column in self.columns.items()}
        if not sizes:
            raise ValueError("columns: there are none: give at least one")
        self._num_rows = next(iter(sizes.values()))
        for name, size in sizes.items():
            if size != self._num_rows:
                raise ValueError(
                    f"column {name!r} has {size} rows, and column {next(iter(sizes))!r} has"
                    f" {self._num_rows}: give columns of one length"
                )

    def __len__(self) -> int:
        return self._num_rows

    @override
    def __getitem__(self, row: int) -> dict[str, Any]:
        index = operator.index(row)
        if not -self._num_rows <= index < self._num_rows:
            raise IndexError(f"row {row}: the dataset has {self._num_rows} rows")
        index %= self._num_rows
        return {name: column[index] for name, column in self.columns.items()}

    @property
    def nullable(self) -> list[str]:
        """The names of the columns that have rows without a value."""
        return [name for name, column in self.columns.items() if _has_missing(column)]


def _has_missing(column: Any) -> bool:
    if isinstance(column, ParquetColumn):
        return column.has_missing
    if isinstance(column, NullableRows):
        return not column.is_given.all()
    if not isinstance(column, np.ndarray) or column.ndim != 1:
        return False
    if column.dtype.kind in "mM":
        return bool(np.isnat(column).any())
    # Of texts, the types are told sooner than the values.
    is_unsure = column.dtype == object and set(map(type, column)) != {str}
    return is_unsure and any(map(is_missing, column))


def _columns(given: Any, names: Sequence[str] | None) -> dict[str, Any]:
    if isinstance(given, (str, Path)):
        return parquet_columns(local_path(given), names)
    if is_frame(given):
        table = as_table(given)
        library = library_of(table)
        found = table.column_names if library == "pyarrow" else list(table.columns)
        return {name: _TO_NUMPY[library](table[name]) for name in chosen(names, found)}
    if is_dict_of_splits(given):
        raise TypeError(f"columns: {way_out(given)}")
    if isinstance(given, Mapping):
        return {name: given[name] for name in chosen(names, list(given))}
    raise TypeError(
        f"columns: found a {type(given).__name__}; give a dict of arrays, a DataFrame, a pyarrow"
        " Table, the path of a Parquet file, or what your library makes of it, such as to_pandas()"
    )


def _by_position(name: str, column: Any) -> Any:
    """A column whose item ``i`` is row ``i``: that of a Series is the row with the label ``i``."""
    if isinstance(column, (list, tuple)):
        return _list_to_numpy(column)
    if isinstance(column, Tensor):
        return column.detach() if column.requires_grad else column
    is_group = isinstance(column, Mapping) and not hasattr(column, "shape")  # No TensorDict.
    if is_group or is_frame(column) or isinstance(column, (str, bytes)):
        raise TypeError(
            f"column {name!r}: found a {type(column).__name__}, which has no rows: give an array,"
            " and the columns of a table or dict each under a name of its own"
        )
    if library := library_of(column):
        return _TO_NUMPY[library](column)
    # A Series of yet another library.
    return np.asarray(column) if hasattr(column, "iloc") else column


def _list_to_numpy(values: Sequence[Any]) -> np.ndarray | NullableRows:
    try:
        array = np.asarray(values)
    except ValueError:  # They differ in length.
        return object_array(values)
    if array.dtype == object and array.ndim == 1 and any(map(is_missing, values)):
        is_given = np.array([not is_missing(value) for value in values])
        known = np.asarray([value for value in values if not is_missing(value)])
        if known.ndim == 1 and known.dtype.kind in "biufc":
            rows = np.zeros(len(values), known.dtype)
            rows[is_given] = known
            return NullableRows(rows, is_given)
    # An array of text would make text of numbers, and cut off zeros at the end.
    return array if array.dtype.kind in "biufc" else object_array(values)


def _length(name: str, column: Any) -> int:
    try:
        return int(column.shape[0]) if hasattr(column, "shape") else len(column)
    except (RuntimeError, ValueError) as error:  # As of an array in a file of h5py.
        raise DatasetError(
            f"column {name!r}: it cannot be read ({describe_error(error)}): keep its file open"
        ) from error
    except (TypeError, IndexError) as error:
        raise TypeError(
            f"column {name!r}: found a {type(column).__name__} without a length: give an array or"
            " a tensor whose first dimension is the rows"
        ) from error
