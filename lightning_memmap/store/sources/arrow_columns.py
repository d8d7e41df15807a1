"""Columns of Arrow tables: in memory, of Hugging Face, or read from files by row group.

Tables in memory are of polars, pyarrow, DuckDB, Lance and pandas' own types. A row is returned as a
sample has it: a number or time of numpy in the dtype of the table; a str or bytes; an array for a
list of numbers; a list for other lists; a dict for a struct; and None.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.dataset import FileSystemDataset, IpcFileFormat, ParquetFileFormat
from pyarrow.fs import LocalFileSystem
from typing_extensions import override

from lightning_memmap.errors import DatasetError, SchemaError, describe_error
from lightning_memmap.integers import Integers, group_of
from lightning_memmap.schema.fields import field_name
from lightning_memmap.schema.stack import Branch
from lightning_memmap.schema.structure import Node
from lightning_memmap.store.sources.arrow_facts import ArrowFacts, find_facts, merge_facts
from lightning_memmap.store.sources.arrow_rows import (
    ArrowRows,
    cast_column,
    check_lossless,
    common_type,
    concatenate_columns,
    decode,
    is_list,
    list_lengths,
    suggest_fill_value,
    take_column_rows,
    takeable_type,
    to_numbers,
    to_takeable,
)
from lightning_memmap.store.sources.column import TableColumn, split_by_group
from lightning_memmap.store.workers import RowIndices

#: Formats of Hugging Face whose samples have the values of the table, in types of Python, numpy or
#: torch.
_FORMATS = {None, "numpy", "torch"}
#: Rows of a fragment of Lance that are read at once.
_LANCE_ROWS = 2**16
#: Returns the columns to keep, from all names.
Choose = Callable[[list[str]], list[str]]


class ArrowColumn(TableColumn):
    """A column of an Arrow table in memory, whose item ``i`` is row ``i`` as a sample has it."""

    def __init__(self, name: str, column: Any) -> None:
        self.name = name
        self.column = to_takeable(column)

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, row: int) -> Any:
        try:
            return ArrowRows(self.take(range(row, row + 1))).samples()[0]
        except SchemaError as error:
            raise SchemaError(f"field {field_name((self.name,))!r}: {error}") from None

    @override
    def find_facts(self) -> ArrowFacts:
        return find_facts(self.column)

    def take(self, rows: RowIndices) -> Any:
        """Return rows as an Arrow column."""
        return take_column_rows(self.column, rows)

    @override
    def rows(self, rows: RowIndices) -> Branch:
        return ArrowRows(self.take(rows))


def to_arrow_or_numpy(name: str, column: Any) -> Any:
    """Convert a column of any library to an `ArrowColumn`, or to a numpy array if it has only
    numbers or times and no None."""
    if not isinstance(column, (pa.Array, pa.ChunkedArray)):
        # pandas exports NaN as a value in a stream; pa.array() reads it as None.
        is_stream = hasattr(column, "__arrow_c_stream__") and not hasattr(column, "isna")
        try:
            column = pa.chunked_array(column) if is_stream else pa.array(column)
        except pa.ArrowException as error:
            raise TypeError(
                f"column {name!r}: Arrow can't hold its values ({describe_error(error)}): convert"
                " them to a type that Arrow has"
            ) from error
    check_lossless(name, column.type)
    arrow_column = ArrowColumn(name, column)
    plain = arrow_column.column
    if plain.null_count or isinstance(plain.type, pa.BaseExtensionType):
        return arrow_column
    numbers = to_numbers(decode(plain))
    return arrow_column if numbers is None else numbers


class RowGroup(NamedTuple):
    """Rows of a file that are read together."""

    num_rows: int
    fragment: Any
    """A fragment of `pyarrow.dataset` or Lance; or the number of the row group in the file."""
    arguments: Mapping[str, Any] = {}
    """The arguments with which a fragment returns these rows."""
    path: str = ""
    """The Parquet file, if ``fragment`` is a number."""


class RowGroups:
    """The row groups of several files with the same columns, numbered across the files.

    Args:
        files: Path, bytes and modification time in ns of each file.
        types: The Arrow type of each column, common to all files.
        groups: The row groups.
    """

    def __init__(
        self,
        files: Sequence[tuple[str, int, int | None]],
        types: dict[str, Any],
        groups: Sequence[RowGroup],
    ) -> None:
        self.files = files
        self.types = types
        self._groups = groups
        #: The row after the last one of each row group, int64 of shape (row groups,).
        self.stops = np.cumsum([group.num_rows for group in groups], dtype=np.int64)
        #: The row group that was read last for each column.
        self._cache: dict[str, tuple[int, Any]] = {}
        #: The Parquet file that was opened last. The metadata of all files may not fit into memory.
        self._opened: tuple[str, Any] = "", None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_cache": {}, "_opened": ("", None)}

    @property
    def columns(self) -> dict[str, "GroupedColumn"]:
        """The columns by name."""
        return {name: GroupedColumn(self, name) for name in self.types}

    def read(self, group: int, name: str) -> Any:
        """Read one column of a row group."""
        fragment = self._fragment(group)
        with _name_file_in_errors(getattr(fragment, "path", self.files[0][0])):
            table = fragment.to_table(columns=[name], **self._groups[group].arguments)
            column = table.column(name)
        return cast_column(to_takeable(column), self.types[name])

    def read_cached(self, group: int, name: str) -> Any:
        """Read one column of a row group, and keep it until another row group is read."""
        if name not in self._cache or self._cache[name][0] != group:
            self._cache[name] = group, self.read(group, name)
        return self._cache[name][1]

    def num_nulls(self, group: int, name: str) -> int | None:
        """Return the number of None in a flat column of a row group, if a Parquet file records
        it."""
        fragment = self._fragment(group)
        if not hasattr(fragment, "row_groups"):
            return None
        metadata = fragment.metadata.row_group(fragment.row_groups[0].id)
        chunks = (metadata.column(index) for index in range(metadata.num_columns))
        stats = next((chunk.statistics for chunk in chunks if chunk.path_in_schema == name), None)
        return None if stats is None or not stats.has_null_count else int(stats.null_count)

    def _fragment(self, group: int) -> Any:
        _, fragment, _, path = self._groups[group]
        if not path:
            return fragment
        if self._opened[0] != path:
            self._opened = path, _open_parquet_file(path)
        return self._opened[1].subset(row_group_ids=[fragment])


class GroupedColumn(ArrowColumn):
    """One column of files that are read one row group at a time."""

    def __init__(self, groups: RowGroups, name: str) -> None:
        self._groups = groups
        self.files = groups.files
        self.name = name

    @override
    def __len__(self) -> int:
        return int(self._groups.stops[-1]) if len(self._groups.stops) else 0

    @override
    def find_facts(self) -> ArrowFacts:
        arrow_type = self._groups.types[self.name]
        sizes = np.diff(self._groups.stops, prepend=0).tolist()
        facts = [ArrowFacts(arrow_type, False, False)] * (not sizes)
        for group, size in enumerate(sizes):
            num_nulls = None
            if not pa.types.is_nested(arrow_type):
                num_nulls = self._groups.num_nulls(group, self.name)
            if num_nulls is None:
                facts.append(find_facts(self._groups.read(group, self.name)))
            else:
                facts.append(ArrowFacts(arrow_type, num_nulls < size, num_nulls > 0))
        return merge_facts(facts)

    @override
    def row_groups(self) -> Integers:
        stops = self._groups.stops
        return group_of(np.diff(stops, prepend=0))

    @override
    def take(self, rows: RowIndices) -> Any:
        parts, inverse = split_by_group(rows, self._groups.stops)
        column = concatenate_columns(
            take_column_rows(self._groups.read_cached(group, self.name), group_rows)
            for group, group_rows in parts
        )
        return column if inverse is None else take_column_rows(column, inverse)


def open_parquet(path: Path, choose: Choose) -> dict[str, GroupedColumn]:
    """Open the columns of a Parquet file, or of all Parquet files below a directory by name."""
    paths = [path]
    if path.is_dir():
        files = sorted(file.relative_to(path) for file in _list_parquet_files(path))
        # Other readers skip hidden files, and names that start with "_", too.
        files = [file for file in files if not any(part[0] in "._" for part in file.parts)]
        if partitioned := [file for file in files if "=" in str(file.parent)]:
            raise ValueError(
                f"{path / partitioned[0]}: the folder names hold values of columns, which would"
                f" not be read: pass pyarrow.dataset.dataset({str(path)!r}, partitioning='hive')"
            )
        paths = [path / file for file in files]
    if not paths:
        raise FileNotFoundError(f"{path}: the directory has no file that ends in .parquet")
    states = [file.stat() for file in paths]
    types: dict[str, Any] = {}
    groups = []
    for file in paths:
        fragment = _open_parquet_file(str(file))
        schema = fragment.physical_schema
        _add_types(types, file, schema, choose(schema.names), paths[0])
        groups += [RowGroup(g.num_rows, g.id, path=str(file)) for g in fragment.row_groups]
    sizes = [(state.st_size, state.st_mtime_ns) for state in states]
    described = [(str(file), *size) for file, size in zip(paths, sizes, strict=True)]
    return RowGroups(described, types, groups).columns


def _open_parquet_file(path: str) -> Any:
    with _name_file_in_errors(path):
        fragment = ParquetFileFormat().make_fragment(path, LocalFileSystem())
        fragment.ensure_complete_metadata()
    return fragment


def _list_parquet_files(path: Path) -> Iterator[Path]:
    """Yield the Parquet files below a directory. Raises an OSError if a folder can't be listed."""

    def fail(error: OSError) -> NoReturn:
        raise error

    for folder, _, names in os.walk(path, onerror=fail):
        yield from (Path(folder, name) for name in names if name.endswith(".parquet"))


def _add_types(
    types: dict[str, Any], path: Path, schema: Any, names: list[str], first: Path
) -> None:
    """Check the columns of one more file, and widen their types to hold its values."""
    is_first = not types
    if is_first:
        types.update((name, schema.field(name).type) for name in names)
    for name, known_type in types.items():
        if schema.names.count(name) != 1:
            raise DatasetError(
                f"{path}: it has no column {name!r}, which {first} has; its columns are"
                f" {', '.join(schema.names)}"
            )
        new_type = schema.field(name).type
        check_lossless(name, new_type)
        common = common_type(takeable_type(known_type), takeable_type(new_type))
        if common is None:
            raise DatasetError(
                f"{path}: column {name!r} has type {new_type}, but {known_type} in {first}:"
                " convert one of them, so that all files share one type"
            )
        types[name] = common
    if new := [name for name in names if name not in types]:
        raise DatasetError(
            f"{path}: it has the column {new[0]!r}, but {first} doesn't: add it there, or keep only"
            " some columns with names=[...]"
        )


def open_fragments(dataset: Any, choose: Choose) -> dict[str, GroupedColumn] | None:
    """Open the columns of a dataset of pyarrow or Lance.

    None if single columns of its fragments cannot be read: other formats store rows, and a filtered
    dataset has no fragments.
    """
    groups: list[RowGroup] = []
    if isinstance(dataset, FileSystemDataset):
        is_parquet = isinstance(dataset.format, ParquetFileFormat)
        if not (is_parquet or isinstance(dataset.format, IpcFileFormat)):
            return None
        try:
            fragments = list(dataset.get_fragments())
        except ValueError:
            return None
        infos = dataset.filesystem.get_file_info(dataset.files)
        files = [(info.path, info.size, info.mtime_ns) for info in infos]
        # The schema adds the columns that the names of folders hold.
        arguments = {"schema": dataset.schema}
        for fragment in fragments:
            if is_parquet:
                parts = fragment.split_by_row_group()
                groups += [RowGroup(g.row_groups[0].num_rows, g, arguments) for g in parts]
            else:
                groups.append(RowGroup(fragment.count_rows(), fragment, arguments))
    elif hasattr(dataset, "uri") and hasattr(dataset, "version"):  # A dataset of Lance.
        files = [(str(dataset.uri), int(dataset.version), None)]
        for fragment in dataset.get_fragments():
            num_rows = fragment.count_rows()
            for start in range(0, num_rows, _LANCE_ROWS):
                count = min(_LANCE_ROWS, num_rows - start)
                groups.append(RowGroup(count, fragment, {"offset": start, "limit": count}))
    else:
        return None
    types = {}
    for name in choose(dataset.schema.names):
        check_lossless(name, dataset.schema.field(name).type)
        types[name] = takeable_type(dataset.schema.field(name).type)
    return RowGroups(files, types, groups).columns


@contextmanager
def _name_file_in_errors(path: str | Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise  # Its message has the path already.
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(
            f"{path}: it can't be read ({describe_error(error)}). If its format is not Parquet,"
            " read it with a library such as pandas.read_csv, and pass the table"
        ) from None


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
    def rows(self, rows: RowIndices) -> Branch:
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
    feature_type = type(feature).__name__
    if feature_type in ("List", "LargeList", "Sequence"):
        return _is_stored_as_is(feature.feature)
    return feature_type in ("Value", "ClassLabel")


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
