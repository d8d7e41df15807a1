"""A dataset of named columns: arrays in memory or in files, or a table of another library."""

import inspect
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_memmap.errors import DatasetError, describe_error, with_article
from lightning_memmap.store.paths import local_path

#: The method that computes or reads a lazy table, by library and class. Other tables are recognised
#: by the Arrow protocol.
_LAZY_METHODS = {
    ("polars", "LazyFrame"): "collect",
    ("pyarrow", "Dataset"): "to_table",
    ("pyarrow", "Scanner"): "to_table",
    ("duckdb", "DuckDBPyRelation"): "to_arrow_table",
}
#: The methods by which tables and columns are passed to other libraries.
_ARROW_PROTOCOL = ("__arrow_c_stream__", "__arrow_c_array__")
_LIBRARIES = ("pandas", "polars", "pyarrow", "datasets")
#: The columns in which pandas writes the index of a DataFrame.
_PANDAS_INDEX = re.compile(r"__index_level_\d+__")


class ColumnDataset(Dataset[dict[str, Any]]):
    """A map-style dataset of columns: row ``i`` is ``{name: column[i], ...}``.

    Stores are built from slices of the columns, not item by item.

    Args:
        columns: One of

            - a dict of columns, each a tensor, a numpy array or memmap, an array of h5py or zarr, a
              list, a Series of pandas or polars, an array of pyarrow, or another array with
              ``shape``, ``dtype`` and slices. All are read by position.
            - a DataFrame of pandas, or a table with the Arrow protocol (``__arrow_c_stream__``),
              such as one of polars, pyarrow or DuckDB. It is read into memory now, without a copy
              if it's in memory already.
            - the path of a Parquet file, or of a directory of Parquet files; a dataset of pyarrow
              over Parquet or IPC files, or of Lance. They are read one row group, or fragment, at a
              time, when rows are read.
        names: The columns to keep, in this order; all by default.

    Attributes:
        columns: The columns by name.

    Raises:
        TypeError: ``columns`` has another type, or a column has no rows.
        ValueError: ``columns`` is empty, columns differ in length, or ``names`` has a name twice or
            one that doesn't exist.
        DatasetError: A file can't be read.
    """

    def __init__(self, columns: Any, names: Sequence[str] | None = None) -> None:
        self.columns: dict[str, Any] = {
            name: _to_positional(name, column)
            for name, column in _columns_by_name(columns, names).items()
        }
        sizes = {name: _num_rows(name, column) for name, column in self.columns.items()}
        if not sizes:
            raise ValueError("columns is empty: pass at least one column")
        self._num_rows = next(iter(sizes.values()))
        for name, size in sizes.items():
            if size != self._num_rows:
                raise ValueError(
                    f"column {name!r} has {size} rows, but column {next(iter(sizes))!r} has"
                    f" {self._num_rows}: pass columns of one length"
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


def _columns_by_name(columns: Any, names: Sequence[str] | None) -> dict[str, Any]:
    if isinstance(columns, (str, Path)):
        # pyarrow is imported only for tables.
        from lightning_memmap.store.sources.arrow_columns import open_parquet

        return {**open_parquet(local_path(columns), partial(_choose_names, names))}
    if is_frame(columns):
        return _frame_columns(columns, names)
    if is_dict_of_splits(columns):
        raise TypeError(f"columns: {explain_non_dataset(columns)}")
    if isinstance(columns, Dataset) or _library_of(columns) == "datasets":
        raise TypeError(
            f"columns: {with_article(type(columns).__name__)} has rows already: pass it instead of"
            " the ColumnDataset"
        )
    if isinstance(columns, Mapping):
        keys = list(columns)
        # Keep all keys of a dict, even one named like an index of pandas.
        chosen = _choose_names(keys if names is None else names, keys)
        return {name: columns[name] for name in chosen}
    raise TypeError(
        f"columns: found a {type(columns).__name__}; pass a dict of arrays, a DataFrame, a pyarrow"
        " Table, the path of a Parquet file, or convert it with a method such as to_pandas()"
    )


def _frame_columns(frame: Any, names: Sequence[str] | None) -> dict[str, Any]:
    if (method := _lazy_method(frame)) == "to_table":
        # pyarrow is imported only for tables.
        from lightning_memmap.store.sources.arrow_columns import open_fragments

        if (grouped := open_fragments(frame, partial(_choose_names, names))) is not None:
            return {**grouped}
    if method is not None:
        frame = getattr(frame, method)()
    if _library_of(frame) in ("pandas", "polars"):
        return {name: frame[name] for name in _choose_names(names, list(frame.columns))}
    import pyarrow

    table = pyarrow.table(frame)
    return {name: table.column(name) for name in _choose_names(names, table.column_names)}


def _choose_names(names: Iterable[str] | None, available: Sequence[Any]) -> list[Any]:
    """Check the names of the columns to keep. Returns all by default, without pandas' index."""
    if isinstance(names, str):
        raise TypeError(f"names={names!r}: pass a list of names")
    if names is None:
        names = (name for name in available if not _PANDAS_INDEX.fullmatch(str(name)))
    chosen = list(names)
    for name in chosen:
        if available.count(name) != 1 or chosen.count(name) != 1:
            reason = "it occurs twice" if name in available else "it doesn't exist"
            raise ValueError(
                f"column {name!r}: {reason}; the columns are {', '.join(map(str, available))}"
            )
    return chosen


def _to_positional(name: str, column: Any) -> Any:
    """Convert a column so that item ``i`` is row ``i``; a Series would return label ``i``."""
    if isinstance(column, (list, tuple)):
        return _list_to_numpy(column)
    if isinstance(column, Tensor):
        return column.detach() if column.requires_grad else column
    is_dict = isinstance(column, Mapping) and not hasattr(column, "shape")  # Not a TensorDict.
    if is_dict or is_frame(column) or isinstance(column, (str, bytes)):
        raise TypeError(
            f"column {name!r}: found a {type(column).__name__}, which has no rows: pass an array,"
            " and each column of a table or dict under a separate name"
        )
    if _library_of(column) == "pandas":
        return _pandas_column(name, column)
    if _library_of(column) == "polars" and str(column.dtype) == "Object":
        # Arrow would convert Python objects to their addresses.
        raise TypeError(
            f"column {name!r}: found Python objects: convert them to a type of polars, such as"
            " String or List"
        )
    if any(map(partial(hasattr, column), _ARROW_PROTOCOL)):
        return _arrow_or_numpy(name, column)
    # A Series of a library such as Modin has iloc too.
    return np.asarray(column) if hasattr(column, "iloc") else column


def _pandas_column(name: str, series: Any) -> Any:
    """Convert a Series by position. NaN is a number in numpy's dtypes, and None in others."""
    missing = np.asarray(series.isna())
    is_numpy = isinstance(series.dtype, np.dtype)
    if hasattr(series, "sparse"):
        raise TypeError(f"column {name!r}: found sparse values: pass column.sparse.to_dense()")
    if is_numpy and (series.dtype.kind in "biufc" or not missing.any()):
        return np.asarray(series)
    if is_numpy and series.dtype == object:
        values: np.ndarray = series.to_numpy(dtype=object, copy=True)
        values[missing] = None
        return values
    return _arrow_or_numpy(name, series)


def _arrow_or_numpy(name: str, column: Any) -> Any:
    """Convert a column with pyarrow, which is imported only for tables."""
    from lightning_memmap.store.sources.arrow_columns import to_arrow_or_numpy

    return to_arrow_or_numpy(name, column)


def _list_to_numpy(values: Sequence[Any]) -> Any:
    try:
        array = np.asarray(values)
    except ValueError:  # The lists differ in length.
        array = np.empty(0, object)
    # numpy would convert numbers among texts to text, and strip trailing zeros.
    return (
        array
        if array.dtype.kind in "biufc" and array.size
        else np.fromiter(values, object, len(values))
    )


def _num_rows(name: str, column: Any) -> int:
    try:
        return int(column.shape[0]) if hasattr(column, "shape") else len(column)
    except (RuntimeError, ValueError) as error:  # Such as an array of h5py in a closed file.
        raise DatasetError(
            f"column {name!r}: it can't be read ({describe_error(error)}): keep its file open"
        ) from error
    except (TypeError, IndexError) as error:
        raise TypeError(
            f"column {name!r}: found a {type(column).__name__} without a length: pass an array or"
            " a tensor whose first dimension is the rows"
        ) from error


def is_array_like(value: Any) -> bool:
    """Return whether a value is an array of any library with at least one dimension."""
    dtype = getattr(value, "dtype", None)
    return isinstance(dtype, np.dtype) and len(getattr(value, "shape", ())) > 0


def _class_names(value: Any) -> list[tuple[str, str]]:
    """Return the library and name of the class of a value, and of its base classes."""
    return [(base.__module__.partition(".")[0], base.__name__) for base in type(value).__mro__]


def _library_of(value: Any) -> str:
    return next((library for library, _ in _class_names(value) if library in _LIBRARIES), "")


def _lazy_method(value: Any) -> str | None:
    return next((_LAZY_METHODS[key] for key in _class_names(value) if key in _LAZY_METHODS), None)


def is_frame(value: Any) -> bool:
    """Return whether a value is a table, lazy ones included."""
    python_type = type(value)  # Reading a property of the instance may be costly.
    has_columns = hasattr(python_type, "columns") or hasattr(python_type, "schema")
    is_arrow = any(map(partial(hasattr, python_type), _ARROW_PROTOCOL))
    return (has_columns and is_arrow) or _lazy_method(value) is not None


def is_hugging_face(dataset: Any) -> bool:
    """Return whether the class of a dataset is exactly ``datasets.Dataset``."""
    python_type = type(dataset)
    return python_type.__module__ == "datasets.arrow_dataset" and python_type.__name__ == "Dataset"


def is_dict_of_splits(value: Any) -> bool:
    """Return whether a value is a ``DatasetDict`` of Hugging Face, with a dataset per split."""
    names = {base.__name__ for base in type(value).__mro__}
    return isinstance(value, dict) and not names.isdisjoint({"DatasetDict", "IterableDatasetDict"})


def explain_non_dataset(value: Any) -> str | None:
    """Return why a value isn't a dataset, and what to pass instead; None if it may be one."""
    type_name = type(value).__name__
    if is_dict_of_splits(value):
        return f"a {type_name} has a dataset per split: choose one of the splits {list(value)}"
    names = list(value) if isinstance(value, dict) else []
    is_dict = bool(names) and all(isinstance(name, str) for name in names)
    if is_dict or is_frame(value):
        return (
            f"a {type_name} has columns, not rows: wrap it in lightning_memmap.ColumnDataset(...)"
        )
    if inspect.isgeneratorfunction(value):
        return f"{value.__name__} is a generator function: call it, and pass what it returns"
    if isinstance(value, type):
        return f"{value.__name__} is a class: pass an instance"
    if is_array_like(value) and not hasattr(type(value), "__len__"):  # Such as an array of zarr.
        return (
            f"{with_article(type_name)} has no length: wrap it in"
            " lightning_memmap.ColumnDataset({'x': array})"
        )
    return None
