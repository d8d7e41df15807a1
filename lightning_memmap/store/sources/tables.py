"""Columns of Arrow tables: of polars, pyarrow, DuckDB, Lance, pandas' own types, Parquet files and
Hugging Face.

A row of a column is what a sample has: a number or time of numpy, in the dtype of the table; a str
or bytes; an array for a list of numbers; a list for other lists; a dict for a struct; and None. One
of Hugging Face has Python's own numbers and lists.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow.dataset import dataset
from pyarrow.parquet import ParquetFile
from typing_extensions import override

from lightning_memmap.errors import DatasetError, MismatchError, SchemaError, describe_error
from lightning_memmap.sampling.rows import Integers
from lightning_memmap.schema.fields import TO_NUMPY, Field, Values, field_name
from lightning_memmap.schema.kinds import Bytes, Duration, Text
from lightning_memmap.schema.stack import Branch, as_tensor, as_values, lists_as_values
from lightning_memmap.schema.structure import Node
from lightning_memmap.schema.structure import Path as Keys
from lightning_memmap.store.sources.column import TableColumn, split_by_group
from lightning_memmap.store.workers import RowNumbers

_VIEWS = (pa.ListViewType, pa.LargeListViewType)
_LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType, *_VIEWS)
_TEXTS = {
    **dict.fromkeys((pa.string(), pa.large_string()), Text()),
    **dict.fromkeys((pa.binary(), pa.large_binary()), Bytes()),
}
#: What would be lost of values of some types, and what to give in place of them.
_LOST = {
    "pandas.period": "periods that would be numbers without their unit: give .dt.to_timestamp()",
    "pandas.interval": "intervals that would lose which of their ends are closed: give a column for"
    " each end, .array.left and .array.right",
}
#: Lists that are looked at together, to find the shortest and the longest.
_TOLD_ROWS = 2**14
#: Formats of Hugging Face whose samples have the values of the table, in a type of Python, numpy or
#: torch.
_FORMATS = {None, "numpy", "torch"}


class ArrowRows(Branch):
    """Rows of a column."""

    def __init__(self, array: Any, *, shape: Any = None, are_python: bool = False) -> None:
        #: Of each row, where the type of the column has it.
        self.shape = array.type.shape if isinstance(array.type, pa.FixedShapeTensorType) else shape
        self.array, self.are_python = _one(array), are_python

    @override
    def __len__(self) -> int:
        return len(self.array)

    @override
    def present_mask(self) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = self.array.is_valid().to_numpy(zero_copy_only=False)
        return found

    @override
    def select(self, mask: NDArray[np.bool_]) -> Branch:
        return self._like(self.array.filter(pa.array(mask)))

    @override
    def parts(self, node: Node, path: Keys) -> Sequence[Branch]:
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
    def lists(self, path: Keys) -> tuple[Branch, Integers]:
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
            return as_values(field, numbers.reshape(-1, *self.shape))
        if is_list:
            return lists_as_values(field, numbers, _lengths(array))
        return as_values(field, numbers)

    def _like(self, array: Any) -> "ArrowRows":
        return ArrowRows(array, shape=self.shape, are_python=self.are_python)

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
        array = array.fill_null(_zero(array.type)[0])
    numbers: np.ndarray = array.to_numpy(zero_copy_only=False)
    return numbers


def _zero(kind: Any) -> Any:
    """An array of one value, which is zero or has no bytes, of numbers, times, texts or structs."""
    if pa.types.is_struct(kind):
        return pa.StructArray.from_arrays([_zero(field.type) for field in kind], fields=list(kind))
    zeros = [pa.py_buffer(bytes(16))] * (2 if kind in _TEXTS else 1)
    return pa.Array.from_buffers(kind, 1, [None, *zeros])


def _filler(kind: Any) -> str:
    """What may take the place of None among numbers or times, for messages."""
    return "NaN" if pa.types.is_floating(kind) else str(_zero(kind)[0])


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
    given = rows.present_mask().tolist()
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
    def representative_values(self) -> list[Any]:
        short, found = ArrowColumn(self.name, self.told()), list[Any]()
        for row in range(len(short)):
            with suppress(SchemaError):  # Whoever reads the row names it.
                found.append(short[row])
        return found

    def told(self) -> Any:
        """The values of `representative_values`, as a column of Arrow."""
        return _told(self.column)

    def take(self, rows: RowNumbers) -> Any:
        """Some rows, as a column of Arrow."""
        return _take(self.column, rows)

    @override
    def rows(self, rows: RowNumbers) -> Branch:
        return ArrowRows(self.take(rows))


def _told(column: Any, among: Integers | None = None) -> Any:
    """The values of a column, or of some of its rows, that show what all of these have; see
    `TableColumn.representative_values`."""
    kind = column.type
    rows = _telling_rows(column) if among is None else _telling_rows_among(column, among)
    found = _joined((column.slice(row, 1) for row in sorted({*rows})), kind)
    is_empty_list = _is_list(kind) and len(found) > found.null_count
    if is_empty_list and not len(pc.list_flatten(found)):
        # Its type alone tells what a list would have; one of numbers is an array of that type.
        item = kind.value_type
        if item in _TEXTS or pa.types.is_struct(item):
            with suppress(ValueError):  # Parts of the structs are none of these.
                one = pa.array([_zero(item).to_pylist()], kind)
                found = pa.chunked_array([*found.chunks, one])
    return found


def _telling_rows(column: Any) -> Iterator[int]:
    """The rows of a column that show what all have, and of structs and lists their parts."""
    given = None
    if column.null_count:
        is_given = column.is_valid().to_numpy()
        given = np.flatnonzero(is_given)
        yield from (int(is_given.argmin()), *given[:1].tolist())
    if pa.types.is_struct(column.type):
        structs = column if given is None else column.drop_null()
        for index, field in enumerate(column.type):
            parts = [chunk.field(index) for chunk in structs.chunks]
            rows = [*_telling_rows(pa.chunked_array(parts, field.type))]
            yield from rows if given is None else given[rows].tolist()
    elif _is_list(column.type) and not pa.types.is_fixed_size_list(column.type):
        sizes = pc.list_value_length(column)
        bounds = pc.min_max(sizes).values()
        yield from (sizes.index(bound).as_py() for bound in bounds if bound.is_valid)
        if rows := [*_telling_rows(pc.list_flatten(column))]:
            yield from np.searchsorted(np.cumsum(_lengths(column)), rows, side="right").tolist()


def _telling_rows_among(column: Any, rows: Integers) -> Iterator[int]:
    """Yield those of some rows that show what these have. Texts and bytes are not read."""
    if _is_list(column.type):
        for first in range(0, len(rows), _TOLD_ROWS):
            some = rows[first : first + _TOLD_ROWS]
            yield from some[[*_telling_rows(_take(column, some))]].tolist()
        return
    is_given = column.is_valid().to_numpy()[rows]
    given = rows[is_given]
    if len(given) < len(rows):
        yield from (int(rows[is_given.argmin()]), *given[:1].tolist())
    if pa.types.is_struct(column.type):
        for index, field in enumerate(column.type):
            parts = [chunk.field(index) for chunk in column.chunks]
            yield from _telling_rows_among(pa.chunked_array(parts, field.type), given)


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
    if (lost := _LOST.get(getattr(kind, "extension_name", ""))) is not None:
        raise TypeError(f"column {name!r}: found {kind.extension_name}, {lost}, or .astype(str)")


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


def _common_type(one: Any, other: Any) -> Any:
    """A type that has the values of two plain types in the same meaning; None where none has."""
    types = pa.types
    if one == other or types.is_null(other):
        return one
    if types.is_null(one):
        return other
    if types.is_dictionary(one) or types.is_dictionary(other):
        values = (each.value_type if types.is_dictionary(each) else each for each in (one, other))
        return _common_type(*values)
    for small, large in ((pa.string(), pa.large_string()), (pa.binary(), pa.large_binary())):
        if {one, other} <= {small, large}:
            return large
    if types.is_struct(one) and types.is_struct(other):
        if sorted(field.name for field in one) != sorted(field.name for field in other):
            return None
        kinds = [_common_type(field.type, other.field(field.name).type) for field in one]
        pairs = zip(one, kinds, strict=True)
        return None if None in kinds else pa.struct([(field.name, kind) for field, kind in pairs])
    are_lists = _is_list(one) and _is_list(other)
    if not are_lists or isinstance(one, _VIEWS) or isinstance(other, _VIEWS):
        return None
    if (item := _common_type(one.value_type, other.value_type)) is None:
        return None
    are_fixed = types.is_fixed_size_list(one) and types.is_fixed_size_list(other)
    if are_fixed and one.list_size == other.list_size:
        return pa.list_(item, one.list_size)
    return pa.large_list(item)


def _cast(column: Any, kind: Any) -> Any:
    """A column in a type that `_common_type` has found for it."""
    if column.type == kind:
        return column
    if not (pa.types.is_struct(kind) and pa.types.is_struct(column.type)):
        return column.cast(kind)
    # By the names of its fields, which may have another order.
    chunks = []
    for chunk in column.chunks:
        parts = [pa.chunked_array([chunk.field(field.name)]) for field in kind]
        cast = [_cast(part, field.type) for part, field in zip(parts, kind, strict=True)]
        arrays = [pa.concat_arrays(part.chunks) for part in cast]
        chunks.append(pa.StructArray.from_arrays(arrays, fields=[*kind], mask=chunk.is_null()))
    return pa.chunked_array(chunks, kind)


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
        within = sorted(each.relative_to(path) for each in _files_below(path))
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


def _files_below(path: Path) -> Iterator[Path]:
    """The Parquet files in and below a directory, all of whose folders can be listed."""

    def fail(error: OSError) -> NoReturn:
        raise error

    for folder, _, names in os.walk(path, onerror=fail):
        yield from (Path(folder, name) for name in names if name.endswith(".parquet"))


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
        self._are_plain: dict[str, bool] = {}
        for path in paths:
            file = self._open(path)
            schema, counts = file.schema_arrow, range(file.num_row_groups)
            if not self.kinds:
                self.kinds = {name: schema.field(name).type for name in choose(schema.names)}
            for name, kind in self.kinds.items():
                self._check_name(path, schema, name)
                _check_type(name, schema.field(name).type)
                self.kinds[name] = self._common(path, name, kind, schema.field(name).type)
            if more := [name for name in choose(schema.names) if name not in self.kinds]:
                raise DatasetError(
                    f"{path}: it has the column {more[0]!r}, which {paths[0]} does not have: add it"
                    " there, or leave it out with names=[...], the columns to keep"
                )
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

    def _check_name(self, path: Path, schema: Any, name: str) -> None:
        if schema.names.count(name) != 1:
            raise DatasetError(
                f"{path}: it has no column {name!r}, which {self.files[0][0]} has; its columns are"
                f" {', '.join(schema.names)}"
            )

    def _common(self, path: Path, name: str, kind: Any, other: Any) -> Any:
        """The type of a column in all files up to this one."""
        is_plain = kind == other == _plain_type(other)
        self._are_plain[name] = self._are_plain.get(name, True) and is_plain
        if (found := _common_type(_plain_type(kind), _plain_type(other))) is None:
            raise DatasetError(
                f"{path}: column {name!r} is {other}, and {kind} in {self.files[0][0]}: give files"
                " whose columns have one type"
            )
        return found

    def read(self, group: int, name: str) -> Any:
        """One column of a row group."""
        path = self._opened(group)
        with _reading(path):
            number = self._groups[group][1]
            column = _plain(self._file[1].read_row_group(number, columns=[name]).column(name))
            return _cast(column, self.kinds[name])

    def _opened(self, group: int) -> Path:
        """Open the file of a row group, unless it is open already. Returns its path."""
        path = self._groups[group][0]
        if self._file[0] != path:
            self._file = path, self._open(path)
        return path

    def is_plain(self, name: str) -> bool:
        """Whether a column is of one type in all files, for which Arrow has all functions."""
        return self._are_plain[name]

    def num_missing(self, group: int, name: str) -> int | None:
        """How many values of a column that is not nested are None in a row group, if it says so."""
        self._opened(group)
        metadata = self._file[1].metadata.row_group(self._groups[group][1])
        columns = (metadata.column(index) for index in range(metadata.num_columns))
        stats = next((each.statistics for each in columns if each.path_in_schema == name), None)
        return None if stats is None or not stats.has_null_count else int(stats.null_count)

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
    def told(self) -> Any:
        name, kind = self.name, self._groups.kinds[self.name]
        if pa.types.is_nested(kind):
            groups = (self._groups.read(each, name) for each in range(len(self._groups.ends)))
            return _told(_joined(map(_told, groups), kind))
        if not self._groups.is_plain(name):
            return self._told_by_groups()
        files, is_given = dataset([path for path, *_ in self.files]), pc.field(name).is_valid()
        # Statistics are asked first.
        options = {"columns": [name], "use_threads": False}
        heads = (files.head(1, filter=which, **options) for which in (~is_given, is_given))
        return _joined(_plain(head.column(name)) for head in heads)

    def _told_by_groups(self) -> Any:
        """A value that is None, if there is one, and another one."""
        found, wanted = list[Any](), {True, False}
        sizes = np.diff(self._groups.ends, prepend=0).tolist()
        for group, size in enumerate(sizes):
            count = self._groups.num_missing(group, self.name) if size else 0
            possible = {True} if count == 0 else {False} if count == size else {True, False}
            if not (size and wanted & possible):
                continue
            column = self._groups.read(group, self.name)
            is_given = column.is_valid().to_numpy()
            for which in [*wanted]:
                if (is_given == which).any():
                    found.append(column.slice(int((is_given == which).argmax()), 1))
                    wanted.remove(which)
        return _joined(found, self._groups.kinds[self.name])

    @override
    def row_groups(self) -> Integers:
        ends = self._groups.ends
        return np.repeat(np.arange(len(ends), dtype=np.int64), np.diff(ends, prepend=0))

    @override
    def take(self, rows: RowNumbers) -> Any:
        groups, back = split_by_group(rows, self._groups.ends)
        taken = [_take(self._groups.column(group, self.name), within) for group, within in groups]
        joined = _joined(taken)
        return joined if back is None else _take(joined, back)


def _joined(columns: Iterable[Any], kind: Any = None) -> Any:
    """Columns, one after the other."""
    return pa.chunked_array([chunk for column in columns for chunk in column.chunks], kind)


# Hugging Face


class HuggingFaceColumn(TableColumn):
    """One column of a ``datasets.Dataset``, whose samples are made of its table alone."""

    def __init__(self, dataset: Any, name: str) -> None:
        self._table = dataset.select_columns([name]).with_format("arrow")

    @override
    def rows(self, rows: RowNumbers) -> Branch:
        found = (
            self._table[rows.start : rows.stop] if isinstance(rows, range) else self._table[rows]
        )
        return ArrowRows(found.column(0), are_python=True)


def hugging_face_samples(dataset: Any) -> list[Any]:
    """Return samples with the representative values of the table of a dataset."""
    form = dataset.format
    if form["type"] not in _FORMATS:
        return []
    for name in form["columns"] if form["type"] is not None else ():
        _check_format(dataset, name)
    columns = {name: dataset.data.column(name) for name in dataset.column_names}
    # Rows that were left out by filter() or select() stay in the table.
    kept = getattr(dataset, "_indices", None)
    among = None if kept is None else kept.column(0).to_numpy().astype(np.int64)
    if among is not None and not len(among):
        return []
    told = {name: _told(column, among) for name, column in columns.items()}
    first = 0 if among is None else int(among[0])
    rows = np.arange(max(map(len, told.values()), default=0))
    with suppress(Exception):  # Whoever reads the row says what is wrong in it.
        for name, column in told.items():
            some = column if len(column) else columns[name].slice(first, 1)
            columns[name] = some.take(pa.array(rows % len(some)))
        short = type(dataset)(pa.table(columns), info=dataset.info.copy()).with_format(
            form["type"], form["columns"], form["output_all_columns"], **form["format_kwargs"]
        )
        return [short[row] for row in range(len(short))]
    return []


def _check_format(dataset: Any, name: str) -> None:
    """Refuse None where a format gives NaN of another dtype in its place, in lists too."""
    form, column = dataset.format["type"], dataset.data.column(name)
    is_list = _is_list(column.type)
    items = pc.list_flatten(column) if is_list else column
    kind = items.type
    is_double = form == "numpy" and pa.types.is_float64(kind) and not is_list
    is_time = pa.types.is_temporal(kind) and not pa.types.is_time(kind)
    if not items.null_count or not (is_double or is_time or pa.types.is_integer(kind)):
        return
    found = _one(dataset.select_columns([name]).with_format("arrow")[:].column(0))
    row = (found.flatten() if is_list else found).is_null().index(True).as_py()
    if row >= 0:
        row = int(np.searchsorted(np.cumsum(_lengths(found)), row, "right")) if is_list else row
        raise SchemaError(
            f"row {row}, field {field_name((name,))!r}: it {'has' if is_list else 'is'} None, for"
            f" which the format {form!r} gives NaN or NaT of another dtype than {kind}: fill it,"
            f" such as with {_filler(kind)}, or give the dataset without a format,"
            " with_format(None), where rows may be None"
        )


def hugging_face_columns(dataset: Any, node: Node) -> dict[str, HuggingFaceColumn] | None:
    """The columns of a dataset by name; None where its samples are made of more than the table."""
    form = dataset.format
    if form["type"] not in _FORMATS or form["format_kwargs"] or node.kind != "dict":
        return None
    # On its way through numpy, a text loses zeros at its end, and a list what it consists of.
    if form["type"] is not None and any(field.is_text for field in node.fields):
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
