"""A dataset of named columns: arrays in memory or in files, or a table of another library."""

import inspect
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_memmap.errors import DatasetError, SchemaError, describe_error, with_article
from lightning_memmap.schema.kinds import is_missing
from lightning_memmap.store.paths import local_path
from lightning_memmap.store.sources.column import TableColumn

#: By library and class, the method that makes a table of what is computed or read only then. Other
#: tables are known by the protocol of Arrow.
_LATER = {
    ("polars", "LazyFrame"): "collect",
    ("pyarrow", "Dataset"): "to_table",
    ("pyarrow", "Scanner"): "to_table",
    ("duckdb", "DuckDBPyRelation"): "to_arrow_table",
}
_LIBRARIES = ("pandas", "polars", "pyarrow", "datasets")
_INDEX = re.compile(r"__index_level_\d+__")


class ColumnDataset(Dataset[dict[str, Any]]):
    """A map-style dataset of columns: row ``i`` is ``{name: column[i], ...}``.

    It is stored by slices of its columns, and not item by item.

    Args:
        columns: A dict of columns, each a tensor, a numpy array or memmap, an array of h5py or
            zarr, a list, a Series of pandas or polars, an array of pyarrow, or anything else with
            ``shape``, ``dtype`` and slices, read by position; or a DataFrame of pandas, or any
            table that speaks the Arrow protocol (``__arrow_c_stream__``), such as one of polars,
            pyarrow, DuckDB or Lance; or the path of a Parquet file, or of a directory of such
            files. Parquet files are read by row groups when they are needed; other tables are read
            into memory now, without a copy where they are there.
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

    def representative_samples(self) -> list[Any]:
        """Samples that show what all have; see `lightning_memmap.store.sources`."""
        found = {name: _telling_values(column) for name, column in self.columns.items()}
        count = max(map(len, found.values()))
        with suppress(SchemaError):  # Whoever reads the row says what is wrong in it.
            every = {n: values or [self.columns[n][0]] for n, values in found.items() if count}
            return [{n: each[k % len(each)] for n, each in every.items()} for k in range(count)]
        return []


def _telling_values(column: Any) -> list[Any]:
    """Values of a column that show what all have; see `TableColumn.representative_values`."""
    if isinstance(column, TableColumn):
        return column.representative_values()
    rows = set[int]()
    if isinstance(column, np.ndarray) and column.ndim == 1:
        if column.dtype == object and set(map(type, column)) != {str}:
            rows = {*_telling_rows(list(enumerate(column)))}
        elif column.dtype.kind in "mM" and (missing := np.isnat(column)).any():
            rows = {int(missing.argmax()), int(missing.argmin())}
    return [column[row] for row in sorted(rows)]


def _telling_rows(pairs: Sequence[tuple[int, Any]]) -> Iterator[int]:
    """Of pairs of a row and what it has, the rows that show what all have."""
    given = [(row, value) for row, value in pairs if not is_missing(value)]
    yield from (row for row, _ in given[:1])
    if len(given) < len(pairs):
        yield next(row for row, value in pairs if is_missing(value))
    kinds = {type(value) for _, value in given}
    if kinds == {dict}:
        for key in given[0][1]:
            yield from _telling_rows([(row, value.get(key)) for row, value in given])
    elif kinds and kinds <= {list, tuple, np.ndarray}:
        shapes = (getattr(value, "shape", None) or [len(value)] for _, value in given)
        for sizes in zip(*shapes, strict=False):
            yield from (given[sizes.index(bound)][0] for bound in (min(sizes), max(sizes)))
        lists = ((row, value) for row, value in given if not isinstance(value, np.ndarray))
        items = ((row, item) for row, value in lists for item in value)
        # Numbers and texts in lists have no lengths of their own, and may be many.
        if (first := next(items, None)) is not None and isinstance(first[1], (list, tuple)):
            yield from _telling_rows([first, *items])


def _columns(given: Any, names: Sequence[str] | None) -> dict[str, Any]:
    if isinstance(given, (str, Path)):
        return {**_tables().parquet_columns(local_path(given), partial(_chosen, names))}
    if is_frame(given):
        method = _method_of(given)
        frame = getattr(given, method)() if method else given
        if _library(frame) in ("pandas", "polars"):
            return {name: frame[name] for name in _chosen(names, list(frame.columns))}
        table = _tables().pa.table(frame)
        return {name: table.column(name) for name in _chosen(names, table.column_names)}
    if is_dict_of_splits(given):
        raise TypeError(f"columns: {explain_non_dataset(given)}")
    if isinstance(given, Dataset) or _library(given) == "datasets":
        raise TypeError(
            f"columns: {with_article(type(given).__name__)} has rows already: give it in place of"
            " the ColumnDataset"
        )
    if isinstance(given, Mapping):
        return {name: given[name] for name in _chosen(given if names is None else names, [*given])}
    raise TypeError(
        f"columns: found a {type(given).__name__}; give a dict of arrays, a DataFrame, a pyarrow"
        " Table, the path of a Parquet file, or what your library makes of it, such as to_pandas()"
    )


def _chosen(names: Iterable[str] | None, found: Sequence[Any]) -> list[Any]:
    """The names of the columns to use, in order: all, or those that a user gives."""
    if isinstance(names, str):
        raise TypeError(f"names={names!r}: give a list of names")
    # The index of a DataFrame, which pandas writes beside the columns, is not one of them.
    usual = (name for name in found if not _INDEX.fullmatch(str(name)))
    wanted = list(usual if names is None else names)
    for name in wanted:
        if found.count(name) != 1 or wanted.count(name) != 1:
            what = "there is no such column" if name not in found else "it is there twice"
            raise ValueError(
                f"column {name!r}: {what}; the columns are {', '.join(map(str, found))}"
            )
    return wanted


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
    if _library(column) == "pandas":
        return _pandas_column(name, column)
    if _library(column) == "polars" and str(column.dtype) == "Object":
        # As Arrow, it would be their addresses.
        raise TypeError(
            f"column {name!r}: found Python objects: convert them to a type of polars, such as"
            " String or List"
        )
    if hasattr(column, "__arrow_c_stream__") or hasattr(column, "__arrow_c_array__"):
        return _tables().arrow_column(name, column)
    # A Series of yet another library.
    return np.asarray(column) if hasattr(column, "iloc") else column


def _pandas_column(name: str, series: Any) -> Any:
    """A column of pandas, in the order of its rows. In those of numpy's types, NaN is a number."""
    missing = np.asarray(series.isna())
    is_plain = isinstance(series.dtype, np.dtype)
    if hasattr(series, "sparse"):
        raise TypeError(f"column {name!r}: found sparse values: give .sparse.to_dense() of it")
    if is_plain and (series.dtype.kind in "biufc" or not missing.any()):
        return np.asarray(series)
    if is_plain and series.dtype == object:
        values: np.ndarray = series.to_numpy(dtype=object, copy=True)
        values[missing] = None
        return values
    return _tables().arrow_column(name, series)


def _tables() -> Any:
    """What needs pyarrow, which is imported only for tables."""
    from lightning_memmap.store.sources import tables

    return tables


def _list_to_numpy(values: Sequence[Any]) -> Any:
    try:
        array = np.asarray(values)
    except ValueError:  # They differ in length.
        array = np.empty(0, object)
    # An array of text would make text of numbers, and cut off zeros at the end.
    return (
        array
        if array.dtype.kind in "biufc" and array.size
        else np.fromiter(values, object, len(values))
    )


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


def is_array_like(values: Any) -> bool:
    """Whether this is an array of whatever library, whose first dimension is the rows."""
    dtype = getattr(values, "dtype", None)
    return isinstance(dtype, np.dtype) and len(getattr(values, "shape", ())) > 0


def _classes(value: Any) -> list[tuple[str, str]]:
    """The library and the name of the class of a value, and of those that it is derived from."""
    return [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(value).__mro__]


def _library(value: Any) -> str:
    return next((name for name, _ in _classes(value) if name in _LIBRARIES), "")


def _method_of(value: Any) -> str | None:
    return next((_LATER[each] for each in _classes(value) if each in _LATER), None)


def is_frame(value: Any) -> bool:
    """Whether a value is a table, or will be one when it is computed or read."""
    kind = type(value)  # Of an instance, a property may be costly.
    has_columns = hasattr(kind, "columns") or hasattr(kind, "schema")
    is_arrow = hasattr(kind, "__arrow_c_stream__") or hasattr(kind, "__arrow_c_array__")
    return (has_columns and is_arrow) or _method_of(value) is not None


def is_dict_of_splits(value: Any) -> bool:
    """Whether a value is a ``DatasetDict`` of Hugging Face, whose entries are datasets."""
    kinds = ("DatasetDict", "IterableDatasetDict")
    return isinstance(value, dict) and any(kind.__name__ in kinds for kind in type(value).__mro__)


def explain_non_dataset(value: Any) -> str | None:
    """What to give in place of a value that is no dataset; None where it may be one."""
    kind = type(value).__name__
    if is_dict_of_splits(value):
        return f"a {kind} has a dataset for each split: choose one of the splits {list(value)}"
    names = list(value) if isinstance(value, dict) else []
    is_dict = bool(names) and all(isinstance(name, str) for name in names)
    if is_dict or is_frame(value):
        return f"a {kind} has columns and no rows: give lightning_memmap.ColumnDataset(...) of it"
    if inspect.isgeneratorfunction(value):
        return f"{value.__name__} is a generator function: call it, and give what it returns"
    if isinstance(value, type):
        return f"{value.__name__} is a class: give an instance of it"
    if is_array_like(value) and not hasattr(type(value), "__len__"):  # As of zarr.
        return (
            f"{with_article(kind)} has no length: give lightning_memmap.ColumnDataset({{'x': it}})"
        )
    return None
