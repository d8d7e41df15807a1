"""Columns of Parquet files, which are read one row group at a time."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.dataset import dataset
from pyarrow.parquet import ParquetFile
from typing_extensions import override

from lightning_memmap.errors import DatasetError, describe_error
from lightning_memmap.sampling.rows import Integers
from lightning_memmap.store.sources.arrow_column import ArrowColumn, find_representatives
from lightning_memmap.store.sources.arrow_types import (
    cast_column,
    check_lossless,
    common_type,
    concatenate_columns,
    take_column_rows,
    takeable_type,
    to_takeable,
)
from lightning_memmap.store.sources.column import split_by_group
from lightning_memmap.store.workers import RowNumbers


def open_parquet(
    path: Path, choose: Callable[[list[str]], list[str]]
) -> dict[str, "ParquetColumn"]:
    """Open a Parquet file, or all Parquet files below a directory sorted by name.

    Args:
        path: The file or directory.
        choose: Returns the columns to keep, from all names of a file.
    """
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
    groups = RowGroups(paths, choose)
    return {name: ParquetColumn(groups, name) for name in groups.types}


def _list_parquet_files(path: Path) -> Iterator[Path]:
    """Yield the Parquet files below a directory. Raises an OSError if a folder can't be listed."""

    def fail(error: OSError) -> NoReturn:
        raise error

    for folder, _, names in os.walk(path, onerror=fail):
        yield from (Path(folder, name) for name in names if name.endswith(".parquet"))


@contextmanager
def _name_file_in_errors(path: str | Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise  # Its message has the path already.
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(
            f"{path}: it can't be read as a Parquet file ({describe_error(error)}). For another"
            " format, read it with a library such as pandas.read_csv, and pass the table"
        ) from None


class RowGroups:
    """The row groups of several Parquet files, numbered across the files.

    Attributes:
        files: Path, bytes and modification time in ns of each file.
        types: The Arrow type of each column, common to all files.
        stops: The row after the last one of each row group, int64 of shape (row groups,).
    """

    def __init__(self, paths: Sequence[Path], choose: Callable[[list[str]], list[str]]) -> None:
        stats = [path.stat() for path in paths]
        self.files = [
            (str(path), stat.st_size, stat.st_mtime_ns)
            for path, stat in zip(paths, stats, strict=True)
        ]
        self.types: dict[str, Any] = {}
        #: The file of each row group, and its number in the file.
        self._groups: list[tuple[Path, int]] = []
        self._are_takeable: dict[str, bool] = {}
        sizes: list[int] = []
        for path in paths:
            file = self._open(path)
            self._add_columns(path, file.schema_arrow, choose)
            for number in range(file.num_row_groups):
                self._groups.append((path, number))
                sizes.append(file.metadata.row_group(number).num_rows)
        self.stops = np.cumsum(sizes, dtype=np.int64)
        #: The file opened last, and the row group read last for each column.
        self._file: tuple[Path | None, Any] = None, None
        self._cache: dict[str, tuple[int, Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Each process opens the files itself.
        return {**vars(self), "_file": (None, None), "_cache": {}}

    def _add_columns(
        self, path: Path, schema: Any, choose: Callable[[list[str]], list[str]]
    ) -> None:
        """Check the columns of one more file, and widen their types to hold its values."""
        if not self.types:
            self.types = {name: schema.field(name).type for name in choose(schema.names)}
        for name, known_type in self.types.items():
            self._check_name(path, schema, name)
            check_lossless(name, schema.field(name).type)
            self.types[name] = self._common_type(path, name, known_type, schema.field(name).type)
        if new := [name for name in choose(schema.names) if name not in self.types]:
            raise DatasetError(
                f"{path}: it has the column {new[0]!r}, but {self.files[0][0]} doesn't: add it"
                " there, or keep only some columns with names=[...]"
            )

    def _open(self, path: Path) -> Any:
        with _name_file_in_errors(path):
            return ParquetFile(path)

    def _check_name(self, path: Path, schema: Any, name: str) -> None:
        if schema.names.count(name) != 1:
            raise DatasetError(
                f"{path}: it has no column {name!r}, which {self.files[0][0]} has; its columns are"
                f" {', '.join(schema.names)}"
            )

    def _common_type(self, path: Path, name: str, known_type: Any, new_type: Any) -> Any:
        is_takeable = known_type == new_type == takeable_type(new_type)
        self._are_takeable[name] = self._are_takeable.get(name, True) and is_takeable
        common = common_type(takeable_type(known_type), takeable_type(new_type))
        if common is None:
            raise DatasetError(
                f"{path}: column {name!r} has type {new_type}, but {known_type} in"
                f" {self.files[0][0]}: convert one of them, so that all files share one type"
            )
        return common

    def read(self, group: int, name: str) -> Any:
        """Read one column of a row group."""
        path = self._open_file_of(group)
        with _name_file_in_errors(path):
            number = self._groups[group][1]
            table = self._file[1].read_row_group(number, columns=[name])
            return cast_column(to_takeable(table.column(name)), self.types[name])

    def read_cached(self, group: int, name: str) -> Any:
        """Read one column of a row group, and keep it until another row group is read."""
        if name not in self._cache or self._cache[name][0] != group:
            self._cache[name] = group, self.read(group, name)
        return self._cache[name][1]

    def _open_file_of(self, group: int) -> Path:
        """Open the file of a row group, if it isn't open, and return its path."""
        path = self._groups[group][0]
        if self._file[0] != path:
            self._file = path, self._open(path)
        return path

    def is_takeable(self, name: str) -> bool:
        """Return whether all files store a column in one `takeable_type`."""
        return self._are_takeable[name]

    def num_nulls(self, group: int, name: str) -> int | None:
        """Return the number of None in a flat column of a row group; None if it isn't recorded."""
        self._open_file_of(group)
        metadata = self._file[1].metadata.row_group(self._groups[group][1])
        chunks = (metadata.column(index) for index in range(metadata.num_columns))
        stats = next((chunk.statistics for chunk in chunks if chunk.path_in_schema == name), None)
        return None if stats is None or not stats.has_null_count else int(stats.null_count)


class ParquetColumn(ArrowColumn):
    """One column of Parquet files, which are read one row group at a time."""

    def __init__(self, groups: RowGroups, name: str) -> None:
        self._groups = groups
        self.files = groups.files
        self.name = name

    @override
    def __len__(self) -> int:
        return int(self._groups.stops[-1]) if len(self._groups.stops) else 0

    @override
    def representatives(self) -> Any:
        name = self.name
        arrow_type = self._groups.types[name]
        if pa.types.is_nested(arrow_type):
            groups = (self._groups.read(k, name) for k in range(len(self._groups.stops)))
            candidates = concatenate_columns(map(find_representatives, groups), arrow_type)
            return find_representatives(candidates)
        if not self._groups.is_takeable(name):
            return self._find_null_and_value()
        files = dataset([path for path, *_ in self.files])
        is_valid = pc.field(name).is_valid()
        # pyarrow skips row groups by their statistics.
        options = {"columns": [name], "use_threads": False}
        heads = (files.head(1, filter=mask, **options) for mask in (~is_valid, is_valid))
        return concatenate_columns(to_takeable(head.column(name)) for head in heads)

    def _find_null_and_value(self) -> Any:
        """Return one None and one value, as far as the column has them, as a column."""
        slices = list[Any]()
        wanted_validity = {True, False}
        sizes = np.diff(self._groups.stops, prepend=0).tolist()
        for group, size in enumerate(sizes):
            num_nulls = self._groups.num_nulls(group, self.name) if size else 0
            possible = {True, False}
            if num_nulls in (0, size):
                possible = {num_nulls == 0}
            if not (size and wanted_validity & possible):
                continue
            column = self._groups.read(group, self.name)
            is_valid = column.is_valid().to_numpy()
            for validity in [*wanted_validity]:
                if (is_valid == validity).any():
                    slices.append(column.slice(int((is_valid == validity).argmax()), 1))
                    wanted_validity.remove(validity)
        return concatenate_columns(slices, self._groups.types[self.name])

    @override
    def row_groups(self) -> Integers:
        stops = self._groups.stops
        return np.repeat(np.arange(len(stops), dtype=np.int64), np.diff(stops, prepend=0))

    @override
    def take(self, rows: RowNumbers) -> Any:
        parts, inverse = split_by_group(rows, self._groups.stops)
        column = concatenate_columns(
            take_column_rows(self._groups.read_cached(group, self.name), group_rows)
            for group, group_rows in parts
        )
        return column if inverse is None else take_column_rows(column, inverse)
