"""Columns of Arrow tables: of polars, pyarrow, DuckDB, Lance, pandas' own types, Parquet files and
Hugging Face.

A row of a column is what a sample has: a number or time of numpy, in the dtype of the table; a str
or bytes; an array for a list of numbers; a list for other lists; a dict for a struct; and None. One
of Hugging Face has Python's own numbers and lists.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow.dataset import dataset
from pyarrow.parquet import ParquetFile
from typing_extensions import override

from lightning_memmap.errors import DatasetError, MismatchError, SchemaError, describe_error
from lightning_memmap.sampling import Integers
from lightning_memmap.schema import Field, Node, Values
from lightning_memmap.schema.fields import TO_NUMPY, field_name
from lightning_memmap.schema.kinds import Bytes, Duration, Text
from lightning_memmap.schema.stack import Column, as_tensor, fit, fit_lists
from lightning_memmap.schema.structure import Path as Keys
from lightning_memmap.store.sources.column import Extents, TableColumn, by_piece, join_extents
from lightning_memmap.store.workers import RowNumbers

_VIEWS = (pa.ListViewType, pa.LargeListViewType)
_LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType, *_VIEWS)
_TEXTS = {
    **dict.fromkeys((pa.string(), pa.large_string()), Text()),
    **dict.fromkeys((pa.binary(), pa.large_binary()), Bytes()),
}
#: Formats of Hugging Face whose samples have the values of the table, in a type of Python, numpy or
#: torch.
_FORMATS = {None, "numpy", "torch"}


class ArrowRows(Column):
    """Rows of a column."""

    def __init__(self, array: Any, *, are_python: bool = False) -> None:
        self.shape = array.type.shape if isinstance(array.type, pa.FixedShapeTensorType) else None
        self.array, self.are_python = _one(array), are_python

    @override
    def __len__(self) -> int:
        return len(self.array)

    @override
    def given(self) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = self.array.is_valid().to_numpy(zero_copy_only=False)
        return found

    @override
    def where(self, given: NDArray[np.bool_]) -> Column:
        return self._like(self.array.filter(pa.array(given)))

    @override
    def parts(self, node: Node, path: Keys) -> Sequence[Column]:
        array, keys = self._whole(), list(map(str, node.keys))
        if node.kind == "dict" and pa.types.is_struct(array.type):
            names = [field.name for field in array.type]
            if sorted(names) == sorted(keys):
                return [self._like(array.field(names.index(key))) for key in keys]
        elif node.is_list and _is_list(array.type) and (_lengths(array) == len(keys)).all():
            places = np.arange(len(array) * len(keys)).reshape(len(array), len(keys))
            items = array.flatten()
            return [self._like(items.take(pa.array(column))) for column in places.T]
        raise MismatchError(f"found {array.type}")

    @override
    def lists(self, path: Keys) -> tuple[Column, Integers]:
        array = self._whole()
        if not _is_list(array.type):
            raise MismatchError(f"found {array.type}")
        return self._like(array.flatten()), _lengths(array)

    @override
    def leaves(self, field: Field) -> Values:
        array = self._whole()
        if field.is_text:
            if _TEXTS.get(array.type) != field.kind:
                raise MismatchError(f"found {array.type}")
            return _texts(array)
        is_list = _is_list(array.type)
        numbers = _numbers_of_lists(array) if is_list else _numbers(array)
        if numbers is None:
            raise MismatchError(f"found {array.type}")
        if self.are_python:
            numbers = _as_python(field, numbers)
        if self.shape is not None:
            return fit(field, numbers.reshape(-1, *self.shape))
        return fit_lists(field, numbers, _lengths(array)) if is_list else fit(field, numbers)

    def _like(self, array: Any) -> "ArrowRows":
        found = ArrowRows(array, are_python=self.are_python)
        found.shape = self.shape
        return found

    def _whole(self) -> Any:
        if self.array.null_count:
            raise MismatchError("rows have no value")
        return self.array


def _is_list(kind: Any) -> bool:
    return isinstance(kind, _LISTS)


def _one(column: Any) -> Any:
    """One array of a column in pieces, with the values that an encoding stands for."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.DictionaryArray):
        return array.dictionary_decode()
    if isinstance(array, pa.RunEndEncodedArray):
        return pc.run_end_decode(array)
    if not isinstance(array, pa.ExtensionArray):
        return array
    is_bool = array.type.extension_name == "arrow.bool8"
    return array.storage.cast(pa.bool_()) if is_bool else array.storage


def _numbers(array: Any) -> np.ndarray | None:
    """Numbers or times, of any value where they are missing; None for anything else."""
    if not pa.types.is_primitive(array.type) or pa.types.is_time(array.type):
        return None
    if array.null_count:
        array = array.fill_null(_zero(array.type))
    numbers: np.ndarray = array.to_numpy(zero_copy_only=False)
    return numbers


def _zero(kind: Any) -> Any:
    """Zero of a type of numbers or times, as a scalar."""
    return pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(bytes(16))])[0]


def _filler(kind: Any) -> str:
    """What may take the place of None among numbers or times, for messages."""
    return "NaN" if pa.types.is_floating(kind) else str(_zero(kind))


def _numbers_of_lists(array: Any) -> np.ndarray | None:
    """The numbers of all lists; None for lists of anything else. Lists of fixed length in lists are
    further dimensions of the numbers."""
    shape, items = [], _one(array.flatten())
    has_none = bool(items.null_count)
    while pa.types.is_fixed_size_list(items.type):
        shape.append(items.type.list_size)
        items = _one(items.flatten())
        has_none |= bool(items.null_count)
    numbers = _numbers(items)
    if numbers is not None and has_none:
        raise SchemaError(
            f"the table has None within a list of {items.type}, which is given as an array: fill"
            f" it in the table, such as with {_filler(items.type)}, or leave it out there"
        )
    return None if numbers is None else numbers.reshape(-1, *shape)


def _lengths(array: Any) -> Integers:
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    return np.asarray(lengths, np.int64)


def _texts(array: Any) -> Values:
    is_large = array.type in (pa.large_string(), pa.large_binary())
    _, offsets, data = array.buffers()
    width = np.dtype(np.int64 if is_large else np.int32)
    ends = np.frombuffer(offsets, width, len(array) + 1, array.offset * width.itemsize)
    items = np.frombuffer(data or b"", np.uint8)[ends[0] : ends[-1]]
    return Values(as_tensor(items), np.diff(ends).astype(np.int64)[:, None])


def _objects(rows: ArrowRows) -> list[Any]:
    """What samples have of rows."""
    array = rows.array
    found: Sequence[Any]
    if pa.types.is_struct(array.type):
        names = [field.name for field in array.type]
        parts = [_objects(ArrowRows(array.field(index))) for index in range(len(names))]
        found = [
            {name: part[row] for name, part in zip(names, parts, strict=True)}
            for row in range(len(array))
        ]
    elif _is_list(array.type):
        numbers, lengths = _numbers_of_lists(array), _lengths(array)
        items = _objects(ArrowRows(array.flatten())) if numbers is None else numbers
        ends = np.cumsum(lengths).tolist()
        found = [items[end - size : end] for end, size in zip(ends, lengths.tolist(), strict=True)]
        if rows.shape is not None:
            found = [row.reshape(rows.shape) if len(row) else row for row in found]
    elif (numbers := _numbers(array)) is not None:
        found = list(numbers)
    else:
        return list(array.to_pylist())
    given = rows.given().tolist()
    return [value if here else None for value, here in zip(found, given, strict=True)]


class ArrowColumn(TableColumn):
    """A column of an Arrow table in memory, whose item ``i`` is what sample ``i`` has."""

    def __init__(self, name: str, column: Any) -> None:
        self.name = name
        self.column = _plain(column)

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, row: int) -> Any:
        try:
            return _objects(ArrowRows(self.take(range(row, row + 1))))[0]
        except SchemaError as error:
            raise SchemaError(f"field {field_name((self.name,))!r}: {error}") from None

    @override
    def extents(self) -> Extents:
        return _extents(self.column)

    def take(self, rows: RowNumbers) -> Any:
        """Some rows, as a column of Arrow."""
        return _take(self.column, rows)

    @override
    def rows(self, rows: RowNumbers) -> Column:
        return ArrowRows(self.take(rows))


def _extents(column: Any, path: Keys = ()) -> Extents:
    """What all rows of a column have, and of structs their parts."""
    items, levels = column, [set[int | None]()]
    while _is_list(items.type) and not pa.types.is_fixed_size_list(items.type):
        levels[-1] |= {*pc.min_max(pc.list_value_length(items)).as_py().values()} - {None}
        items = pc.list_flatten(items)
        levels.append(set())
    if column.null_count:
        levels[0].add(None)
    found = {path: levels}
    if pa.types.is_struct(column.type):
        given = column.drop_null() if column.null_count else column
        for index, field in enumerate(column.type):
            part = pa.chunked_array([chunk.field(index) for chunk in given.chunks], field.type)
            found |= _extents(part, (*path, field.name))
    return found


def arrow_column(name: str, column: Any) -> Any:
    """A column of any library as one of Arrow, or, of numbers or times without a gap, as an array
    of numpy."""
    if not isinstance(column, (pa.Array, pa.ChunkedArray)):
        # In what pandas gives as a stream, NaN is missing.
        is_stream = hasattr(column, "__arrow_c_stream__") and not hasattr(column, "isna")
        try:
            column = pa.chunked_array(column) if is_stream else pa.array(column)
        except pa.ArrowException as error:
            raise TypeError(
                f"column {name!r}: Arrow has no such values ({describe_error(error)}): convert it"
                " to a type that it has"
            ) from error
    _check_type(name, column.type)
    found = ArrowColumn(name, column)
    kind, array = found.column.type, _one(found.column) if not found.column.null_count else None
    is_simple = array is not None and not isinstance(kind, pa.BaseExtensionType)
    numbers = _numbers(array) if is_simple else None
    return found if numbers is None else numbers


def _check_type(name: str, kind: Any) -> None:
    """Refuse what would lose its meaning as the numbers that it is kept as."""
    if getattr(kind, "extension_name", None) == "pandas.period":
        raise TypeError(
            f"column {name!r}: found {kind.extension_name}, periods that would be numbers without"
            " their unit: convert them with .dt.to_timestamp(), or with .astype(str)"
        )


def _plain(column: Any) -> Any:
    """A column, or an array, as a column of types in which rows can be taken."""
    chunked = column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])
    kind = _plain_type(chunked.type)
    return chunked if chunked.type == kind else chunked.cast(kind)


def _plain_type(kind: Any) -> Any:
    """A type in which rows can be taken: Arrow's views have few functions."""
    types = pa.types
    if types.is_string_view(kind):
        return pa.large_string()
    if types.is_binary_view(kind):
        return pa.large_binary()
    if types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _plain_type(kind.value_type), kind.ordered)
    if types.is_struct(kind):
        return pa.struct([field.with_type(_plain_type(field.type)) for field in kind])
    # A cast of views of lists takes no notice of the sizes of these.
    if not _is_list(kind) or isinstance(kind, _VIEWS):
        return kind
    item = kind.value_field.with_type(_plain_type(kind.value_type))
    if types.is_fixed_size_list(kind):
        return pa.list_(item, kind.list_size)
    return (pa.list_ if types.is_list(kind) else pa.large_list)(item)


def _take(column: Any, rows: RowNumbers) -> Any:
    if isinstance(rows, range):
        return column.slice(rows.start, len(rows))
    return column.take(pa.array(rows))


# Parquet


def parquet_columns(
    path: Path, choose: Callable[[list[str]], list[str]]
) -> dict[str, "ParquetColumn"]:
    """Open a Parquet file, or all such files in and below a directory, in the order of names."""
    paths = [path]
    if path.is_dir():
        within = sorted(each.relative_to(path) for each in path.rglob("*.parquet"))
        # As everywhere, hidden files and those that begin with "_" are no data.
        within = [each for each in within if not any(part[0] in "._" for part in each.parts)]
        if cut := [each for each in within if "=" in str(each.parent)]:
            raise ValueError(
                f"{path / cut[0]}: the names of its folders are values of columns, which are not"
                f" read: give pyarrow.dataset.dataset({str(path)!r}, partitioning='hive')"
            )
        paths = [path / each for each in within]
    if not paths:
        raise FileNotFoundError(f"{path}: the directory has no file that ends in .parquet")
    groups = _RowGroups(paths, choose)
    return {name: ParquetColumn(groups, name) for name in groups.kinds}


@contextmanager
def _reading(path: str | Path) -> Iterator[None]:
    """Name the file in an error of pyarrow, and in one of the file system."""
    try:
        yield
    except FileNotFoundError:
        raise  # It names the file.
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(
            f"{path}: it cannot be read as a Parquet file ({describe_error(error)}); read another"
            " format with a library of tables, such as pandas.read_csv, and give the table"
        ) from None


class _RowGroups:
    """The row groups of files, each of which is read as a whole."""

    def __init__(self, paths: Sequence[Path], choose: Callable[[list[str]], list[str]]) -> None:
        stats = [path.stat() for path in paths]
        self.files = [
            (str(path), stat.st_size, stat.st_mtime_ns)
            for path, stat in zip(paths, stats, strict=True)
        ]
        self._groups, self.kinds, sizes = list[tuple[Path, int]](), dict[str, Any](), list[int]()
        for path in paths:
            file = self._open(path)
            schema, counts = file.schema_arrow, range(file.num_row_groups)
            if not self.kinds:
                self.kinds = {name: schema.field(name).type for name in choose(schema.names)}
            for name, kind in self.kinds.items():
                _check_type(name, kind)
                self._check(path, schema, name, kind)
            self._groups += [(path, number) for number in counts]
            sizes += [file.metadata.row_group(number).num_rows for number in counts]
        #: Where each row group ends, in rows of all files.
        self.ends = np.cumsum(sizes, dtype=np.int64)
        #: The file, and by column the row group, that was read last.
        self._file: tuple[Path | None, Any] = None, None
        self._last: dict[str, tuple[int, Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Each process opens the files for itself.
        return {**vars(self), "_file": (None, None), "_last": {}}

    def _open(self, path: Path) -> Any:
        with _reading(path):
            return ParquetFile(path)

    def _check(self, path: Path, schema: Any, name: str, kind: Any) -> None:
        first = self.files[0][0]
        if schema.names.count(name) != 1:
            raise DatasetError(
                f"{path}: it has no column {name!r}, which {first} has; its columns are"
                f" {', '.join(schema.names)}"
            )
        found = schema.field(name).type
        if found != kind and pa.types.is_primitive(found) and pa.types.is_primitive(kind):
            raise DatasetError(
                f"{path}: column {name!r} is {found}, and {kind} in {first}: give files whose"
                " columns have one type"
            )

    def read(self, group: int, name: str) -> Any:
        """One column of a row group."""
        path, number = self._groups[group]
        if self._file[0] != path:
            self._file = path, self._open(path)
        with _reading(path):
            return _plain(self._file[1].read_row_group(number, columns=[name]).column(name))

    def column(self, group: int, name: str) -> Any:
        """One column of a row group, kept until another one is asked for."""
        if name not in self._last or self._last[name][0] != group:
            self._last[name] = group, self.read(group, name)
        return self._last[name][1]


class ParquetColumn(ArrowColumn):
    """One column of Parquet files, whose row groups are read when they are needed."""

    def __init__(self, groups: _RowGroups, name: str) -> None:
        self._groups = groups
        self.files = groups.files
        self.name = name

    @override
    def __len__(self) -> int:
        return int(self._groups.ends[-1]) if len(self._groups.ends) else 0

    @override
    def extents(self) -> Extents:
        if pa.types.is_nested(self._groups.kinds[self.name]):
            groups = range(len(self._groups.ends))
            return join_extents(_extents(self._groups.read(each, self.name)) for each in groups)
        # Statistics are asked first.
        is_missing = pc.field(self.name).is_null()
        files = (dataset(path) for path, *_ in self.files)
        counts = (file.count_rows(filter=is_missing, use_threads=False) for file in files)
        return {(): [{None} if any(counts) else set()]}

    @override
    def pieces(self) -> Integers:
        ends = self._groups.ends
        return np.repeat(np.arange(len(ends), dtype=np.int64), np.diff(ends, prepend=0))

    @override
    def take(self, rows: RowNumbers) -> Any:
        groups, back = by_piece(rows, self._groups.ends)
        taken = [_take(self._groups.column(group, self.name), within) for group, within in groups]
        joined = pa.chunked_array([chunk for column in taken for chunk in column.chunks])
        return joined if back is None else _take(joined, back)


# Hugging Face


class HuggingFaceColumn(TableColumn):
    """One column of a ``datasets.Dataset``, whose samples are made of its table alone."""

    def __init__(self, dataset: Any, name: str) -> None:
        self._table = dataset.select_columns([name]).with_format("arrow")

    @override
    def rows(self, rows: RowNumbers) -> Column:
        found = (
            self._table[rows.start : rows.stop] if isinstance(rows, range) else self._table[rows]
        )
        return ArrowRows(found.column(0), are_python=True)


def hugging_face_extents(dataset: Any) -> Extents:
    """What is known of all rows of a dataset, and of those of its table that it does not have."""
    form, found = dataset.format, Extents()
    for name in form["columns"] if form["type"] in _FORMATS else ():
        if form["type"] is not None:
            _check_format(dataset, name)
        is_as_in_table = _is_as_in_table(dataset.features[name])
        for path, levels in _extents(dataset.data.column(name), (name,)).items():
            # In a format, samples have NaN for None, and one tensor or array for lists in lists.
            if form["type"] is not None and is_as_in_table and len(levels) == 2 and len(path) == 1:
                found[path] = [levels[0] - {None}]
            elif form["type"] is None and (is_as_in_table or len(path) == 1):
                found[path] = levels if is_as_in_table else [levels[0] & {None}]
    return found


def _check_format(dataset: Any, name: str) -> None:
    """Refuse None where a format gives NaN of another dtype in its place."""
    form, column = dataset.format["type"], dataset.data.column(name)
    kind, is_double = column.type, form == "numpy" and pa.types.is_float64(column.type)
    is_time = pa.types.is_temporal(kind) and not pa.types.is_time(kind)
    if not column.null_count or not (is_double or is_time or pa.types.is_integer(kind)):
        return
    rows = dataset.select_columns([name]).with_format("arrow")[:].column(0).is_null()
    if (row := rows.index(True).as_py()) >= 0:
        raise SchemaError(
            f"row {row}, field {field_name((name,))!r}: it is None, for which the format {form!r}"
            f" gives NaN or NaT of another dtype than other rows of {kind} have: fill it, such as"
            f" with {_filler(kind)}, or give the dataset without a format, with_format(None), where"
            " rows may be None"
        )


def hugging_face_columns(
    dataset: Any, node: Node, fields: Sequence[Field]
) -> dict[str, HuggingFaceColumn] | None:
    """The columns of a dataset by name; None where its samples are made of more than the table."""
    form = dataset.format
    if form["type"] not in _FORMATS or form["format_kwargs"] or node.kind != "dict":
        return None
    # On its way through numpy, a text loses zeros at its end, and a list what it consists of.
    if form["type"] is not None and any(field.is_text for field in fields):
        return None
    if not all(_is_as_in_table(dataset.features[str(key)]) for key in node.keys):
        return None
    return {str(key): HuggingFaceColumn(dataset, str(key)) for key in node.keys}


def _is_as_in_table(feature: Any) -> bool:
    """Whether samples have the texts and numbers that the table has, and nothing made of them."""
    if isinstance(feature, dict):
        return all(map(_is_as_in_table, feature.values()))
    kind = type(feature).__name__
    if kind in ("List", "LargeList", "Sequence"):
        return _is_as_in_table(feature.feature)
    return kind in ("Value", "ClassLabel")


def _as_python(field: Field, values: np.ndarray) -> np.ndarray:
    """Values of a table as samples have them: in types of Python, or the default ones of torch."""
    wanted = field.kind.numpy_dtype if isinstance(field.kind, Duration) else TO_NUMPY[field.dtype]
    kinds = values.dtype.kind + wanted.kind
    is_safe = kinds in ("ii", "ui", "uu", "mm", "MM") and np.can_cast(values.dtype, wanted, "safe")
    return values.astype(wanted, copy=False) if is_safe or kinds in ("bb", "ff") else values
